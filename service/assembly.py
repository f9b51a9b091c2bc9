"""The two sides of a part: the arrays of its engine call, taken from the request, and its place in the answer.

Pure but for the answer's arrays, which are filled as results come. Padding that remains in a call is zero, so that
nothing a client leaves there (nan, or what overflows in the projections) can reach a result.
"""

from typing import TypeVar, final

import numpy as np
from numpy.typing import NDArray

from service.artifact import Layer
from service.engine import EngineCall, EngineResult
from service.planner import Indices, Part
from service.tensors import AttentionInputs, AttentionOutput

_T = TypeVar("_T", np.float32, np.int64)


def gather(inputs: AttentionInputs, part: Part, need_weights: bool) -> EngineCall:
    """The engine call of a part. No array is copied that is wanted as the request has it."""
    keys = _keys_of(inputs.keys, inputs.extents, part)
    values = keys if inputs.values is inputs.keys else _keys_of(inputs.values, inputs.extents, part)
    queries, valid_lens = _queries_of(inputs.queries, part), _queries_of(inputs.valid_lens, part)
    return EngineCall(queries, keys, values, valid_lens, need_weights)


@final
class Assembly:
    """The answer to a request, from the results of its parts. Parts may be placed from several threads at once."""

    def __init__(self, inputs: AttentionInputs, layer: Layer, num_parts: int, need_weights: bool) -> None:
        self._inputs = inputs
        self._only: EngineResult | None = None
        self._result = None if num_parts == 1 else _room_for(inputs, layer, need_weights)

    def place(self, part: Part, result: EngineResult) -> None:
        """Takes the result of a part."""
        if self._result is None:
            self._only = result
            return
        self._result.output[part.rows, part.queries] = result.output
        if self._result.weights is not None:
            self._result.weights[part.rows, :, part.queries, : part.num_kv] = result.weights

    def answer(self) -> AttentionOutput:
        """The answer, once every part was placed; weights beyond the keys that were computed are 0.

        Raises:
            Overflow: the result does not fit.
        """
        result = self._result or self._only
        if result is None:
            raise RuntimeError("no part was placed")
        return AttentionOutput.cast(result.output, self._padded(result.weights), self._inputs.dtype)

    def _padded(self, weights: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        if weights is None:
            return None
        beyond = self._inputs.keys.shape[1] - weights.shape[-1]
        return np.pad(weights, ((0, 0), (0, 0), (0, 0), (0, beyond))) if beyond else weights


def _room_for(inputs: AttentionInputs, layer: Layer, need_weights: bool) -> EngineResult:
    batch, num_queries = inputs.valid_lens.shape
    output = np.empty((batch, num_queries, layer.num_hiddens), np.float32)
    if not need_weights:
        return EngineResult(output, None)
    return EngineResult(output, np.zeros((batch, layer.num_heads, num_queries, inputs.keys.shape[1]), np.float32))


def _queries_of(tensor: NDArray[_T], part: Part) -> NDArray[_T]:
    return np.ascontiguousarray(tensor[part.rows, part.queries])


def _keys_of(tensor: NDArray[np.float32], extents: Indices, part: Part) -> NDArray[np.float32]:
    chosen = tensor[part.rows, : part.num_kv]
    padded = np.flatnonzero(extents[part.rows] < part.num_kv)
    if not len(padded):
        return np.ascontiguousarray(chosen)
    filled = chosen.copy() if isinstance(part.rows, slice) else chosen  # indexing by an array has copied already
    lengths = extents[part.rows]
    for row in padded:
        filled[row, lengths[row] :] = 0
    return np.ascontiguousarray(filled)

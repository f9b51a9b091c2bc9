"""From a request to an engine call and back: what is computed, and what is not.

Pure. The keys of a call end at its longest valid length, and padding that remains is zero, so that nothing a client
leaves there (nan, or a number that overflows in the projections) can reach a result.
"""

import numpy as np
from numpy.typing import NDArray

from service.engine import EngineCall, EngineResult
from service.tensors import AttentionInputs, AttentionOutput


def plan(inputs: AttentionInputs, need_weights: bool) -> EngineCall:
    """The one call that answers a request.

    Its keys are trimmed to the largest extent of the batch. That is exact: a weight beyond the valid length is 0, and
    where some row has length 0 the extent is all K.
    """
    extent = int(inputs.extents.max())
    keys = _trim(inputs.keys, inputs.extents, extent)
    values = keys if inputs.values is inputs.keys else _trim(inputs.values, inputs.extents, extent)
    return EngineCall(inputs.queries, keys, values, inputs.valid_lens, need_weights)


def assemble(inputs: AttentionInputs, result: EngineResult) -> AttentionOutput:
    """The answer to a request from the result of its call; the weights of trimmed keys are 0.

    Raises:
        Overflow: the result does not fit.
    """
    weights = result.weights
    if weights is not None and weights.shape[-1] < inputs.keys.shape[1]:
        beyond = inputs.keys.shape[1] - weights.shape[-1]
        weights = np.pad(weights, ((0, 0), (0, 0), (0, 0), (0, beyond)))
    return AttentionOutput.cast(result.output, weights, inputs.dtype)


def _trim(tensor: NDArray[np.float32], extents: NDArray[np.int64], extent: int) -> NDArray[np.float32]:
    padded = np.flatnonzero(extents < extent)
    if extent == tensor.shape[1] and not len(padded):
        return tensor
    trimmed = tensor[:, :extent].copy()
    for row in padded:
        trimmed[row, extents[row] :] = 0
    return trimmed

"""Tensors on their way through the service: as the wire has them, as the layer takes them, as the answer holds them.

`AttentionInputs.parse` is the one place where tensors are judged; behind it no client error is possible.
numpy only. Shape letters: B batch, Q queries, K key-value pairs, H heads.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from service.artifact import Layer
from service.errors import EmptyAxis, InvalidDtype, InvalidShape, InvalidValidLens, MalformedBody, NonFinite, Overflow

Array = NDArray[Any]

INPUT_NAMES: Final = ("queries", "keys", "values", "valid_lens")
FLOAT_DTYPES: Final = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)}


@final
@dataclass(frozen=True, slots=True)
class WireTensors:
    """What a codec read: named arrays, where possible views of the body. Nothing about them has been judged."""

    tensors: Mapping[str, Array]


def refuse_unknown(names: Iterable[str]) -> None:
    """Raises `MalformedBody` at the first name that is no input, with the nearest one that is."""
    for name in names:
        if name not in INPUT_NAMES:
            shown = name[:64]  # a name can be as long as the body, and finding the nearest takes forty times its size
            near = difflib.get_close_matches(shown, INPUT_NAMES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise MalformedBody(f"unknown tensor {shown!r}: want {', '.join(INPUT_NAMES)}{hint}")


@final
@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors that a layer can compute on. Made by `parse` alone.

    Attributes:
        queries: (B, Q, query_size) float32, C-contiguous, finite.
        keys: (B, K, key_size) float32, C-contiguous, finite in the first `extents[b]` rows of entry b.
        values: (B, K, value_size), as keys.
        valid_lens: (B, Q) int64, in 0..K.
        extents: (B,) int64, how many keys of each entry count: K where some valid length is 0 (such a row averages
            them all), else the largest valid length.
        dtype: of the answer, which is the dtype of the queries on the wire.
    """

    queries: NDArray[np.float32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    valid_lens: NDArray[np.int64]
    extents: NDArray[np.int64]
    dtype: np.dtype[Any]

    @classmethod
    def parse(cls, wire: WireTensors, layer: Layer) -> Self:
        """Judges the tensors of a request against the layer they are for.

        Absent keys are the queries, absent values are the keys, absent valid_lens are K everywhere.

        Raises:
            MalformedBody: an unknown name, or no queries.
            InvalidDtype, EmptyAxis, InvalidShape, InvalidValidLens: as their names say.
            NonFinite: a value that would be used is nan or infinite in float32.
        """
        tensors = wire.tensors
        refuse_unknown(tensors)
        if "queries" not in tensors:
            raise MalformedBody(f"queries: missing; got {', '.join(tensors) or 'no tensor'}")
        raw_queries = tensors["queries"]
        raw_keys = tensors.get("keys", raw_queries)
        raw_values = tensors.get("values", raw_keys)
        _check_shapes(tensors, raw_queries, raw_keys, raw_values, layer)
        batch, num_queries, num_kv = (*raw_queries.shape[:2], raw_keys.shape[1])
        valid_lens = _parse_valid_lens(tensors.get("valid_lens"), batch, num_queries, num_kv)
        extents = np.where((valid_lens == 0).any(axis=1), num_kv, valid_lens.max(axis=1))
        everything = np.full(batch, num_queries)
        queries = _as_float32(raw_queries)
        _check_finite("queries", queries, raw_queries, everything)
        keys = queries if raw_keys is raw_queries else _as_float32(raw_keys)
        values = keys if raw_values is raw_keys else _as_float32(raw_values)
        if keys is not queries:
            _check_finite("keys", keys, raw_keys, extents)
        if values is not keys:
            _check_finite("values", values, raw_values, extents)
        return cls(queries, keys, values, valid_lens, extents, raw_queries.dtype.newbyteorder("="))


@final
@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """An answer. Made by `cast` alone.

    Attributes:
        output: (B, Q, num_hiddens), finite.
        weights: (B, H, Q, K) when asked for, else None.
    """

    output: Array
    weights: Array | None

    @classmethod
    def cast(cls, output: NDArray[np.float32], weights: NDArray[np.float32] | None, dtype: np.dtype[Any]) -> Self:
        """The float32 result in the dtype of the answer.

        Raises:
            Overflow: the result is not finite in float32, or does not fit the answer's dtype.
        """
        if not _is_finite(output):
            raise Overflow("output: the result overflows float32; the inputs are too large")
        answer = _cast(output, dtype)
        if dtype.itemsize < output.dtype.itemsize and not _is_finite(answer):
            largest = float(np.abs(output).max())
            raise Overflow(
                f"output: {largest:g} does not fit {dtype.name}, the dtype of the queries; send them as float32"
            )
        return cls(answer, None if weights is None else _cast(weights, dtype))

    def named(self) -> dict[str, Array]:
        """The tensors by their public names."""
        tensors = {"output": self.output}
        if self.weights is not None:
            tensors["weights"] = self.weights
        return tensors


def _check_shapes(sent: Mapping[str, Array], queries: Array, keys: Array, values: Array, layer: Layer) -> None:
    sizes = {"queries": layer.query_size, "keys": layer.key_size, "values": layer.value_size}
    tensors = {"queries": queries, "keys": keys, "values": values}
    for name, tensor in tensors.items():
        if name in sent:
            _check_float(name, tensor)
        size = tensor.shape[-1]
        if size != sizes[name]:
            origin = (
                "" if name in sent else " (absent, so the " + ("queries" if keys is queries else "keys") + " serve)"
            )
            raise InvalidShape(f"{name}{origin}: last axis is {size}, the model expects {sizes[name]}")
    for name in ("keys", "values"):
        if tensors[name].shape[0] != queries.shape[0]:
            raise InvalidShape(f"{name}: batch is {tensors[name].shape[0]}, queries have {queries.shape[0]}")
    if values.shape[1] != keys.shape[1]:
        raise InvalidShape(f"values: {values.shape[1]} of them, but {keys.shape[1]} keys; want one value a key")


def _check_float(name: str, tensor: Array) -> None:
    if tensor.dtype.newbyteorder("=") not in FLOAT_DTYPES:
        raise InvalidDtype(f"{name}: dtype is {tensor.dtype.name}, want float16, bfloat16, float32 or float64")
    if 0 in tensor.shape:
        raise EmptyAxis(f"{name}: shape is {tensor.shape}, want every axis at least 1")
    if tensor.ndim != 3:
        raise InvalidShape(f"{name}: shape {tensor.shape} has {tensor.ndim} axes, want 3: batch, length, features")


def _parse_valid_lens(raw: Array | None, batch: int, num_queries: int, num_kv: int) -> NDArray[np.int64]:
    if raw is None:
        return np.full((batch, num_queries), num_kv, np.int64)
    if raw.dtype.kind not in "iu":
        raise InvalidDtype(f"valid_lens: dtype is {raw.dtype.name}, want integers")
    if 0 in raw.shape:
        raise EmptyAxis(f"valid_lens: shape is {raw.shape}, want every axis at least 1")
    if raw.shape not in ((batch,), (batch, num_queries)):
        raise InvalidShape(f"valid_lens: shape is {raw.shape}, want ({batch},) or ({batch}, {num_queries})")
    beyond = (raw < 0) | (raw > num_kv)
    if beyond.any():
        where = tuple(int(axis) for axis in np.argwhere(beyond)[0])
        raise InvalidValidLens(f"valid_lens{list(where)}: got {raw[where]}, want 0 to {num_kv}, the number of keys")
    lens = raw.astype(np.int64)
    return np.ascontiguousarray(np.broadcast_to(lens[:, None] if lens.ndim == 1 else lens, (batch, num_queries)))


def _as_float32(tensor: Array) -> NDArray[np.float32]:
    # A float64 beyond float32 becomes infinite here and is refused, where it counts, as not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        converted: NDArray[np.float32] = np.require(tensor, np.float32, ("C", "A"))
    return converted


def _check_finite(name: str, tensor: NDArray[np.float32], raw: Array, extents: NDArray[np.int64]) -> None:
    if _is_finite(tensor):
        return
    for row, extent in enumerate(extents):
        bad = np.argwhere(~np.isfinite(tensor[row, :extent]))
        if len(bad):
            position, feature = (int(axis) for axis in bad[0])
            raise NonFinite(
                f"{name}[{row}][{position}][{feature}]: {float(raw[row, position, feature])} is not finite in float32"
            )


def _is_finite(tensor: Array) -> bool:
    # One pass without a temporary. A sum can also overflow on finite input, so only a finite sum is believed.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(tensor.sum(dtype=np.float32))) or bool(np.isfinite(tensor).all())


def _cast(tensor: NDArray[np.float32], dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return tensor.astype(dtype, copy=False)

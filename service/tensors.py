"""Tensors on their way through the service: as the wire has them, as the layer takes them, as the answer holds them.

`AttentionInputs.parse` is the one place where tensors are judged; behind it no client error is possible.
numpy only. Shape letters: B batch, Q queries, K key-value pairs, H heads; sum Q and sum K run over the batch.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from service.artifact import Layer
from service.errors import EmptyAxis, InvalidDtype, InvalidShape, InvalidValidLens, MalformedBody, NonFinite, Overflow
from service.sequences import Array, Indices, Sequences

INPUT_NAMES: Final = ("queries", "keys", "values", "valid_lens", "query_lens")
FLOAT_DTYPES: Final = {np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)}


@final
@dataclass(frozen=True, slots=True)
class WireTensors:
    """What a codec read: named arrays, where possible views of the body. Nothing about them has been judged.

    A codec whose format has lists of different lengths hands such a tensor over as `Sequences`.
    """

    tensors: Mapping[str, Array | Sequences]


def refuse_unknown(names: Iterable[str], known: tuple[str, ...] = INPUT_NAMES) -> None:
    """Raises `MalformedBody` at the first name that is no input, with the nearest one that is."""
    for name in names:
        if name not in known:
            shown = name[:64]  # a name can be as long as the body, and finding the nearest takes forty times its size
            near = sorted(difflib.get_close_matches(shown, known, n=2))
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise MalformedBody(f"unknown tensor {shown!r}: want {', '.join(known)}{hint}")


@final
@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors that a layer can compute on. Made by `parse` alone.

    Attributes:
        queries: B entries of (Q, query_size) float32, C-contiguous, finite.
        keys: B entries of (K, key_size) float32, C-contiguous, finite in the first `extents[b]` rows of entry b.
        values: B entries of (K, value_size), as keys.
        valid_lens: (sum Q,) int64, of each query, in 0..K.
        extents: (B,) int64, how many keys of each entry count: K where some valid length is 0 (such a row averages
            them all), else the largest valid length.
        shortest: (B,) int64, the least valid length of each entry.
        packed: whether the answer is one row a query, (sum Q, num_hiddens).
        dtype: of the answer, which is the dtype of the queries on the wire.
    """

    queries: Sequences
    keys: Sequences
    values: Sequences
    valid_lens: Indices
    extents: Indices
    shortest: Indices
    packed: bool
    dtype: np.dtype[Any]

    @classmethod
    def parse(cls, wire: WireTensors, layer: Layer) -> Self:
        """Judges the tensors of a request against the layer they are for.

        Absent keys are the queries, absent values are the keys, absent valid_lens are K everywhere. Queries of two
        axes are packed and want query_lens; keys and values of two axes are packed and want valid_lens (B,).

        Raises:
            MalformedBody: an unknown name, or no queries.
            InvalidDtype, EmptyAxis, InvalidShape, InvalidValidLens: as their names say.
            NonFinite: a value that would be used is nan or infinite in float32.
        """
        raw_queries, raw_keys, raw_values = _read(wire.tensors, layer)
        raw_lens = _array(wire.tensors, "valid_lens")
        valid_lens = _parse_valid_lens(raw_lens, raw_queries, raw_keys)
        shortest = extents = raw_keys.lengths
        if raw_lens is not None:
            shortest = np.minimum.reduceat(valid_lens, raw_queries.starts)
            extents = np.where(shortest == 0, extents, np.maximum.reduceat(valid_lens, raw_queries.starts))
        # A float64 beyond float32 becomes infinite here and is refused, where it counts, as not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            queries = _finite("queries", raw_queries, raw_queries.lengths)
            keys = queries if raw_keys is raw_queries else _finite("keys", raw_keys, extents)
            values = keys if raw_values is raw_keys else _finite("values", raw_values, extents)
        packed, dtype = raw_queries.length is None, raw_queries.data.dtype.newbyteorder("=")
        return cls(queries, keys, values, valid_lens, extents, shortest, packed, dtype)


@final
@dataclass(frozen=True, slots=True)
class AttentionOutput:
    """An answer. Made by `cast` alone.

    Attributes:
        output: (B, Q, num_hiddens), or (sum Q, num_hiddens) as an answer to packed queries; finite.
        weights: (B, heads, Q, K), or their mean (B, Q, K), when asked for, else None; up to the longest Q and K, 0
            beyond each entry's own.
        query_lens: (B,) int64, how many rows of a packed output each entry has; None where it is not packed.
    """

    output: Array
    weights: Array | None
    query_lens: Indices | None = None

    @classmethod
    def cast(
        cls,
        output: NDArray[np.float32],
        weights: NDArray[np.float32] | None,
        dtype: np.dtype[Any],
        query_lens: Indices | None = None,
    ) -> Self:
        """The float32 result in the dtype of the answer.

        Raises:
            Overflow: the result is not finite in float32, or does not fit the answer's dtype.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if not _is_finite(output):
                raise Overflow("output: the result overflows float32; the inputs are too large")
            answer = output.astype(dtype, copy=False)
            fits = dtype.itemsize >= output.dtype.itemsize or _is_finite(answer)
        if not fits:
            largest = float(np.abs(output).max())
            raise Overflow(
                f"output: {largest:g} does not fit {dtype.name}, the dtype of the queries; send them as float32"
            )
        return cls(answer, None if weights is None else weights.astype(dtype, copy=False), query_lens)

    def named(self) -> dict[str, Array]:
        """The tensors by their public names."""
        tensors = {"output": self.output}
        if self.weights is not None:
            tensors["weights"] = self.weights
        return tensors

    def entries(self) -> list[Array]:
        """The output of each entry, (Q, num_hiddens)."""
        if self.query_lens is None:
            return list(self.output)
        return np.split(self.output, np.cumsum(self.query_lens)[:-1])


def _read(sent: Mapping[str, Array | Sequences], layer: Layer) -> tuple[Sequences, Sequences, Sequences]:
    """Queries, keys and values as sent, their shapes and dtypes judged."""
    refuse_unknown(sent)
    if "queries" not in sent:
        raise MalformedBody(f"queries: missing; got {', '.join(sent) or 'no tensor'}")
    queries = _read_one("queries", sent["queries"], _array(sent, "query_lens"), "query_lens")
    if "query_lens" in sent and queries.length is not None:
        raise InvalidShape(
            "query_lens: only packed queries, (sum of query_lens, query_size), have them; these are padded"
        )
    _check_size("queries", queries, layer.query_size, "")
    lens = _array(sent, "valid_lens")
    keys = _read_one("keys", sent["keys"], lens, "valid_lens") if "keys" in sent else queries
    _check_size("keys", keys, layer.key_size, "" if "keys" in sent else "queries")
    values = (
        _read_one("values", sent["values"], _lens_of_values(keys, lens), "valid_lens") if "values" in sent else keys
    )
    serving = "queries" if keys is queries else "keys"
    _check_size("values", values, layer.value_size, "" if "values" in sent else serving)
    _check_batch(queries, keys, values)
    return queries, keys, values


def _array(sent: Mapping[str, Array | Sequences], name: str) -> Array | None:
    tensor = sent.get(name)
    if isinstance(tensor, Sequences):
        raise InvalidShape(f"{name}: its lists differ in length, want one of numbers, or equal ones of numbers")
    return tensor


def _lens_of_values(keys: Sequences, lens: Array | None) -> Array | None:
    # Packed values are one for each key; where the keys are the queries, their lengths are known from those.
    return keys.lengths if keys.length is None else lens


def _read_one(name: str, tensor: Array | Sequences, lens: Array | None, lens_name: str) -> Sequences:
    data = tensor.data if isinstance(tensor, Sequences) else tensor
    if data.dtype.newbyteorder("=") not in FLOAT_DTYPES:
        raise InvalidDtype(f"{name}: dtype is {data.dtype.name}, want float16, bfloat16, float32 or float64")
    if 0 in data.shape or (isinstance(tensor, Sequences) and 0 in tensor.lengths):
        raise EmptyAxis(f"{name}: shape is {data.shape}, want every axis at least 1")
    if isinstance(tensor, Sequences):
        return tensor
    if tensor.ndim == 3:
        return Sequences.dense(tensor)
    if tensor.ndim == 2 and lens is not None and lens.ndim == 1:
        return Sequences.ragged(tensor, _parse_packed_lens(name, lens, len(tensor), lens_name))
    raise InvalidShape(
        f"{name}: shape {tensor.shape} has {tensor.ndim} axes, want 3: batch, length, features "
        f"(or 2 where they are packed, with {lens_name} of one length an entry)"
    )


def _parse_packed_lens(name: str, lens: Array, num_rows: int, lens_name: str) -> Indices:
    _check_integers(lens_name, lens)
    error = InvalidShape if lens_name == "query_lens" else InvalidValidLens
    wrong = np.flatnonzero((lens < 1) | (lens > num_rows))
    if len(wrong):
        raise error(
            f"{lens_name}[{wrong[0]}]: got {lens[wrong[0]]}, want 1 to {num_rows}: {name} are packed, so every entry "
            "has at least one row"
        )
    lengths = lens.astype(np.int64)
    total = int(lengths.sum())
    if total != num_rows:
        raise error(f"{lens_name}: sum to {total}, but {name} have {num_rows} rows; want one length an entry")
    return lengths


def _check_size(name: str, tensor: Sequences, size: int, serving: str) -> None:
    if tensor.data.shape[1] != size:
        origin = f" (absent, so the {serving} serve)" if serving else ""
        raise InvalidShape(f"{name}{origin}: last axis is {tensor.data.shape[1]}, the model expects {size}")


def _check_batch(queries: Sequences, keys: Sequences, values: Sequences) -> None:
    for name, tensor in (("keys", keys), ("values", values)):
        if len(tensor) != len(queries):
            raise InvalidShape(f"{name}: batch is {len(tensor)}, queries have {len(queries)}")
    if values is keys or (values.length is not None and values.length == keys.length):
        return
    differing = np.flatnonzero(values.lengths != keys.lengths)
    if len(differing):
        entry = differing[0]
        where = "" if keys.length is not None and values.length is not None else f" of entry {entry}"
        raise InvalidShape(
            f"values: {values.lengths[entry]}{where or ' of them'}, but {keys.lengths[entry]} keys; "
            "want one value a key"
        )


def _check_integers(name: str, lens: Array) -> None:
    if lens.dtype.kind not in "iu":
        raise InvalidDtype(f"{name}: dtype is {lens.dtype.name}, want integers")
    if 0 in lens.shape:
        raise EmptyAxis(f"{name}: shape is {lens.shape}, want every axis at least 1")


def _parse_valid_lens(raw: Array | None, queries: Sequences, keys: Sequences) -> Indices:
    if raw is None:
        return _per_query(keys.lengths, queries)
    _check_integers("valid_lens", raw)
    batch = len(queries)
    if raw.shape == (batch,):
        _check_within(raw, keys.lengths)
        return _per_query(raw.astype(np.int64), queries)
    if queries.length is None:
        raise InvalidShape(f"valid_lens: shape is {raw.shape}, want ({batch},) beside queries of unequal length")
    if raw.shape != (batch, queries.length):
        raise InvalidShape(f"valid_lens: shape is {raw.shape}, want ({batch},) or ({batch}, {queries.length})")
    _check_within(raw, keys.lengths[:, None])
    return np.ascontiguousarray(raw, np.int64).reshape(-1)


def _check_within(raw: Array, num_kv: Array) -> None:
    beyond = (raw < 0) | (raw > num_kv)
    if beyond.any():
        where = tuple(int(axis) for axis in np.argwhere(beyond)[0])
        most = np.broadcast_to(num_kv, raw.shape)[where]
        raise InvalidValidLens(f"valid_lens{list(where)}: got {raw[where]}, want 0 to {most}, the number of keys")


def _per_query(lengths: Indices, queries: Sequences) -> Indices:
    return np.repeat(lengths, queries.lengths if queries.length is None else queries.length)


def _finite(name: str, raw: Sequences, extents: Indices) -> Sequences:
    converted = raw.data
    flags = converted.flags
    as_it_is = converted.dtype == np.float32 and flags.c_contiguous and flags.aligned
    if not as_it_is:
        converted = np.require(raw.data, np.float32, ("C", "A"))
    if not _is_finite(converted):
        _refuse_non_finite(name, raw, converted, extents)
    return raw if as_it_is else raw.of(converted)


def _refuse_non_finite(name: str, raw: Sequences, data: NDArray[np.float32], extents: Indices) -> None:
    for entry, (start, extent) in enumerate(zip(raw.starts.tolist(), extents.tolist(), strict=True)):
        bad = np.argwhere(~np.isfinite(data[start : start + extent]))
        if len(bad):
            position, feature = (int(axis) for axis in bad[0])
            value = float(raw.data[start + position, feature])
            raise NonFinite(f"{name}[{entry}][{position}][{feature}]: {value} is not finite in float32")


def _is_finite(tensor: Array) -> bool:
    """Call with floating-point warnings off: a sum can overflow on finite input, so only a finite sum is believed."""
    total = np.add.reduce(tensor, axis=None, dtype=np.float32)  # one pass without a temporary
    return math.isfinite(total) or bool(np.isfinite(tensor).all())

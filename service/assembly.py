"""The two sides of an engine call: its arrays, taken from the requests that share it, and the answers' places.

Pure but for the answer's arrays, which are filled as results come. Padding that remains in a call is zero, so that
nothing a client leaves there (nan, or what overflows in the projections) can reach a result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from service.artifact import Layer
from service.engine import EngineCall, Floats, Projected
from service.planner import Load, Part, Projecting
from service.sequences import Indices, Sequences
from service.tensors import AttentionInputs, AttentionOutput
from service.wanted import WantedWeights


@final
@dataclass(frozen=True, slots=True)
class Share:
    """What one request has in a call."""

    inputs: AttentionInputs
    part: Part


def gather(shares: Sequence[Share], load: Load, *, need_weights: bool = False, alone: bool = False) -> EngineCall:
    """The call of these shares, padded to the load's sizes. A share alone is not copied where it is wanted as it is."""
    every_key = all(_reads_every_key(share, load.num_kv) for share in shares)
    valid_lens = None if every_key and not need_weights else _valid_lens(shares, load)
    queries = _collate([_queries_of(share) for share in shares], load.num_queries)
    keys = values = _collate([_keys_of(share.inputs.keys, share) for share in shares], load.num_kv)
    if any(share.inputs.values is not share.inputs.keys for share in shares):
        values = _collate([_keys_of(share.inputs.values, share) for share in shares], load.num_kv)
    return EngineCall(queries, keys, values, valid_lens, need_weights, alone)


def gather_keys(inputs: AttentionInputs, projecting: Projecting) -> tuple[Floats, Floats]:
    """The keys and values to be projected: (1, K, key_size) and (1, K, value_size). Views."""
    keys = inputs.keys.entry(projecting.row)[None, projecting.keys]
    return keys, keys if inputs.values is inputs.keys else inputs.values.entry(projecting.row)[None, projecting.keys]


def gather_tile(share: Share) -> tuple[Floats, NDArray[np.int64] | None]:
    """The queries (1, Q, query_size) of a tile, and their lengths unless they read every key. Views."""
    inputs, part = share.inputs, share.part
    row = _rows(part)[0]
    lens = inputs.valid_lens[_span(inputs.queries, row, part.queries)]
    every_key = bool((lens == part.num_kv).all())
    return inputs.queries.entry(row)[None, part.queries], None if every_key else lens[None]


@final
class Projections:
    """Projected keys and values of the rows that are tiled, filled piece by piece, from several threads at once."""

    def __init__(self, layer: Layer, inputs: AttentionInputs, projectings: Sequence[Projecting]) -> None:
        self._of_row = {
            row: _room_for_projected(layer, int(inputs.extents[row])) for row in {piece.row for piece in projectings}
        }

    def place(self, projecting: Projecting, result: Projected) -> None:
        """Takes the projection of some keys."""
        room = self._of_row[projecting.row]
        room.keys[:, :, projecting.keys] = result.keys
        room.values[:, :, projecting.keys] = result.values

    def of(self, part: Part) -> Projected:
        """What a tile attends to."""
        return self._of_row[int(_rows(part)[0])]


@final
class Assembly:
    """The answer to a request, from the results of its parts. Parts may be placed from several threads at once."""

    def __init__(
        self, inputs: AttentionInputs, layer: Layer, num_parts: int, wanted: WantedWeights | None = None
    ) -> None:
        self._inputs = inputs
        self._layer = layer
        self._whole: Floats | None = None
        self._is_whole = num_parts == 1 and inputs.queries.length is not None
        self._output = None if self._is_whole else np.empty((len(inputs.valid_lens), layer.num_hiddens), np.float32)
        self._wanted = wanted
        self._weights = None if wanted is None else np.zeros(_weights_shape(inputs, layer, wanted), np.float32)

    def place(self, part: Part, output: Floats, weights: Floats | None) -> None:
        """Takes the result of a part, (rows, Q, num_hiddens), which may be padded."""
        if self._output is None:
            self._whole = output[:, : part.num_queries]
        else:
            for row, result in zip(_rows(part), output, strict=True):
                span = _span(self._inputs.queries, row, part.queries)
                self._output[span] = result[: span.stop - span.start]
        if self._wanted is not None and self._weights is not None and weights is not None:
            weights = self._wanted.of(weights)
            if self._is_whole and weights.shape == self._weights.shape:
                self._weights = weights
            else:
                self._place_weights(self._weights, part, weights)

    def answer(self) -> AttentionOutput:
        """The answer, once every part was placed; weights beyond the keys that were computed are 0.

        Raises:
            Overflow: the result does not fit.
        """
        inputs = self._inputs
        output = self._whole if self._output is None else self._output
        if output is None:
            raise RuntimeError("no part was placed")
        if inputs.packed:
            return AttentionOutput.cast(output, self._weights, inputs.dtype, inputs.queries.lengths)
        batch, num_queries, _ = inputs.queries.shape
        shaped = np.ascontiguousarray(output).reshape(batch, num_queries, self._layer.num_hiddens)
        return AttentionOutput.cast(shaped, self._weights, inputs.dtype)

    def _place_weights(self, room: Floats, part: Part, weights: Floats) -> None:
        for row, result in zip(_rows(part), weights, strict=True):
            end = min(part.queries.stop, int(self._inputs.queries.lengths[row]))
            count = end - part.queries.start
            room[row][..., part.queries.start : end, : part.num_kv] = result[..., :count, : part.num_kv]


def answer_bytes(inputs: AttentionInputs, layer: Layer, wanted: WantedWeights | None) -> int:
    """Bytes of a request's answer in float32, before it is cast to the queries' dtype."""
    floats = len(inputs.queries.data) * layer.num_hiddens
    if wanted is not None:
        floats += math.prod(_weights_shape(inputs, layer, wanted))
    return floats * np.dtype(np.float32).itemsize


def _weights_shape(inputs: AttentionInputs, layer: Layer, wanted: WantedWeights) -> tuple[int, ...]:
    batch, num_queries, _ = inputs.queries.shape
    return (batch, *wanted.axes(layer), num_queries, inputs.keys.shape[1])


def _room_for_projected(layer: Layer, num_kv: int) -> Projected:
    shape = (1, layer.num_heads, num_kv, layer.head_size)
    return Projected(np.empty(shape, np.float32), np.empty(shape, np.float32))


def _rows(part: Part) -> Sequence[int]:
    return range(part.rows.start, part.rows.stop) if isinstance(part.rows, slice) else part.rows.tolist()


def _span(sequences: Sequences, row: int, positions: slice) -> slice:
    """Where these positions of a row stand in the data, as far as the row has them."""
    start = int(sequences.starts[row])
    return slice(start + positions.start, start + min(positions.stop, int(sequences.lengths[row])))


def _reads_every_key(share: Share, num_kv: int) -> bool:
    if len(share.inputs.shortest) == 1:
        return bool(share.inputs.shortest.item() == num_kv)
    return bool((share.inputs.shortest[share.part.rows] == num_kv).all())


def _valid_lens(shares: Sequence[Share], load: Load) -> NDArray[np.int64]:
    num_queries = shares[0].inputs.queries.length
    if len(shares) == 1 and num_queries is not None:
        share = shares[0]
        of_entries = share.inputs.valid_lens.reshape(-1, num_queries)
        return np.ascontiguousarray(of_entries[share.part.rows, share.part.queries])
    lens = np.ones((load.num_rows, load.num_queries), np.int64)  # a padded query reads one key, and nobody reads it
    filled = 0
    for share in shares:
        for row in _rows(share.part):
            span = _span(share.inputs.queries, row, share.part.queries)
            lens[filled, : span.stop - span.start] = share.inputs.valid_lens[span]
            filled += 1
    return lens


Pieces = Floats | list[Floats]


def _queries_of(share: Share) -> Pieces:
    """The queries of a share: one array where they stand together, else row by row."""
    sequences, part = share.inputs.queries, share.part
    if sequences.length is not None:
        return sequences.padded()[part.rows, part.queries]
    return [sequences.data[_span(sequences, row, part.queries)] for row in _rows(part)]


def _keys_of(sequences: Sequences, share: Share) -> Pieces:
    """Keys or values of a share: one array where none of what is left of them is padding, else row by row."""
    part, extents = share.part, share.inputs.extents
    if sequences.length is not None and _none_is_padding(extents, part):
        return sequences.padded()[part.rows, : part.num_kv]
    return [sequences.entry(row)[: min(int(extents[row]), part.num_kv)] for row in _rows(part)]


def _none_is_padding(extents: Indices, part: Part) -> bool:
    if len(extents) == 1:
        return bool(extents.item() >= part.num_kv)
    return bool((extents[part.rows] >= part.num_kv).all())


def _collate(shares: list[Pieces], length: int) -> Floats:
    """All rows in one array, each followed by zeros up to the length."""
    first = shares[0]
    if len(shares) == 1 and isinstance(first, np.ndarray) and first.shape[1] == length:
        return np.ascontiguousarray(first)
    rows = [row for share in shares for row in share]
    collated = np.empty((len(rows), length, rows[0].shape[1]), np.float32)
    for place, row in zip(collated, rows, strict=True):
        place[: len(row)] = row
        place[len(row) :] = 0
    return collated

"""From a request to engine calls: which rows are computed together, trimmed how, tiled how.

Pure. Keys of a call end at its longest length, which is exact because a weight beyond a length is 0; rows do not see
each other; and the softmax is over keys, so queries may be split anywhere.
"""

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from service.artifact import Layer
from service.cost import CostModel, score_bytes
from service.tensors import AttentionInputs

Indices = NDArray[np.int64]

# Finer grouping than this gains less than it costs to find.
_MAX_LENGTHS: Final = 32


@final
@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine call.

    Attributes:
        workspace_bytes: most that its scores may take, unless those of a single query take more.
        call_s: seconds beyond which rows are split, so that other requests pass between.
    """

    workspace_bytes: int
    call_s: float


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One engine call's share of a request.

    Attributes:
        rows: batch entries, as a slice where they stand together.
        queries: of these rows.
        num_kv: how many keys of each row are computed, from the first.
    """

    rows: slice | Indices
    queries: slice
    num_kv: int

    @property
    def num_rows(self) -> int:
        """How many batch entries the call has."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)


def plan(inputs: AttentionInputs, layer: Layer, cost: CostModel, limits: Limits) -> list[Part]:
    """The parts of a request, shortest rows first: every query of every row stands in exactly one.

    No part's scores exceed the workspace unless a single query's do.
    """
    num_queries = inputs.valid_lens.shape[1]
    parts: list[Part] = []
    for num_kv, rows in _groups(inputs.extents, num_queries, layer, cost):
        most_rows = _most_rows(num_queries, num_kv, layer, cost, limits)
        if most_rows == 0:
            parts += _tiles(rows, num_queries, num_kv, layer, limits)
        else:
            parts += [Part(_as_slice(chunk), slice(0, num_queries), num_kv) for chunk in _evenly(rows, most_rows)]
    return parts


def _groups(extents: Indices, num_queries: int, layer: Layer, cost: CostModel) -> list[tuple[int, Indices]]:
    """Rows of like length, with the length that their keys are trimmed to."""
    longest = int(extents.max())
    if longest == int(extents.min()):
        return [(longest, np.arange(len(extents)))]
    lengths, counts = _lengths(extents)
    ends = _cheapest_cuts(lengths, counts, num_queries, layer, cost)
    group_of = np.searchsorted(ends, extents)
    return [(end, np.flatnonzero(group_of == index)) for index, end in enumerate(ends)]


def _lengths(extents: Indices) -> tuple[list[int], list[int]]:
    """The lengths that occur, ascending, and how many rows have each; rounded up to a few where there are many."""
    lengths = np.unique(extents)
    if len(lengths) > _MAX_LENGTHS:
        lengths = lengths[np.linspace(0, len(lengths) - 1, _MAX_LENGTHS + 1).round().astype(int)[1:]]
    counts = np.bincount(np.searchsorted(lengths, extents), minlength=len(lengths))
    return lengths.tolist(), counts.tolist()


def _cheapest_cuts(lengths: list[int], counts: list[int], num_queries: int, layer: Layer, cost: CostModel) -> list[int]:
    """The longest length of each group, in the partition of sorted rows that costs least (dynamic programme).

    A group is one call, as long as its longest row: splitting saves padding and costs a call.
    """
    rows_up_to = np.concatenate([[0], np.cumsum(counts)]).tolist()
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for last, length in enumerate(lengths):
        row_s = cost.row_s(layer, num_queries, length)
        options = (
            (best[first][0] + cost.call_s + (rows_up_to[last + 1] - rows_up_to[first]) * row_s, first)
            for first in range(last + 1)
        )
        seconds, first = min(options)
        best.append((seconds, [*best[first][1], length]))
    return best[-1][1]


def _most_rows(num_queries: int, num_kv: int, layer: Layer, cost: CostModel, limits: Limits) -> int:
    """How many rows one call may have; 0 if not even one fits the workspace."""
    fitting = limits.workspace_bytes // score_bytes(layer, num_queries, num_kv)
    row_s = cost.row_s(layer, num_queries, num_kv)
    timely = int(min(limits.call_s / row_s, 2**31)) if row_s > 0 else 2**31
    return min(fitting, max(1, timely))


def _tiles(rows: Indices, num_queries: int, num_kv: int, layer: Layer, limits: Limits) -> list[Part]:
    """Each row alone, some of its queries at a time."""
    fitting = max(1, limits.workspace_bytes // score_bytes(layer, 1, num_kv))
    tiles = [slice(int(tile[0]), int(tile[-1]) + 1) for tile in _evenly(np.arange(num_queries), fitting)]
    return [Part(slice(row, row + 1), tile, num_kv) for row in rows.tolist() for tile in tiles]


def _evenly(indices: Indices, most: int) -> list[Indices]:
    """The indices in as few chunks of at most `most` as will do, of nearly the same size."""
    return np.array_split(indices, -(-len(indices) // most))


def _as_slice(rows: Indices) -> slice | Indices:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows

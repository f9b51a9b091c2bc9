"""From requests to engine calls: which rows are computed together, trimmed how, tiled how.

Pure. Keys of a call end at its longest length, which is exact because a weight beyond a length is 0; rows do not see
each other; and the softmax is over keys, so queries may be split anywhere. Row here means one batch entry.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from service.artifact import Layer
from service.cost import CALL_OVERHEAD_S, CostModel, attend_flops, projection_flops, row_flops, score_bytes
from service.sequences import Indices
from service.tensors import AttentionInputs

# Finer grouping than this gains less than it costs to find.
_MAX_LENGTHS: Final = 32
# A row this many times longer than a call should be is tiled, although its keys must then be projected on their own.
_TILED_CALLS: Final = 2.0
# Rows of several requests are copied into one array. From the cache that goes at 24 GB/s there; less than half of it is
# counted on.
_COPIED_BYTE_S: Final = 1e-10


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
        queries: of each of these rows; what is beyond the end of a shorter one is padding.
        num_kv: how many keys of each row are computed, from the first.
        exact: whether a row averages all its keys, so that not one more may be computed.
        projected: whether the row's keys and values have been projected before.
    """

    rows: slice | Indices
    queries: slice
    num_kv: int
    exact: bool = False
    projected: bool = False

    @property
    def num_rows(self) -> int:
        """How many batch entries the call has."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def num_queries(self) -> int:
        """How many queries of each are computed."""
        return int(self.queries.stop - self.queries.start)

    def seconds(self, layer: Layer, cost: CostModel) -> float:
        """What the call takes by the cost model."""
        of_row = attend_flops if self.projected else row_flops
        return cost.seconds(self.num_rows * of_row(layer, self.num_queries, self.num_kv))


@final
@dataclass(frozen=True, slots=True)
class Projecting:
    """One engine call that projects some keys and values of one row, for the tiles that follow."""

    row: int
    keys: slice

    def seconds(self, layer: Layer, cost: CostModel) -> float:
        """What the call takes by the cost model."""
        return cost.seconds(projection_flops(layer, self.keys.stop - self.keys.start))


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """The calls of a request: first every projection, then the parts, shortest rows first."""

    projections: tuple[Projecting, ...]
    parts: tuple[Part, ...]

    def seconds(self, layer: Layer, cost: CostModel) -> float:
        """Of all its calls by the cost model, one after the other."""
        total_s = sum(piece.seconds(layer, cost) for piece in self.parts)
        return total_s + sum(piece.seconds(layer, cost) for piece in self.projections) if self.projections else total_s


def plan(inputs: AttentionInputs, layer: Layer, cost: CostModel, limits: Limits, *, need_weights: bool = False) -> Plan:
    """The calls of a request: every query of every row stands in exactly one part.

    No part's scores exceed the workspace unless a single query's do.
    """
    planning = _Planning(layer, cost.flops_within(limits.call_s), limits, need_weights)
    if len(inputs.extents) == 1:
        # Most requests have one row, and need none of what follows.
        num_queries, num_kv = inputs.queries.lengths.item(), inputs.extents.item()
        if planning.most_rows(num_queries, num_kv) > 0:
            exact = inputs.shortest.item() == 0
            return Plan((), (Part(slice(0, 1), slice(0, num_queries), num_kv, exact),))
    projections: list[Projecting] = []
    parts: list[Part] = []
    for group in _groups(inputs, layer, cost):
        most_rows = planning.most_rows(group.num_queries, group.num_kv)
        if most_rows > 0:
            parts += planning.split_rows(group, most_rows)
            continue
        for row in group.rows.tolist():
            own = _own_group(row, inputs)
            if planning.most_rows(own.num_queries, own.num_kv) > 0:
                parts += planning.split_rows(own, 1)
                continue
            if not need_weights:
                projections += planning.projections(own)
            parts += planning.tiles(own)
    return Plan(tuple(projections), tuple(parts))


@final
@dataclass(frozen=True, slots=True)
class Load:
    """What one call holds: its rows, and the longest queries and keys among them."""

    num_rows: int
    num_queries: int
    num_kv: int
    exact: bool

    @classmethod
    def of(cls, part: Part) -> "Load":
        """That of a part alone."""
        return cls(part.num_rows, part.num_queries, part.num_kv, part.exact)

    def joined(self, other: "Load") -> "Load":
        """Both in one call, the shorter ones padded."""
        return Load(
            self.num_rows + other.num_rows,
            max(self.num_queries, other.num_queries),
            max(self.num_kv, other.num_kv),
            self.exact or other.exact,
        )

    def flops(self, layer: Layer) -> int:
        """Floating-point operations of the call."""
        return self.num_rows * row_flops(layer, self.num_queries, self.num_kv)

    def bytes(self, layer: Layer) -> int:
        """Bytes of its queries, keys and values."""
        features = self.num_queries * layer.query_size + self.num_kv * (layer.key_size + layer.value_size)
        return self.num_rows * features * np.dtype(np.float32).itemsize


def may_join(part: Load, layer: Layer, cost: CostModel) -> bool:
    """Whether it pays for a part to share a call even with its like. If not, nobody need look for company for it."""
    flops = part.flops(layer)
    saved_s = 2 * cost.seconds(flops) + CALL_OVERHEAD_S - cost.seconds(2 * flops)
    return saved_s > part.bytes(layer) * _COPIED_BYTE_S


def join(first: Load, waiting: Iterable[Load], layer: Layer, cost: CostModel, limits: Limits) -> tuple[Load, list[int]]:
    """Which of the waiting parts go into one call with the first, and the call they make.

    A part joins where one call is faster than two, by the cost model, and within the limits; and never where a row
    that averages all its keys would get more of them.
    """
    call, chosen = first, []
    call_s = cost.seconds(call.flops(layer))
    for index, part in enumerate(waiting):
        together = call.joined(part)
        if together.exact and call.num_kv != part.num_kv:
            continue
        if together.num_rows * score_bytes(layer, together.num_queries, together.num_kv) > limits.workspace_bytes:
            continue
        together_s = cost.seconds(together.flops(layer))
        apart_s = call_s + cost.seconds(part.flops(layer)) + CALL_OVERHEAD_S
        if together_s <= limits.call_s and together_s + part.bytes(layer) * _COPIED_BYTE_S < apart_s:
            call, call_s = together, together_s
            chosen.append(index)
    return call, chosen


@final
@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of like length, with the longest queries and the length that keys are trimmed to."""

    rows: Indices
    num_queries: int
    num_kv: int
    exact: bool


def _own_group(row: int, inputs: AttentionInputs) -> _Group:
    """A row by itself, as long as it is."""
    exact = bool(inputs.shortest[row] == 0)
    return _Group(np.array([row]), int(inputs.queries.lengths[row]), int(inputs.extents[row]), exact)


def _groups(inputs: AttentionInputs, layer: Layer, cost: CostModel) -> Iterator[_Group]:
    exact = inputs.shortest == 0
    # Keys of one length end where the rows that average them all end; keys of several need a group for each.
    if inputs.keys.length is not None or not exact.any():
        yield from _by_length(np.arange(len(inputs.extents)), inputs, layer, cost)
        return
    for num_kv in np.unique(inputs.extents[exact]).tolist():
        rows = np.flatnonzero(exact & (inputs.extents == num_kv))
        yield _Group(rows, int(inputs.queries.lengths[rows].max()), num_kv, exact=True)
    if not exact.all():
        yield from _by_length(np.flatnonzero(~exact), inputs, layer, cost)


def _by_length(rows: Indices, inputs: AttentionInputs, layer: Layer, cost: CostModel) -> Iterator[_Group]:
    extents, query_lens = inputs.extents[rows], inputs.queries.lengths[rows]
    longest = int(extents.max())
    if longest == int(extents.min()) and inputs.queries.length is not None:
        yield _Group(rows, inputs.queries.length, longest, bool((inputs.shortest[rows] == 0).any()))
        return
    classes = _classes(extents, query_lens)
    ends = _cheapest_cuts(classes, layer, cost)
    group_of = np.searchsorted([classes[end].num_kv for end in ends], extents)
    for index, end in enumerate(ends):
        chosen = np.flatnonzero(group_of == index)
        exact = bool((inputs.shortest[rows[chosen]] == 0).any())
        yield _Group(rows[chosen], int(query_lens[chosen].max()), classes[end].num_kv, exact)


def _classes(extents: Indices, query_lens: Indices) -> list[Load]:
    """The lengths that occur, ascending, and the rows of each; rounded up to a few where there are many."""
    lengths = np.unique(extents)
    if len(lengths) > _MAX_LENGTHS:
        lengths = lengths[np.linspace(0, len(lengths) - 1, _MAX_LENGTHS + 1).round().astype(int)[1:]]
    class_of = np.searchsorted(lengths, extents)
    counts = np.bincount(class_of, minlength=len(lengths))
    longest = np.zeros(len(lengths), np.int64)
    np.maximum.at(longest, class_of, query_lens)
    return [
        Load(count, num_queries, num_kv, exact=False)
        for count, num_queries, num_kv in zip(counts.tolist(), longest.tolist(), lengths.tolist(), strict=True)
    ]


def _cheapest_cuts(classes: list[Load], layer: Layer, cost: CostModel) -> list[int]:
    """The last class of each group, in the partition of sorted rows that costs least (dynamic programme).

    A group is one call, as long as its longest row: splitting saves padding and costs a call.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for last, longest in enumerate(classes):
        options = []
        num_rows = num_queries = 0
        for first in range(last, -1, -1):
            num_rows += classes[first].num_rows
            num_queries = max(num_queries, classes[first].num_queries)
            call_s = cost.seconds(num_rows * row_flops(layer, num_queries, longest.num_kv)) + CALL_OVERHEAD_S
            options.append((best[first][0] + call_s, first))
        seconds, first = min(options)
        best.append((seconds, [*best[first][1], last]))
    return best[-1][1]


@final
@dataclass(frozen=True, slots=True)
class _Planning:
    """How much of a group goes into one call. `within` is how many operations a call may have to be short enough."""

    layer: Layer
    within: float
    limits: Limits
    need_weights: bool

    def most_rows(self, num_queries: int, num_kv: int) -> int:
        """How many rows of these lengths one call may have; 0 if even one should be tiled."""
        of_row = row_flops(self.layer, num_queries, num_kv)
        fitting = self.limits.workspace_bytes // score_bytes(self.layer, num_queries, num_kv)
        tileable = num_queries > 1 and not self.need_weights
        if fitting == 0 or (tileable and of_row > _TILED_CALLS * self.within > 0):
            return 0
        return max(1, int(min(fitting, self.within // of_row, 2**31)))

    def split_rows(self, group: _Group, most_rows: int) -> Iterator[Part]:
        """The group in calls of at most so many rows."""
        for chunk in _evenly(group.rows, most_rows):
            yield Part(_as_slice(chunk), slice(0, group.num_queries), group.num_kv, group.exact)

    def tiles(self, group: _Group) -> Iterator[Part]:
        """The group's one row, some of its queries at a time."""
        fitting = self.limits.workspace_bytes // score_bytes(self.layer, 1, group.num_kv)
        timely = self.within // attend_flops(self.layer, 1, group.num_kv)
        # With weights every tile projects the keys again, so only memory is a reason for one more.
        most = fitting if self.need_weights else min(fitting, timely)
        rows = _as_slice(group.rows)
        for tile in _evenly(np.arange(group.num_queries), int(max(1, min(most, 2**31)))):
            queries = slice(int(tile[0]), int(tile[-1]) + 1)
            yield Part(rows, queries, group.num_kv, group.exact, projected=not self.need_weights)

    def projections(self, group: _Group) -> Iterator[Projecting]:
        """The projection of the keys and values of the group's one row, some of them at a time."""
        most = self.within // projection_flops(self.layer, 1)
        for chunk in _evenly(np.arange(group.num_kv), int(max(1, min(most, 2**31)))):
            yield Projecting(int(group.rows[0]), slice(int(chunk[0]), int(chunk[-1]) + 1))


def _evenly(indices: Indices, most: int) -> list[Indices]:
    """The indices in as few chunks of at most `most` as will do, of nearly the same size."""
    return [indices] if len(indices) <= most else np.array_split(indices, -(-len(indices) // most))


def _as_slice(rows: Indices) -> slice | Indices:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows

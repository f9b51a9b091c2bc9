"""What an engine call costs: seconds as measured on this machine, bytes from the shapes alone.

Pure; the engine measures at warm-up. Shape letters: B batch, Q queries, K key-value pairs, H heads.
"""

import itertools
from dataclasses import dataclass, field
from typing import Final, Self, final

from service.artifact import Layer

_FLOAT_BYTES: Final = 4
_Line = tuple[float, float, float, float]


# What one more call costs beside computing: to be put together, handed over and taken apart again.
CALL_OVERHEAD_S: Final = 2e-4


@final
@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a call by how much it computes: measured points, straight lines between and beyond them.

    A line through two points would not do: a call of few tokens is as slow as the reading of the weights, and a call
    of many as slow as the arithmetic.

    Attributes:
        points: (floating-point operations, seconds), at least two, both ascending.
    """

    points: tuple[tuple[float, float], ...]
    _lines: tuple[_Line, ...] = field(init=False, repr=False, compare=False)
    _inverse: tuple[_Line, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lines", _lines(self.points))
        object.__setattr__(self, "_inverse", _lines(tuple((seconds, flops) for flops, seconds in self.points)))

    @classmethod
    def linear(cls, call_s: float, flop_s: float) -> Self:
        """A constant a call and a rate for each operation."""
        return cls(((0.0, call_s), (1e9, call_s + 1e9 * flop_s)))

    def seconds(self, flops: float) -> float:
        """Seconds of a call of so many operations; never less than those of the first point."""
        least, least_s = self.points[0]
        return least_s if flops <= least else _on_line(self._lines, flops)

    def flops_within(self, seconds: float) -> float:
        """The most operations that a call of so many seconds can do; infinite where work costs nothing."""
        if seconds <= self.points[0][1]:
            return 0.0
        return _on_line(self._inverse, seconds)


def _lines(points: tuple[tuple[float, float], ...]) -> tuple[_Line, ...]:
    """From each point to the next: where it ends, where it begins, the value there, and the slope."""
    return tuple(
        (upper, lower, lower_y, (upper_y - lower_y) / (upper - lower) if upper > lower else float("inf"))
        for (lower, lower_y), (upper, upper_y) in itertools.pairwise(points)
    )


def _on_line(lines: tuple[_Line, ...], x: float) -> float:
    """The y of an x beyond the first point, on the line between its neighbours or on through the last two."""
    for upper, lower, lower_y, slope in lines:  # noqa: B007  # the last one goes on
        if x <= upper:
            break
    return lower_y + slope * (x - lower)


def row_flops(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Floating-point operations of one batch entry: four projections, the scores, and the average of the values."""
    # Written out, since planning asks this most.
    of_query = layer.query_size + layer.num_hiddens + num_kv * (1 + _score_size(layer))
    return 2 * layer.projected_size * (num_kv * (layer.key_size + layer.value_size) + num_queries * of_query)


def projection_flops(layer: Layer, num_kv: int) -> int:
    """Those of them that go into keys and values."""
    return 2 * layer.projected_size * num_kv * (layer.key_size + layer.value_size)


def attend_flops(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Those of them that remain when keys and values are projected."""
    of_query = layer.query_size + layer.num_hiddens + num_kv * (1 + _score_size(layer))
    return 2 * layer.projected_size * num_queries * of_query


def score_bytes(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Bytes that the scores of one batch entry take at their peak: what softmax reads, and what it writes."""
    return 2 * _FLOAT_BYTES * layer.num_heads * num_queries * num_kv * _score_size(layer)


def _score_size(layer: Layer) -> int:
    # Additive scoring holds a vector for every score, before its tanh and after.
    return layer.scoring_size or 1

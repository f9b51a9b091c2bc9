"""What an engine call costs: seconds as measured on this machine, bytes from the shapes alone.

Pure; the engine measures at warm-up. Shape letters: B batch, Q queries, K key-value pairs, H heads.
"""

from dataclasses import dataclass
from typing import Final, Self, final

from service.artifact import Layer

_FLOAT_BYTES: Final = 4


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

    @classmethod
    def linear(cls, call_s: float, flop_s: float) -> Self:
        """A constant a call and a rate for each operation."""
        return cls(((0.0, call_s), (1e9, call_s + 1e9 * flop_s)))

    def seconds(self, flops: float) -> float:
        """Seconds of a call of so many operations; never less than those of the first point."""
        (lower, lower_s), *rest = self.points
        if flops <= lower:
            return lower_s
        slope = 0.0
        for upper, upper_s in rest:
            slope = (upper_s - lower_s) / (upper - lower)
            if flops <= upper:
                break
            lower, lower_s = upper, upper_s
        return lower_s + slope * (flops - lower)

    def flops_within(self, seconds: float) -> float:
        """The most operations that a call of so many seconds can do; infinite where work costs nothing."""
        (lower, lower_s), *rest = self.points
        if seconds <= lower_s:
            return 0.0
        slope = 0.0
        for upper, upper_s in rest:
            slope = (upper_s - lower_s) / (upper - lower)
            if seconds <= upper_s:
                break
            lower, lower_s = upper, upper_s
        return lower + (seconds - lower_s) / slope if slope > 0 else float("inf")


def row_flops(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Floating-point operations of one batch entry: four projections, the scores, and the average of the values."""
    return projection_flops(layer, num_kv) + attend_flops(layer, num_queries, num_kv)


def projection_flops(layer: Layer, num_kv: int) -> int:
    """Those of them that go into keys and values."""
    return 2 * layer.num_hiddens * num_kv * (layer.key_size + layer.value_size)


def attend_flops(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Those of them that remain when keys and values are projected."""
    hiddens = layer.num_hiddens
    return 2 * hiddens * num_queries * (layer.query_size + hiddens + num_kv * (1 + _score_size(layer)))


def score_bytes(layer: Layer, num_queries: int, num_kv: int) -> int:
    """Bytes that the scores of one batch entry take at their peak: what softmax reads, and what it writes."""
    return 2 * _FLOAT_BYTES * layer.num_heads * num_queries * num_kv * _score_size(layer)


def _score_size(layer: Layer) -> int:
    # Additive scoring holds a vector for every score, before its tanh and after.
    return layer.scoring_size or 1

"""From what was counted to what is claimed: pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.peers.workloads import Measure
from benchmarks.peers.wrk import Figures


@final
@dataclass(frozen=True, slots=True)
class Spread:
    """The median of rounds, and the least and the most of them."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def rows_per_s(figures: Figures, rows: int) -> float:
    """Rows of requests that were answered each second."""
    return figures["requests"] * rows / (figures["duration_us"] / 1e6)


def p50_ms(figures: Figures) -> float:
    """The median latency."""
    return figures["p50_us"] / 1000


def speed(figures: Figures, measure: Measure, rows: int) -> float:
    """More is better: rows a second, or one over the median latency in milliseconds."""
    return rows_per_s(figures, rows) if measure == "rate" else 1 / p50_ms(figures)


def ratios(ours: Sequence[Figures], theirs: Sequence[Figures], measure: Measure, rows: int) -> Spread:
    """How many times as fast as theirs ours is, round by round: what disturbs one round disturbs both."""
    return Spread.of(
        [
            speed(one, measure, rows) / speed(other, measure, rows)
            for one, other in zip(ours, theirs, strict=True)
        ]
    )  # fmt: skip


def overhead_ms(served: Sequence[Figures], in_process: Sequence[Figures]) -> Spread:
    """What a server adds to the median latency of a call in process, round by round."""
    return Spread.of([p50_ms(one) - p50_ms(other) for one, other in zip(served, in_process, strict=True)])

"""Medians and ratios of rounds."""

import pytest

from benchmarks.peers.figures import Spread, overhead_ms, ratios, rows_per_s
from benchmarks.peers.wrk import Figures


def counted(requests: int, p50_us: int = 1000) -> Figures:
    return {"requests": requests, "duration_us": 2_000_000, "p50_us": p50_us}


def test_spread_is_median_least_and_most() -> None:
    """The median is that of the values in order, and the ends are the ends."""
    assert Spread.of([7.0, 2.0, 3.0]) == Spread(3.0, 2.0, 7.0)


def test_rows_a_second_count_every_row() -> None:
    """Eight rows in a request are eight rows, over the seconds that wrk took."""
    assert rows_per_s(counted(300), rows=8) == 1200


def test_ratios_are_taken_within_rounds() -> None:
    """A round in which the machine was slow for both changes no ratio, though it changes both medians."""
    ours, theirs = [counted(300), counted(30), counted(600)], [counted(100), counted(10), counted(200)]
    assert ratios(ours, theirs, "rate", rows=1) == Spread(3.0, 3.0, 3.0)


def test_lower_latency_is_a_higher_ratio() -> None:
    """Half the latency is twice as fast."""
    assert ratios([counted(1, p50_us=500)], [counted(1, p50_us=1000)], "latency", rows=1).median == pytest.approx(2)


def test_overhead_is_a_difference_within_rounds() -> None:
    """What a server adds is its latency less that of the call in process in the same round."""
    served, in_process = [counted(1, 700), counted(1, 1900)], [counted(1, 400), counted(1, 1500)]
    spread = overhead_ms(served, in_process)
    assert (spread.least, spread.most) == (pytest.approx(0.3), pytest.approx(0.4))


def test_rounds_must_pair() -> None:
    """Where one has fewer rounds than the other, no ratio is made up."""
    with pytest.raises(ValueError, match="zip"):
        ratios([counted(1)], [counted(1), counted(1)], "rate", rows=1)

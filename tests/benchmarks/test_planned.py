"""What is read out of the in-process benchmark's output."""

import pytest

from benchmarks.peers.exchange import Unavailable
from benchmarks.peers.planned import parse

PRINTED = "3 x 5 x 7, 2 keys valid on average, 2 CPUs\npadded    17.25 ms\nplanned     4.50 ms\nratio       3.81\n"


def test_figures_are_read() -> None:
    """The request, both times and the ratio."""
    request = "3 x 5 x 7, 2 keys valid on average, 2 CPUs"
    assert parse(PRINTED) == {"request": request, "padded_ms": 17.25, "planned_ms": 4.5, "ratio": 3.81}


def test_what_is_missing_is_not_made_up() -> None:
    """Output without a ratio is no result."""
    with pytest.raises(Unavailable, match=r"ragged\.py printed"):
        parse(PRINTED.replace("ratio", "rate"))

"""What is read out of wrk's output, and what is no measurement at all."""

import json

import pytest

from benchmarks.peers.exchange import Unavailable
from benchmarks.peers.wrk import parse

COUNTED = {
    "requests": 1213, "duration_us": 3001727, "p50_us": 7919, "p90_us": 9929, "p99_us": 13331, "max_us": 17011,
    "connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0,
}  # fmt: skip


def printed(**changes: int) -> str:
    return f"Running 3s test @ http://127.0.0.1\n  2 threads\n\nfigures {json.dumps({**COUNTED, **changes})}\n"


def test_figures_are_those_of_the_script() -> None:
    """The one line of the script is read, whatever wrk says around it."""
    assert parse(printed()) == COUNTED


@pytest.mark.parametrize("trouble", ["connect", "read", "write", "status", "timeout"])
def test_trouble_is_no_measurement(trouble: str) -> None:
    """One answer that is not 2xx, or one that did not come, and the run does not count; the reason is named."""
    with pytest.raises(Unavailable, match=f"'{trouble}': 1"):
        parse(printed(**{trouble: 1}))


def test_no_answer_is_no_measurement() -> None:
    """A run in which nothing was answered does not count either."""
    with pytest.raises(Unavailable, match="0 requests"):
        parse(printed(requests=0))


def test_no_figures_is_no_measurement() -> None:
    """Where the script printed nothing there is nothing to read."""
    with pytest.raises(Unavailable, match="0 lines"):
        parse("unable to connect to 127.0.0.1:8000 Connection refused\n")

"""Whether a level can be believed: each way in which the generator can be at fault is told, with what to change."""

import numpy as np
import pytest

from loadtest.driver import Usage
from loadtest.judge import faults, is_steady, remarks
from loadtest.level import Level
from loadtest.records import DTYPE
from loadtest.tally import Tally

OPEN, CLOSED = Level("open", 10.0, rate=100.0), Level("closed", 10.0, concurrency=4)
WELL = Usage(cpu_s=2.0, waited_s=0.1, wall_s=10.0, most_open=3, had_to_wait=0)


def tally(
    *, lag_s: float = 0.0001, latency_s: float = 0.02, rate: float = 200.0, last_rate: float | None = None
) -> Tally:
    """Ten seconds of answers; the last of them at another rate, if one is given."""
    steady, last = np.arange(0, 9, 1 / rate), np.arange(9, 10, 1 / (last_rate or rate))
    due = np.concatenate([steady, last])
    records = np.zeros(len(due), DTYPE)
    records["due"], records["picked"], records["status"] = due, due + lag_s, 200
    records["sent"], records["done"] = due + lag_s, due + lag_s + latency_s
    counted = Tally((0.0, 10.0), ())
    counted.add(records)
    return counted


def test_of_a_run_that_went_well() -> None:
    """There is nothing to say."""
    for level in (OPEN, CLOSED):
        assert faults(level, tally(), [WELL]) == []
        assert remarks(level, tally(), [WELL]) == []


@pytest.mark.parametrize(
    ("usage", "lag_s", "said"),
    [
        (Usage(9.5, 0, 10, 3, 0), 0.0001, "busy for 95% of the time; use more --processes"),
        (WELL, 0.01, "taken up 10.0 ms late or later"),
        (Usage(2, 0, 10, 3, 7), 0.0001, "7 requests had to wait for a connection; allow more --connections"),
    ],
    ids=["busy", "late", "no_connections"],
)
def test_faults_of_the_generator(usage: Usage, lag_s: float, said: str) -> None:
    """Each with what to change."""
    (fault,) = faults(OPEN, tally(lag_s=lag_s), [WELL, usage])
    assert said in fault


def test_lag_that_is_small_beside_the_latency() -> None:
    """A few milliseconds of a second are nobody's fault."""
    assert faults(OPEN, tally(lag_s=0.005, latency_s=1.0), [WELL]) == []


def test_lag_in_a_closed_loop_is_none() -> None:
    """There the next request is due when it can be sent."""
    assert faults(CLOSED, tally(lag_s=0.01), [WELL]) == []


def test_shared_core_is_told() -> None:
    """It is no fault: the figures are those of a server beside such a client."""
    (remark,) = remarks(OPEN, tally(), [Usage(2, 3, 10, 3, 0)])
    assert "waited for a core for 30% of the time" in remark


@pytest.mark.parametrize(
    ("counted", "steady"),
    [(tally(), True), (tally(last_rate=150.0), False), (tally(rate=5.0), None)],
    ids=["steady", "slower_at_the_end", "too_few"],
)
def test_steadiness(counted: Tally, steady: bool | None) -> None:
    """By the last three windows."""
    assert is_steady(counted) is steady


def test_too_few_for_a_p99() -> None:
    """Is told where the number depends on the server."""
    assert any("too few answers for a p99" in remark for remark in remarks(CLOSED, tally(rate=30.0), [WELL]))

"""Counting of requests: what belongs to a level, and to which part of it."""

import numpy as np
import pytest

from loadtest.connection import BROKEN, TIMED_OUT
from loadtest.records import DTYPE, Records
from loadtest.slo import parse_slo
from loadtest.tally import Tally


def records(*rows: tuple[float, float, int], picked: float = 0.0) -> Records:
    """Of (due, done, status); each was taken up `picked` later, sent a millisecond after that, and has 3 tokens."""
    found = np.zeros(len(rows), DTYPE)
    for place, (due, done, status) in enumerate(rows):
        found[place]["due"], found[place]["done"], found[place]["status"] = due, done, status
        found[place]["picked"] = due + picked
        found[place]["sent"] = due + picked + 0.001
        found[place]["tokens"] = 3
    return found


def test_latency_is_of_what_was_due_and_throughput_of_what_came() -> None:
    """The warm-up's requests are no latency though they may be answered later; one that is answered late is latency,
    and no throughput."""  # noqa: D205, D209  # one sentence
    tally = Tally((10.0, 20.0), ())
    tally.add(records((9.9, 10.5, 200), (12, 12.1, 200), (19.9, 25, 200)))
    assert tally.latency.count == 2
    assert tally.latency.max_s() == pytest.approx(5.1)
    assert tally.arrived == 2
    assert tally.per_second()["requests"] == pytest.approx(0.2)
    assert tally.per_second()["tokens"] == pytest.approx(0.6)


def test_what_was_not_answered_is_no_latency() -> None:
    """Each has its own outcome, and none counts as fast."""
    tally = Tally((0.0, 10.0), ())
    statuses = [200, 429, 503, 504, TIMED_OUT, 422, 500, BROKEN]
    tally.add(records(*((1.0, 1.1, status) for status in statuses)))
    assert tally.outcomes == {"answered": 1, "refused": 2, "timed_out": 2, "failed": 2, "broken": 1}
    assert tally.latency.count == tally.arrived == 1


def test_lag_and_service_are_apart_from_latency() -> None:
    """Latency is from when a request was due: what the generator lost is in it, and shown beside it."""
    tally = Tally((0.0, 10.0), ())
    tally.add(records((1.0, 1.5, 200), picked=0.2))
    assert tally.latency.max_s() == pytest.approx(0.5)
    assert tally.lag.max_s() == pytest.approx(0.2)
    assert tally.service.max_s() == pytest.approx(0.299)


def test_windows_have_what_fell_into_them() -> None:
    """Latency by when it was due, answers by when they came."""
    tally = Tally((0.0, 4.0), ())
    tally.add(records((0.5, 2.5, 200), (3.5, 3.6, 200), (3.9, 4.4, 200)))
    assert [window.answered for window in tally.windows] == [0, 0, 1, 1]
    assert [window.latency.count for window in tally.windows] == [1, 0, 0, 2]


def test_within_counts_for_each_bound() -> None:
    """Of what was answered, exactly, not by the steps of a histogram."""
    slo = parse_slo("p50=100ms,p99=1s")
    tally = Tally((0.0, 10.0), slo.bounds)
    tally.add(records((1, 1.0999, 200), (1, 1.1001, 200), (2, 2.9, 200), (3, 3.01, 429)))
    assert [tally.counts.within[bound] for bound in slo.bounds] == [1, 3]
    assert (tally.counts.ended, tally.counts.answered) == (4, 3)
    assert [window.counts.ended for window in tally.windows[:4]] == [0, 2, 1, 1]


def test_offline_ends_with_the_last() -> None:
    """A span without an end reaches to whatever ends last."""
    tally = Tally((5.0, None), ())
    tally.add(records((5, 6, 200), (5, 9, 200)))
    assert tally.seconds == 4
    assert tally.per_second()["requests"] == 0.5

"""Bounds: read as they are written, and missed for a reason."""

import pytest

from loadtest.errors import LoadTestError
from loadtest.slo import Bound, Counts, parse_slo


def test_is_read() -> None:
    """Any unit, several bounds, and the errors that are allowed."""
    slo = parse_slo("p50=500us, p99.9<=1.5s,errors=0.1%")
    assert slo.bounds == (Bound(0.5, 0.0005), Bound(pytest.approx(0.999), 1.5))
    assert slo.errors == pytest.approx(0.001)
    assert slo.strictest.seconds == 1.5
    assert str(slo) == "p50=0.5ms,p99.9=1500ms,errors=0.1%"


@pytest.mark.parametrize(
    "text", ["", "p99", "p99=50", "99=50ms", "p0=5ms", "p100=5ms", "p99=0ms", "errors=1%", "p99=50ms;p50=1ms"]
)
def test_anything_else_is_refused(text: str) -> None:
    """With an example of what is wanted."""
    with pytest.raises(LoadTestError, match="want p99=50ms"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("within", "answered", "ended", "said"),
    [
        (990, 1000, 1000, []),
        (989, 1000, 1000, ["p99=50ms: 98.900% were within it"]),
        (985, 985, 1000, ["errors: 1.50%, at most 1.00% may be"]),
        (0, 0, 10, ["nothing was answered"]),
    ],
    ids=["just", "too_slow", "too_many_errors", "nothing"],
)
def test_is_missed(within: int, answered: int, ended: int, said: list[str]) -> None:
    """By latency of what was answered, and by what was not, each for itself."""
    slo = parse_slo("p99=50ms")
    assert slo.missed(Counts(ended, answered, {slo.bounds[0]: within})) == said


@pytest.mark.parametrize(
    ("within", "answered", "is_clear"),
    [
        ([100] * 8, [100] * 8, True),
        ([60, 70, 50, 65, 60, 55, 50, 60], [100] * 8, True),
        ([100] * 7 + [10], [100] * 8, False),
        ([100, 98, 99, 100, 99, 98, 100, 99], [100] * 8, False),
        ([100] * 8, [100, 90, 80, 70, 60, 50, 40, 30], True),
        ([100, 98, 99, 100, 99, 98, 100, 99], [50] * 8, True),
        ([100], [100], False),
        ([0] * 4, [0] * 4, True),
    ],
    ids=["kept", "missed", "disturbed_once", "at_the_bound", "queue_grows", "errors_alone", "one_window", "nothing"],
)
def test_windows_leave_doubt(within: list[int], answered: list[int], is_clear: bool) -> None:  # pytest gives it
    """Where they disagree, or one of them alone makes the difference."""
    slo = parse_slo("p99=50ms")
    windows = [Counts(100, of, {slo.bounds[0]: one}) for one, of in zip(within, answered, strict=True)]
    assert slo.is_clear(windows) is is_clear

"""Bounds: read as they are written, and missed for a reason."""

import pytest

from loadtest.errors import LoadTestError
from loadtest.slo import Bound, parse_slo


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
    assert slo.missed({slo.bounds[0]: within}, answered, ended) == said

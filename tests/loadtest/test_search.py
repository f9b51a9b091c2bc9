"""The search for the highest rate that passes."""

import pytest

from loadtest.errors import LoadTestError
from loadtest.search import highest


@pytest.mark.parametrize("start", [1.0, 16.0, 700.0, 5000.0])
@pytest.mark.parametrize("limit", [37.0, 613.0])
def test_lands_below_the_limit_within_the_resolution(start: float, limit: float) -> None:
    """From below or from above."""
    tried: list[float] = []

    def passes(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    assert limit / 1.05 <= highest(passes, start, 0.05) <= limit
    assert len(tried) < 30


def test_one_disturbance_does_not_end_it() -> None:
    """A rate that fails while doubling is tried once more."""
    disturbed = iter([False])
    assert highest(lambda rate: rate <= 100 and (rate != 8 or next(disturbed, True)), 1, 0.05) > 95


@pytest.mark.parametrize(("passing", "said"), [(False, "not even"), (True, "still pass")], ids=["none", "all"])
def test_without_a_limit(passing: bool, said: str) -> None:  # pytest gives it
    """Said, not looped for."""
    with pytest.raises(LoadTestError, match=said):
        highest(lambda _: passing, 16, 0.05)

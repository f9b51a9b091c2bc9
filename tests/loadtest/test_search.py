"""The search for the highest rate that passes."""

from collections.abc import Callable

import numpy as np
import pytest

from loadtest.search import Search, Trial


def clearly(passes: Callable[[float], bool]) -> Callable[[float], Trial]:
    """Levels that leave no doubt."""
    return lambda rate: Trial(passes(rate), is_clear=True)


@pytest.mark.parametrize("start", [1.0, 16.0, 700.0, 5000.0])
@pytest.mark.parametrize("limit", [37.0, 613.0])
def test_lands_below_the_limit_within_the_resolution(start: float, limit: float) -> None:
    """From below or from above, with one level at each rate where that is clear."""
    search = Search(clearly(lambda rate: rate <= limit), 0.05)
    assert limit / 1.05 <= (search.highest(start) or 0) <= limit
    assert len(search.decisions) < 30
    assert all(len(decision.trials) == 1 for decision in search.decisions)


def test_one_disturbance_does_not_end_it() -> None:
    """A level that failed for one bad moment leaves doubt, and its rate is tried again."""
    disturbed = iter([Trial(passed=False, is_clear=False)])

    def attempt(rate: float) -> Trial:
        clear = Trial(rate <= 100, is_clear=True)
        return next(disturbed, clear) if rate == 8 else clear

    search = Search(attempt, 0.05)
    assert (search.highest(1) or 0) > 95
    assert [len(decision.trials) for decision in search.decisions if decision.rate == 8] == [4]


def test_noise_leaves_it_where_half_of_the_levels_pass() -> None:
    """A level passes by chance, more rarely the higher its rate; neither luck nor bad luck may decide."""
    rng = np.random.default_rng(0)

    def attempt(rate: float) -> Trial:
        margin = np.log(600 / rate) / 0.07 + rng.standard_normal()
        return Trial(bool(margin > 0), is_clear=abs(margin) > 2)

    found = [Search(attempt, 0.05).highest(50) or 0 for _ in range(300)]
    # Down by half the resolution, since it names the rate that passed and not the middle.
    assert np.median(found) == pytest.approx(600 / 1.025, rel=0.02)
    assert np.mean(np.abs(np.log(np.array(found) / 600)) < 0.1) > 0.85


def test_without_a_limit() -> None:
    """None where nothing passes; where everything does, no more than a million."""
    assert Search(clearly(lambda _: False), 0.05).highest(16) is None
    assert 5e5 < (Search(clearly(lambda _: True), 0.05).highest(16) or 0) < 2.1e6

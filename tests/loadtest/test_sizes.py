"""Distributions of sizes: what they draw, and how a wrong one is refused."""

import pickle

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.sizes import parse_sizes


def drawn(text: str, count: int = 20_000) -> np.ndarray:
    """That many, seeded."""
    return parse_sizes(text).draw(np.random.default_rng(5), count)


def test_fixed() -> None:
    """A number is that number."""
    assert set(drawn("16", 100)) == {16}


def test_uniform_reaches_both_ends_evenly() -> None:
    """Each whole number between the bounds comes as often as another."""
    values, counts = np.unique(drawn("uniform:min=3,max=7"), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert counts.min() > 3700


def test_lognormal_has_that_mean_before_it_is_cut() -> None:
    """With far bounds the mean is the one that was asked for; with near ones nothing lies beyond them."""
    assert drawn("lognormal:mean=64,max=100000").mean() == pytest.approx(64, rel=0.05)
    assert drawn("lognormal:mean=64,max=512,min=8,sigma=2").min() == 8
    assert drawn("lognormal:mean=64,max=512,min=8,sigma=2").max() == 512


def test_choice() -> None:
    """One of those that are named."""
    assert set(drawn("choice:2,3,5")) == {2, 3, 5}


def test_goes_to_other_processes() -> None:
    """What arrives there draws the same."""
    sizes = pickle.loads(pickle.dumps(parse_sizes("uniform:min=3,max=7")))  # noqa: S301
    assert str(sizes) == "uniform:min=3,max=7"
    assert (sizes.draw(np.random.default_rng(5), 9) == drawn("uniform:min=3,max=7", 9)).all()


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "1.5", "16:3", "normal:mean=3", "uniform:min=0,max=3", "uniform:min=5,max=3", "uniform:max=3",
     "lognormal:mean=64", "lognormal:mean=-1,max=5", "lognormal:mean=4,max=5,mode=3", "choice:", "choice:0,1",
     "uniform:min"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    """With what was given and what is wanted."""
    with pytest.raises(LoadTestError, match=r"want one of 16, uniform"):
        parse_sizes(text)

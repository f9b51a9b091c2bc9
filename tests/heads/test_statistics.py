"""Intervals that hold what they promise, and orders compared."""

import itertools

import numpy as np
import pytest

from heads.statistics import agreement, means


def test_intervals_hold_the_mean_nineteen_times_of_twenty() -> None:
    """Of 300 samples of 40 from a skewed distribution whose mean is 1, each for itself."""
    samples = np.random.default_rng(0).exponential(size=(40, 300))
    found = means(samples, seed=1)
    assert [one.mean for one in found] == pytest.approx(samples.mean(axis=0))
    assert all(one.low < one.mean < one.high for one in found)
    assert 0.88 < np.mean([one.low <= 1 <= one.high for one in found]) < 0.97


def test_is_seeded() -> None:
    """Same seed, same interval."""
    samples = np.random.default_rng(0).standard_normal((10, 3))
    assert means(samples, seed=1) == means(samples, seed=1) != means(samples, seed=2)


def test_one_entry_has_no_width() -> None:
    """Nothing is known of others."""
    (only,) = means([[0.25]], seed=0)
    assert (only.mean, only.low, only.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),
        ([1, 2, 3], [5, 5, 5], 0.0),
        ([1, 2, 2, 3], [1, 2, 3, 4], 5 / np.sqrt(5 * 6)),
    ],
)
def test_agreement(first: list[float], second: list[float], tau: float) -> None:
    """Kendall's tau-b, by counting pairs."""
    assert agreement(first, second) == pytest.approx(tau)


def test_agreement_by_counting() -> None:
    """Of random scores: pairs in the same order less pairs in the opposite, over all pairs."""
    one, other = np.random.default_rng(3).standard_normal((2, 12))
    pairs = list(itertools.combinations(range(12), 2))
    same = sum(1 if (one[i] - one[j]) * (other[i] - other[j]) > 0 else -1 for i, j in pairs)
    assert agreement(one, other) == pytest.approx(same / len(pairs))

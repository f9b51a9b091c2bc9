"""Histograms of durations: exact to a tenth of a percent, and silent where they know too little."""

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from loadtest.durations import Durations


def durations(values_s: np.ndarray) -> Durations:
    """Counted in three pieces."""
    counted = Durations()
    for part in np.array_split(values_s, 3):
        counted.add(part)
    return counted


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99, 0.999])
def test_quantiles_are_those_of_the_values(quantile: float) -> None:
    """Within a tenth of a percent and a microsecond, over six orders of magnitude."""
    values = np.random.default_rng(1).lognormal(-6, 2, 50_000)
    exact = float(np.quantile(values, quantile, method="inverted_cdf"))
    assert durations(values).quantile_s(quantile) == pytest.approx(exact, rel=2e-3, abs=2e-6)


def test_mean_and_largest_are_exact() -> None:
    """They do not come from the steps of the histogram."""
    values = np.array([0.001, 0.0021234567, 3.3])
    assert durations(values).mean_s() == pytest.approx(values.mean())
    assert durations(values).max_s() == 3.3


@pytest.mark.parametrize(("quantile", "needed"), [(0.5, 20), (0.9, 100), (0.99, 1000), (0.999, 10_000)])
def test_quantile_wants_ten_beyond_it(quantile: float, needed: int) -> None:
    """With one fewer it is not told."""
    values = np.linspace(0.001, 1, needed)
    assert durations(values).quantile_s(quantile) is not None
    assert durations(values[1:]).quantile_s(quantile) is None


def test_of_none() -> None:
    """Nothing is known, and nothing breaks."""
    nothing = durations(np.array([]))
    assert (nothing.mean_s(), nothing.max_s(), nothing.quantile_s(0.5), nothing.estimate_s(0.5)) == (
        None,
        None,
        None,
        0,
    )


def test_curve_ends_at_the_largest() -> None:
    """Ascending, up to all of them."""
    quantiles, values_s = durations(np.array([0.001, 0.002, 0.002, 0.5])).curve()
    assert quantiles == pytest.approx([0.25, 0.75, 1])
    assert values_s == pytest.approx([0.001, 0.002, 0.5], rel=1e-3)


def test_encoded_is_hdr_histograms_own_form() -> None:
    """Its library reads it, and finds the values, in microseconds."""
    read = HdrHistogram.decode(durations(np.array([0.001] * 5 + [0.25])).encoded())
    assert read.get_total_count() == 6
    assert read.get_value_at_percentile(100) == pytest.approx(250_000, rel=1e-3)

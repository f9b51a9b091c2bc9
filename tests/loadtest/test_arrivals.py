"""Schedules: the arrival process is what it says, and a trace is read or refused with its line."""

from pathlib import Path

import numpy as np
import pytest

from loadtest.arrivals import read_trace, schedule
from loadtest.errors import LoadTestError
from loadtest.shapes import Shape


def kolmogorov_smirnov(gaps: np.ndarray, rate: float) -> float:
    """The largest distance of the gaps' distribution from the exponential one, times the root of their number."""
    ordered = np.sort(gaps)
    exact = 1 - np.exp(-rate * ordered)
    steps = np.arange(len(gaps) + 1) / len(gaps)
    return float(np.sqrt(len(gaps)) * max((steps[1:] - exact).max(), (exact - steps[:-1]).max()))


# 1.95 is exceeded once in a thousand times by gaps that are exponential (Kolmogorov's distribution).
CRITICAL = 1.95


class TestPoisson:
    def test_gaps_are_exponential(self) -> None:
        """Kolmogorov and Smirnov have no objection; even spacing fails their test by far."""
        due = schedule(101, 97, "poisson", seed=1)
        assert kolmogorov_smirnov(np.diff(due), 101) < CRITICAL
        assert kolmogorov_smirnov(np.diff(schedule(101, 97, "constant", seed=1)), 101) > 10 * CRITICAL

    def test_number_is_about_the_rate(self) -> None:
        """Within four deviations of rate times seconds, none beyond the end, ascending."""
        due = schedule(53, 31, "poisson", seed=2)
        assert abs(len(due) - 53 * 31) < 4 * (53 * 31) ** 0.5
        assert due[-1] < 31
        assert (np.diff(due) > 0).all()

    def test_fills_the_time_even_at_low_rates(self) -> None:
        """A rate at which few come leaves no gap at the end that is due to running out of numbers."""
        counts = [len(schedule(0.5, 20, "poisson", seed=seed)) for seed in range(200)]
        assert 9 < np.mean(counts) < 11

    def test_is_the_seeds(self) -> None:
        """The same seed gives the same schedule, so that processes can share one; another gives another."""
        assert (schedule(7, 11, "poisson", 3) == schedule(7, 11, "poisson", 3)).all()
        assert schedule(7, 11, "poisson", 3)[0] != schedule(7, 11, "poisson", 4)[0]


def test_constant_is_evenly_spaced() -> None:
    """One each period, the first at once."""
    assert schedule(5, 2, "constant", 0) == pytest.approx(np.arange(10) / 5)


class TestTrace:
    def test_is_read_in_order_of_time(self, tmp_path: Path) -> None:
        """Offsets and shapes; comments and empty lines do not count."""
        path = tmp_path / "trace"
        path.write_text("# recorded\n0.5 2x3x5x4\n\n0.25 1x7  # self\n1 1x2x3\n")
        trace = read_trace(path)
        assert trace.due_s.tolist() == [0.25, 0.5, 1]
        assert trace.shapes == (Shape((7,)), Shape((3, 3), (5, 5), (4, 4)), Shape((2,), (3,)))

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("0.5", "line 2: got '0.5'"),
            ("-1 1x2", "line 2"),
            ("0.5 1x0", "line 2"),
            ("0.5 1x2x3x4", "line 2"),
            ("nan 1x2", "line 2"),
            ("0.5 1xtwo", "want offset_s and BxQ"),
        ],
        ids=["one_word", "before_the_start", "empty_axis", "more_valid_than_keys", "no_time", "no_number"],
    )
    def test_line_that_is_none(self, tmp_path: Path, line: str, said: str) -> None:
        """The line is named, with what was wanted."""
        path = tmp_path / "trace"
        path.write_text(f"0 1x2\n{line}\n")
        with pytest.raises(LoadTestError, match=said):
            read_trace(path)

    def test_empty_or_missing(self, tmp_path: Path) -> None:
        """A file without requests is no trace, and one that is not there is named."""
        (tmp_path / "empty").write_text("# nothing\n")
        with pytest.raises(LoadTestError, match="has no request"):
            read_trace(tmp_path / "empty")
        with pytest.raises(LoadTestError, match="missing"):
            read_trace(tmp_path / "missing")

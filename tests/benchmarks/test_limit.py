"""Where a sweep has its limit."""

import pytest

from benchmarks.generator import limit


@pytest.mark.parametrize(
    ("passed", "expected"),
    [
        ([True, True, False, False], (200 * 400) ** 0.5),
        ([True, False, True, False], ((100 * 200) ** 0.5 + (400 * 800) ** 0.5) / 2),
        ([True, True, True, False, True, False, False, False], (200 * 400) ** 0.5),
    ],
    ids=["plain", "one_exception_either_way", "two_sweeps"],
)
def test_limit_has_the_fewest_exceptions(passed: list[bool], expected: float) -> None:
    """Whatever the order of the levels."""
    rates = [100.0, 200.0, 400.0, 800.0]
    levels = [(rates[place * 4 // len(passed)], one) for place, one in enumerate(passed)]
    assert limit(levels) == pytest.approx(expected)
    assert limit(levels[::-1]) == pytest.approx(expected)

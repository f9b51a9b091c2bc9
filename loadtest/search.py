"""The highest rate that passes: doubled until it fails, then halved in between, as MLPerf's LoadGen does. Pure."""

import math
from collections.abc import Callable

from loadtest.errors import LoadTestError

_LEAST_RATE = 0.1
_MOST_RATE = 1e6


def highest(passes: Callable[[float], bool], start: float, resolution: float) -> float:
    """The highest rate that passes, no further below the lowest that failed than `resolution`.

    A rate that fails while doubling is tried once more, since one disturbance would otherwise end the search early.

    Args:
        passes: tries a rate.
        start: the first one.
        resolution: 0.05 is five percent.

    Raises:
        LoadTestError: no rate passes, or every one does.
    """
    low, high = _bracket(passes, start)
    while high / low > 1 + resolution:
        middle = math.sqrt(low * high)
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def _bracket(passes: Callable[[float], bool], start: float) -> tuple[float, float]:
    rate = start
    if passes(rate) or passes(rate):
        while rate < _MOST_RATE:
            if not (passes(2 * rate) or passes(2 * rate)):
                return rate, 2 * rate
            rate *= 2
        raise LoadTestError(f"find-max: {rate:g} requests a second still pass")
    while rate > _LEAST_RATE:
        rate /= 2
        if passes(rate):
            return rate, 2 * rate
    raise LoadTestError(f"find-max: not even {rate:g} requests a second pass")

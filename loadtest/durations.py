"""Durations in an HDR histogram: exact to a tenth of a percent from a microsecond to an hour, in bounded memory."""

from typing import Any, Final, final

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

_LOWEST_US: Final = 1
_HIGHEST_US: Final = 3_600_000_000
_DIGITS: Final = 3
# 2**11 steps in each power of two, as a histogram of three digits has them.
_STEP_BITS: Final = 11
# Beyond the quantile, for it to be told at all: the largest of nine hundred values is no 99.9th percentile.
_SAMPLES_BEYOND: Final = 10

Seconds = NDArray[np.float64]


@final
class Durations:
    """A histogram of durations, which others can be added to."""

    def __init__(self) -> None:
        self._histogram = HdrHistogram(_LOWEST_US, _HIGHEST_US, _DIGITS)
        self.count = 0
        self._sum_s = 0.0
        self._max_s = 0.0

    def add(self, durations_s: Seconds) -> None:
        """Counts these."""
        if not len(durations_s):
            return
        self.count += len(durations_s)
        self._sum_s += float(durations_s.sum())
        self._max_s = max(self._max_s, float(durations_s.max()))
        for value_us, count in zip(*np.unique(_steps(durations_s), return_counts=True), strict=True):
            self._histogram.record_value(int(value_us), int(count))

    def mean_s(self) -> float | None:
        """Exactly; None if there are none."""
        return self._sum_s / self.count if self.count else None

    def max_s(self) -> float | None:
        """Exactly; None if there are none."""
        return self._max_s if self.count else None

    def quantile_s(self, quantile: float) -> float | None:
        """The duration that so large a part of them does not exceed; None where fewer than ten lie beyond it.

        Args:
            quantile: between 0 and 1.
        """
        if self.count * (1 - quantile) < _SAMPLES_BEYOND - 1e-6:
            return None
        return self.estimate_s(quantile)

    def estimate_s(self, quantile: float) -> float:
        """The same, however few there are; 0 if there are none."""
        return float(self._histogram.get_value_at_percentile(100 * quantile)) * 1e-6

    def curve(self) -> tuple[list[float], list[float]]:
        """Every quantile at which the histogram has a value, and the values in seconds, both ascending."""
        quantiles, values_s, seen = [], [], 0
        for item in self._histogram.get_recorded_iterator():
            seen += item.count_added_in_this_iter_step
            quantiles.append(seen / self.count)
            values_s.append(item.value_iterated_to * 1e-6)
        return quantiles, values_s

    def encoded(self) -> str:
        """HdrHistogram's own format (V2, compressed, base64), microseconds: other tools read and add it."""
        encoded: bytes = self._histogram.encode()
        return encoded.decode()


def _steps(durations_s: Seconds) -> NDArray[Any]:
    # Rounded as the histogram will, so that few different values are left to count one by one.
    values_us = np.clip(np.rint(durations_s * 1e6), _LOWEST_US, _HIGHEST_US).astype(np.int64)
    shift = np.maximum(np.frexp(values_us.astype(np.float64))[1] - _STEP_BITS, 0)
    steps: NDArray[Any] = (values_us >> shift) << shift
    return steps

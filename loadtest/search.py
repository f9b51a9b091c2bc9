"""The highest rate that passes: doubled until it fails, then halved in between, as MLPerf's LoadGen does. Pure.

Near the limit one level says little: its percentile is that of a few seconds, and at nine tenths of what a server can
do that swings by a factor of two. A rate whose level leaves doubt is therefore tried again, and most of its levels
decide.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

_LEAST_RATE: Final = 0.1
_MOST_RATE: Final = 1e6
_MOST_LEVELS: Final = 5


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """One level at a rate: whether it passed, and whether that is clear."""

    passed: bool
    is_clear: bool


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """What several levels at one rate have decided."""

    rate: float
    trials: list[Trial]

    @property
    def passed(self) -> bool:
        """What most of them say."""
        return 2 * self._passes > len(self.trials)

    @property
    def is_made(self) -> bool:
        """Whether no further level is wanted: the first was clear, or most of all that may be tried agree."""
        if not self.trials:
            return False
        # A clear one after others would not do: near the limit those that pass are the calmer ones.
        most = max(self._passes, len(self.trials) - self._passes)
        return self.trials[0].is_clear or most > _MOST_LEVELS // 2

    @property
    def _passes(self) -> int:
        return sum(trial.passed for trial in self.trials)


@final
@dataclass(slots=True)
class Search:
    """Looks for the highest rate that passes.

    Args:
        attempt: runs a level at a rate.
        resolution: 0.05 is five percent.

    Attributes:
        decisions: of all rates that were tried, in order.
    """

    attempt: Callable[[float], Trial]
    resolution: float
    decisions: list[Decision] = field(default_factory=list)

    def highest(self, start: float) -> float | None:
        """The highest rate that passes, no further below the lowest that failed than the resolution.

        None if no rate passes. A million requests a second is not exceeded.

        Args:
            start: the first one to try.
        """
        low, high = self._bracket(start)
        while low and high / low > 1 + self.resolution:
            middle = math.sqrt(low * high)
            if self._passes(middle):
                low = middle
            else:
                high = middle
        return low or None

    def _bracket(self, start: float) -> tuple[float, float]:
        rate = start
        if self._passes(rate):
            while rate < _MOST_RATE:
                if not self._passes(2 * rate):
                    return rate, 2 * rate
                rate *= 2
            return rate, rate
        while rate > _LEAST_RATE:
            rate /= 2
            if self._passes(rate):
                return rate, 2 * rate
        return 0.0, rate

    def _passes(self, rate: float) -> bool:
        decision = Decision(rate, [])
        self.decisions.append(decision)
        while not decision.is_made:
            decision.trials.append(self.attempt(rate))
        return decision.passed

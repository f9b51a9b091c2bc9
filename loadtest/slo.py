"""What a service has promised: percentiles of latency within bounds, and how many requests may go wrong. Pure."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from loadtest.errors import LoadTestError

_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FORM: Final = "p99=50ms, or several: p50=5ms,p99=50ms,errors=1%"
_DEFAULT_ERRORS: Final = 0.01
# Standard errors from the bound, beyond which windows leave no doubt.
_CLEAR: Final = 2.0


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """A quantile of latency, and the seconds it may reach."""

    quantile: float
    seconds: float

    def __str__(self) -> str:
        return f"p{100 * self.quantile:g}={1000 * self.seconds:g}ms"


@final
@dataclass(slots=True)
class Counts:
    """What became of some requests.

    Attributes:
        ended: all of them.
        answered: of those.
        within: of those, for each bound, how many within its seconds.
    """

    ended: int = 0
    answered: int = 0
    within: dict[Bound, int] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds that all have to hold.

    Attributes:
        bounds: of latency from when requests were due, of those that were answered.
        errors: the part of all requests that may be refused, late or broken.
    """

    bounds: tuple[Bound, ...]
    errors: float = _DEFAULT_ERRORS

    def __str__(self) -> str:
        return ",".join([*map(str, self.bounds), f"errors={100 * self.errors:g}%"])

    @property
    def strictest(self) -> Bound:
        """The one for the highest quantile, within which an answer counts as good."""
        return max(self.bounds, key=lambda bound: bound.quantile)

    def missed(self, counts: Counts) -> list[str]:
        """What does not hold, in words; nothing if all does."""
        if not counts.answered:
            return ["nothing was answered"]
        missed = [
            f"{bound}: {counts.within[bound] / counts.answered:.3%} were within it"
            for bound in self.bounds
            if counts.within[bound] < bound.quantile * counts.answered
        ]
        errors = 1 - counts.answered / counts.ended
        return missed + ([f"errors: {errors:.2%}, at most {self.errors:.2%} may be"] if errors > self.errors else [])

    def is_clear(self, windows: Sequence[Counts]) -> bool:
        """Whether windows of one level leave no doubt that what they say together is so.

        Each bound has a margin in each window, the requests that it has to spare. It is clear where the sum is further
        from zero than two standard errors by their spread; all bounds have to hold clearly, or one be clearly missed.
        A disturbance of one window is unclear by this, and so is a level whose percentile lies at the bound.
        """
        if len(windows) < 2:
            return False
        kept = [_clearly_kept(margins) for margins in zip(*map(self._margins, windows), strict=True)]
        return all(kept) or False in kept

    def _margins(self, counts: Counts) -> list[float]:
        of_bounds = [counts.within[bound] - bound.quantile * counts.answered for bound in self.bounds]
        return [*of_bounds, counts.answered - (1 - self.errors) * counts.ended]


def _clearly_kept(margins: Iterable[float]) -> bool | None:
    values = list(margins)
    doubt = _CLEAR * math.sqrt(len(values)) * statistics.stdev(values)
    return None if abs(sum(values)) < doubt else sum(values) >= 0


def parse_slo(text: str) -> Slo:
    """Bounds as they are written: `p99=50ms`, separated by commas; `errors=1%` is the default.

    Raises:
        LoadTestError: they are not.
    """
    given: dict[str, Any] = {}
    bounds = []
    for part in text.split(","):
        if match := re.fullmatch(r"\s*p([\d.]+)<?=([\d.]+)(us|ms|s)\s*", part):
            bounds.append(Bound(float(match[1]) / 100, float(match[2]) * _UNITS_S[match[3]]))
        elif match := re.fullmatch(r"\s*errors<?=([\d.]+)%\s*", part):
            given["errors"] = float(match[1]) / 100
        else:
            raise LoadTestError(f"slo: got {part!r}, want {_FORM}")
    if not bounds or not all(0 < bound.quantile < 1 and bound.seconds > 0 for bound in bounds):
        raise LoadTestError(f"slo: got {text!r}, want {_FORM}")
    return Slo(tuple(bounds), **given)

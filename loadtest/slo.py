"""What a service has promised: percentiles of latency within bounds, and how many requests may go wrong. Pure."""

import re
from dataclasses import dataclass
from typing import Any, Final, final

from loadtest.errors import LoadTestError

_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FORM: Final = "p99=50ms, or several: p50=5ms,p99=50ms,errors=1%"
_DEFAULT_ERRORS: Final = 0.01


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """A quantile of latency, and the seconds it may reach."""

    quantile: float
    seconds: float

    def __str__(self) -> str:
        return f"p{100 * self.quantile:g}={1000 * self.seconds:g}ms"


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

    def missed(self, within: dict[Bound, int], answered: int, ended: int) -> list[str]:
        """What does not hold, in words; nothing if all does.

        Args:
            within: for each bound, how many were answered within its seconds.
            answered: how many were answered.
            ended: how many were sent.
        """
        if not answered:
            return ["nothing was answered"]
        missed = [
            f"{bound}: {within[bound] / answered:.3%} were within it"
            for bound in self.bounds
            if within[bound] < bound.quantile * answered
        ]
        errors = 1 - answered / ended
        return missed + ([f"errors: {errors:.2%}, at most {self.errors:.2%} may be"] if errors > self.errors else [])


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

"""What is run: single levels, or one of MLPerf's scenarios. Pure.

The scenarios are those of MLPerf's LoadGen (loadgen/test_settings.h): single-stream and multi-stream wait for an answer
before they ask again, server has Poisson arrivals and a bound for the 99th percentile, offline has everything due at
once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, final

from loadtest.errors import LoadTestError
from loadtest.level import Level
from loadtest.slo import Slo, parse_slo

Name = Literal["single-stream", "multi-stream", "server", "offline"]
NAMES: Final[tuple[Name, ...]] = ("single-stream", "multi-stream", "server", "offline")
_MULTI_STREAM_SAMPLES: Final = 8
_SERVER_SLO: Final = "p99=100ms"


@final
@dataclass(frozen=True, slots=True)
class Scenario:
    """One of MLPerf's.

    Attributes:
        name: as LoadGen has it.
        level: its load.
        slo: its bound, if it has one.
        headline: which figure is its result: a path into a level's result.
        unit: of the headline.
    """

    name: Name
    level: Level
    slo: Slo | None
    headline: tuple[str, str]
    unit: str

    def result(self, level: Mapping[str, Any]) -> str:
        """The scenario's figure, in words."""
        group, figure = self.headline
        value = level[group][figure]
        what = "answers a second" if group == "per_second" else f"{figure} latency"
        return f"{self.name}: {what} " + ("too few to say" if value is None else f"{value:.4g} {self.unit}".strip())


def scenario(name: Name, base: Level, rate: float | None, samples: int | None, concurrency: int) -> Scenario:
    """The scenario of that name.

    Args:
        name: of the scenario.
        base: a level that lasts as long.
        rate: requests a second, for server.
        samples: requests at once, for multi-stream; all of them, for offline.
        concurrency: connections, for offline.

    Raises:
        LoadTestError: server without a rate.
    """
    match name:
        case "single-stream":
            return Scenario(name, replace(base, kind="closed", concurrency=1), None, ("latency_ms", "p90"), "ms")
        case "multi-stream":
            level = replace(base, kind="multi-stream", samples=samples or _MULTI_STREAM_SAMPLES)
            return Scenario(name, level, None, ("latency_ms", "p99"), "ms")
        case "server":
            if rate is None:
                raise LoadTestError("scenario server: want --rate, or --find-max for the highest one that passes")
            level = replace(base, kind="open", rate=rate)
            return Scenario(name, level, parse_slo(_SERVER_SLO), ("per_second", "requests"), "")
        case "offline":
            level = Level("offline", 0.0, samples=samples or 1000, concurrency=concurrency)
            return Scenario(name, level, None, ("per_second", "requests"), "")

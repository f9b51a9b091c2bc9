"""Whether a level can be believed: was the generator in time, and did the server settle. Pure."""

from collections.abc import Sequence
from typing import Final

from loadtest.driver import Usage
from loadtest.level import Level
from loadtest.tally import Tally

MOST_CPU: Final = 0.9
"""Of a core, for a process that sends; beyond that, and beyond the lag below, the generator is what is measured."""
_MOST_LAG_S: Final = 0.001
_MOST_LAG: Final = 0.1
_MOST_WAITING: Final = 0.2
# As perf_analyzer judges: the last three windows within a tenth of each other.
_STEADY_WINDOWS: Final = 3
_STEADY: Final = 1.1
_LEAST_IN_WINDOW: Final = 20


def faults(level: Level, tally: Tally, usages: Sequence[Usage]) -> list[str]:
    """Why the figures of a level are the generator's and not the server's, with what to change; none if they hold."""
    found = []
    busiest = max(usage.cpu_s / max(usage.wall_s, 1e-9) for usage in usages)
    if busiest > MOST_CPU:
        found.append(
            f"a process that sends was busy for {busiest:.0%} of the time; use more --processes, or another machine"
        )
    if not level.is_open or level.kind == "offline":
        return found
    lag_s, latency_s = tally.lag.estimate_s(0.99), tally.latency.estimate_s(0.99)
    if lag_s > max(_MOST_LAG_S, _MOST_LAG * latency_s):
        found.append(
            f"1 % of the requests were taken up {1000 * lag_s:.1f} ms late or later; use more --processes, a lower "
            "rate, or another machine than the server's"
        )
    waited = sum(usage.had_to_wait for usage in usages)
    if waited:
        found.append(f"{waited} requests had to wait for a connection; allow more --connections")
    return found


def remarks(level: Level, tally: Tally, usages: Sequence[Usage]) -> list[str]:
    """What a reader should know of a level whose figures hold."""
    found = []
    steady = is_steady(tally)
    if steady is False:
        found.append(
            "the last three windows differ by more than a tenth: not settled, or disturbed; try a longer --duration"
        )
    waiting = max(usage.waited_s / max(usage.wall_s, 1e-9) for usage in usages)
    if waiting > _MOST_WAITING:
        found.append(
            f"a process that sends waited for a core for {waiting:.0%} of the time: it shares the machine with what it "
            "measures, and takes from it"
        )
    if level.kind == "closed" and tally.outcomes["answered"]:
        missing = tally.latency.quantile_s(0.99) is None
        return [*found, *(["too few answers for a p99; try a longer --duration"] if missing else [])]
    return found


def is_steady(tally: Tally) -> bool | None:
    """Whether throughput and median latency of the last windows agree; None where there are too few to say."""
    windows = tally.windows[-_STEADY_WINDOWS:]
    if len(windows) < _STEADY_WINDOWS or min(window.answered for window in windows) < _LEAST_IN_WINDOW:
        return None
    answered = [window.answered for window in windows]
    medians_s = [window.latency.estimate_s(0.5) for window in windows]
    return all(max(figures) <= _STEADY * max(min(figures), 1e-9) for figures in (answered, medians_s))

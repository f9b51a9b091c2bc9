"""What became of the requests of a level, in memory that does not grow with their number. Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from loadtest.connection import BROKEN, TIMED_OUT
from loadtest.durations import Durations
from loadtest.records import Records
from loadtest.slo import Bound, Counts

OUTCOMES: Final = ("answered", "refused", "timed_out", "failed", "broken")
_REFUSED: Final = (429, 503)
_LATE: Final = (TIMED_OUT, 504)
_MOST_WINDOWS: Final = 30
_LEAST_WINDOW_S: Final = 1.0
_AMOUNTS: Final = ("rows", "queries", "tokens", "sent_bytes", "received_bytes")
Span = tuple[float, float]


def outcome(status: int) -> str:
    """What a status means for who asked, one of `OUTCOMES`."""
    if status == BROKEN:
        return "broken"
    if status in _LATE:
        return "timed_out"
    if status in _REFUSED:
        return "refused"
    return "answered" if status // 100 == 2 else "failed"


@final
class Window:
    """A part of a level.

    Attributes:
        begins_s: after the warm-up.
        answered: that ended in it.
        latency: of those that were due in it and answered.
        counts: of those that were due in it.
    """

    def __init__(self, begins_s: float, bounds: Sequence[Bound]) -> None:
        self.begins_s = begins_s
        self.answered = 0
        self.latency = Durations()
        self.counts = Counts(within=dict.fromkeys(bounds, 0))

    def add(self, latency_s: Any) -> None:
        """Counts answers to what was due in it, by their latencies."""
        self.latency.add(latency_s)
        self.counts.answered += len(latency_s)
        for bound in self.counts.within:
            self.counts.within[bound] += int((latency_s <= bound.seconds).sum())


@final
class Tally:
    """Counts the records of one level.

    Latency is that of requests due in the span, whenever they end; throughput is of answers that come in the span. What
    was due before it, in the warm-up, is no latency.

    Args:
        span: from the end of the warm-up to the end of the level, on the monotonic clock; the end of None is when the
            last one ends.
        bounds: for which answers within them are counted.
        expected_s: about how long the span will be, where it has no end.
    """

    def __init__(self, span: tuple[float, float | None], bounds: Sequence[Bound], expected_s: float = 0.0) -> None:
        self._begins_s, self._ends_s = span
        self._last_s = self._begins_s
        self.latency, self.service, self.lag = Durations(), Durations(), Durations()
        self.statuses: Counter[int] = Counter()
        self._bounds = tuple(bounds)
        self.arrived = 0
        self._amounts: dict[str, int] = dict.fromkeys(_AMOUNTS, 0)
        seconds = expected_s if self._ends_s is None else self.seconds
        count = max(1, min(_MOST_WINDOWS, int(seconds / _LEAST_WINDOW_S)))
        self.window_s = max(seconds / count, _LEAST_WINDOW_S)
        self.windows = [Window(number * self.window_s, self._bounds) for number in range(count)]

    def add(self, records: Records) -> None:
        """Counts these."""
        self._count_latency(records[records["due"] >= self._begins_s])
        self._last_s = max(self._last_s, float(records["done"].max(initial=self._last_s)))
        done = records[(records["done"] >= self._begins_s) & (records["done"] < (self._ends_s or np.inf))]
        answered = done[done["status"] // 100 == 2]
        self.arrived += len(answered)
        for name in _AMOUNTS:
            self._amounts[name] += int(answered[name].sum())
        for place, count in zip(*np.unique(self._places(answered["done"]), return_counts=True), strict=True):
            self.windows[int(place)].answered += int(count)

    @property
    def seconds(self) -> float:
        """How long the span is."""
        return (self._last_s if self._ends_s is None else self._ends_s) - self._begins_s

    @property
    def ended(self) -> int:
        """Requests that were due in the span."""
        return sum(self.statuses.values())

    @property
    def outcomes(self) -> dict[str, int]:
        """How many of them ended how."""
        counts = dict.fromkeys(OUTCOMES, 0)
        for status, count in self.statuses.items():
            counts[outcome(status)] += count
        return counts

    @property
    def counts(self) -> Counts:
        """Of all that were due in the span."""
        each = [window.counts for window in self.windows]
        within = {bound: sum(one.within[bound] for one in each) for bound in self._bounds}
        return Counts(sum(one.ended for one in each), sum(one.answered for one in each), within)

    def per_second(self) -> dict[str, float]:
        """Of answers that came in the span: requests, rows, queries, tokens and bytes."""
        seconds = max(self.seconds, 1e-9)
        return {"requests": self.arrived / seconds, **{name: sum_ / seconds for name, sum_ in self._amounts.items()}}

    def _count_latency(self, records: Records) -> None:
        self.statuses.update(records["status"].tolist())
        self.lag.add(records["picked"] - records["due"])
        answered = records[records["status"] // 100 == 2]
        latency_s = answered["done"] - answered["due"]
        self.latency.add(latency_s)
        self.service.add(answered["done"] - answered["sent"])
        for place, count in zip(*np.unique(self._places(records["due"]), return_counts=True), strict=True):
            self.windows[int(place)].counts.ended += int(count)
        places = self._places(answered["due"])
        for place in np.unique(places):
            self.windows[int(place)].add(latency_s[places == place])

    def _places(self, times_s: Any) -> Any:
        return np.clip(((times_s - self._begins_s) / self.window_s).astype(np.int64), 0, len(self.windows) - 1)

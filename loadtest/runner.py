"""Runs levels one after the other: tells the processes what to send, counts, and looks at the server meanwhile."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

from loadtest.exposition import Exposition, between, look
from loadtest.level import Level, Share
from loadtest.process import Processes
from loadtest.reference import References
from loadtest.result import level_result
from loadtest.slo import Slo
from loadtest.tally import Tally
from loadtest.target import Target

# For the processes to be told before a level begins.
_AHEAD_S: Final = 0.2
Show = Callable[[Level, Tally, float], None]


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """What is the same for all levels.

    Attributes:
        server: whose /metrics is looked at; None looks at none.
        references: that answers are compared with; None compares none.
        check_every: each so many requests one answer is compared.
        most_connections: of all processes, where requests come whatever becomes of those before.
        timeout_s: how long an answer is waited for.
        seed: of arrivals; each level has another one.
        slo: what is promised, if anything is.
    """

    server: Target | None
    references: References | None
    check_every: int
    most_connections: int
    timeout_s: float
    seed: int
    slo: Slo | None


@final
class Runner:
    """Runs levels with processes that are ready.

    Args:
        processes: that send.
        settings: the same for all levels.
        show: is told how a level goes, several times a second, and how many seconds of it have passed.
    """

    def __init__(self, processes: Processes, settings: Settings, show: Show) -> None:
        self._processes = processes
        self._settings = settings
        self._show = show
        self._levels = 0

    def run(self, level: Level) -> dict[str, Any]:
        """The figures of one level, when its last request has ended."""
        settings = self._settings
        self._levels += 1
        references = None if settings.references is None else settings.references.anew()
        shares = self._shares(level)
        begins_s, ends_s = shares[0].counts_from_s, shares[0].ends_s
        until_s = None if level.kind in ("offline", "trace") else ends_s
        tally = Tally((begins_s, until_s), settings.slo.bounds if settings.slo else (), level.seconds)
        looks = _Looks(settings.server, [begins_s, ends_s])

        def meanwhile() -> None:
            looks.when_due()
            self._show(level, tally, time.monotonic() - shares[0].begins_s)

        said: dict[str, str] = {}
        usages = self._processes.send(
            shares,
            tally.add,
            compare=lambda process, kept: references.compare(process, kept) if references else None,
            hear=lambda one: said.update({str(one.status): one.text}),
            meanwhile=meanwhile,
        )
        if level.kind == "offline":
            looks.last()
        result = level_result(level, tally, usages, server=looks.between(), references=references, slo=settings.slo)
        return {**result, "said": said}

    def _shares(self, level: Level) -> list[Share]:
        settings, count = self._settings, len(self._processes)
        most = {"closed": level.concurrency, "offline": level.concurrency, "multi-stream": level.samples}
        connections = -(-most.get(level.kind, settings.most_connections) // count)
        begins_s = time.monotonic() + _AHEAD_S
        check_every = settings.check_every if settings.references else 0
        return [
            Share(
                level, process, count, begins_s, check_every, connections, settings.timeout_s,
                settings.seed + self._levels,
            )
            for process in range(count)
        ]  # fmt: skip


@final
class _Looks:
    # At /metrics, at two times.
    def __init__(self, server: Target | None, due_s: list[float]) -> None:
        self._server = server
        self._due_s = due_s
        self._looks: list[Exposition | None] = []

    def when_due(self) -> None:
        if self._server is not None and self._due_s and time.monotonic() >= self._due_s[0]:
            self._due_s.pop(0)
            self._looks.append(look(self._server))

    def last(self) -> None:
        if self._server is not None:
            self._looks[1:] = [look(self._server)]

    def between(self) -> dict[str, Any] | None:
        return between(*self._looks) if len(self._looks) == 2 else None

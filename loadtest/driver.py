"""Sends the requests of one level from one process: when they are due, not when there is time."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from loadtest.connection import BROKEN, TIMED_OUT, Exchange
from loadtest.connections import Connections
from loadtest.level import Share
from loadtest.records import record
from loadtest.shapes import together
from loadtest.sources import source
from loadtest.target import Target
from loadtest.workload import Made

MOST_REFERENCES: Final = 16
"""Of the bodies of a process, the first so many are those whose answers are compared."""
_REPORT_EVERY_S: Final = 0.1
# Answers kept for comparison that may wait to be fetched; beyond that requests are sent without looking at the answer.
_MOST_KEPT: Final = 32


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """What sending took of the machine, while it counted.

    Attributes:
        cpu_s: processor time of the process.
        waited_s: time in which it could have run and another process had the core; 0 where the system does not say.
        wall_s: in how long.
        most_open: connections at once.
        had_to_wait: requests that waited for a connection.
    """

    cpu_s: float
    waited_s: float
    wall_s: float
    most_open: int
    had_to_wait: int


@final
@dataclass(frozen=True, slots=True)
class Kept:
    """An answer to compare: which body it answers, by its place in the process, and what came."""

    body: int
    status: int
    headers: dict[str, str]
    content: bytes


@final
@dataclass(frozen=True, slots=True)
class Said:
    """What a server said with a status, the first time that a process got it."""

    status: int
    text: str


@final
class Driver:
    """Sends one share.

    Args:
        share: what to send.
        target: where.
        bodies: of this process, sent in turn.
        report: is given records of ended requests, several times a second.
        keep: is given answers to compare, and what refusals said.
    """

    def __init__(
        self,
        share: Share,
        target: Target,
        bodies: Sequence[Made],
        report: Callable[[bytes], None],
        keep: Callable[[Kept | Said], None],
    ) -> None:
        self._share = share
        self._bodies = bodies
        self._report = report
        self._keep = keep
        self._records: list[bytes] = []
        self._made = self._kept = 0
        self._heard: set[int] = set()
        self._defect: BaseException | None = None
        self._connections = Connections(target, bodies, share.most_connections, share.timeout_s, self._ended)
        self._source = source(share, self)

    async def run(self) -> Usage:
        """Sends everything, waits for the last answer, and tells what it took."""
        share = self._share
        asyncio.get_running_loop().set_exception_handler(self._note_defect)
        # Nothing here is cyclic but connections; a collection in the middle would make requests late.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            await _sleep_until(share.begins_s)
            self._source.start()
            await self._reporting_until(share.counts_from_s)
            before = _used()
            await self._reporting_until(share.ends_s)
            after = _used()
            self._source.close()
            await self._last_answers()
            if share.level.kind == "offline":  # which lasts as long as it takes
                after = _used()
        finally:
            gc.enable()
            gc.unfreeze()
            self._connections.close()
            self._flush()
        cpu_s, waited_s, wall_s = (end - begin for begin, end in zip(before, after, strict=True))
        return Usage(cpu_s, waited_s, wall_s, self._connections.most_open, self._connections.had_to_wait)

    def send(self, due_s: float) -> None:
        """Sends the next request, which was due then."""
        number, bodies = self._made, len(self._bodies)
        self._made += 1
        exchange = Exchange(due_s, time.monotonic(), number % bodies, number // bodies + 1)
        every = self._share.check_every
        if every and number % every == 0 and self._kept < _MOST_KEPT:
            # As it was when the reference was made.
            exchange.body, exchange.mark = (number // every) % min(bodies, MOST_REFERENCES), 0
            exchange.kept = bytearray()
            self._kept += 1
        self._connections.submit(exchange)

    def note(self, exchange: Exchange) -> None:
        """Records a request that has ended."""
        self._records.append(record(exchange, self._bodies[exchange.body].shape))

    def note_group(self, exchanges: Sequence[Exchange]) -> None:
        """Records requests that were due together as one, which has ended with the last of them."""
        one = replace(
            exchanges[0],
            sent_s=min(exchange.sent_s for exchange in exchanges),
            done_s=max(exchange.done_s for exchange in exchanges),
            status=max((exchange.status for exchange in exchanges), key=_badness),
            sent_bytes=sum(exchange.sent_bytes for exchange in exchanges),
            received_bytes=sum(exchange.received_bytes for exchange in exchanges),
        )
        self._records.append(record(one, together([self._bodies[exchange.body].shape for exchange in exchanges])))

    def _ended(self, exchange: Exchange) -> None:
        if exchange.kept is not None:
            self._keep(Kept(exchange.body, exchange.status, exchange.headers, bytes(exchange.kept)))
            exchange.kept = None
            self._kept -= 1
        if exchange.said and exchange.status not in self._heard:
            self._heard.add(exchange.status)
            self._keep(Said(exchange.status, exchange.said.decode(errors="replace")))
        self._source.ended(exchange)

    def _note_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # noqa: ARG002
        # A callback that failed has lost a request: the test must not wait for it, and not count without it.
        self._defect = context.get("exception") or RuntimeError(context["message"])

    async def _reporting_until(self, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            await asyncio.sleep(min(_REPORT_EVERY_S, left_s))
            if self._defect is not None:
                raise self._defect
            self._flush()
            self._connections.give_up_late_ones()

    async def _last_answers(self) -> None:
        # Each is answered or given up, so that this ends.
        while self._connections.in_flight:
            await self._reporting_until(time.monotonic() + _REPORT_EVERY_S / 10)

    def _flush(self) -> None:
        if self._records:
            self._report(b"".join(self._records))
            self._records.clear()


def _badness(status: int) -> int:
    # A broken connection or none in time is worse than any status, and a higher status worse than a lower one.
    return 1000 - status if status in (BROKEN, TIMED_OUT) else status


async def _sleep_until(when_s: float) -> None:
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))


def _used() -> tuple[float, float, float]:
    # Seconds: of the processor, of waiting for it, and of the clock.
    try:
        waited_s = int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        waited_s = 0.0
    return time.process_time(), waited_s, time.monotonic()

"""What is due when: three ways to decide it, behind one seam.

`Closed` waits for answers, `Open` does not, and `Groups` sends several at once and waits for all of them.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol, final

import numpy as np

from loadtest.arrivals import Seconds, read_trace, schedule
from loadtest.connection import BROKEN, Exchange
from loadtest.level import Share
from loadtest.timer import Timer, timer

# After a connection that broke, so that a server that is gone is not asked a million times.
_RESPITE_S: Final = 0.05


class Sender(Protocol):
    """Sends what is due, and records what has ended."""

    def send(self, due_s: float) -> None:
        """Sends the next request, which was due then."""

    def note(self, exchange: Exchange) -> None:
        """Records a request that has ended."""

    def note_group(self, exchanges: Sequence[Exchange]) -> None:
        """Records requests that were due together as one, which has ended with the last of them."""


class Source(Protocol):
    """Decides when requests are due."""

    def start(self) -> None:
        """At the beginning of the level."""

    def ended(self, exchange: Exchange) -> None:
        """A request has ended."""

    def close(self) -> None:
        """Nothing more is due."""


@final
class Closed:
    """So many requests in flight; the next is due when one is answered."""

    def __init__(self, sender: Sender, concurrency: int) -> None:
        self._sender = sender
        self._concurrency = concurrency
        self._closed = False

    def start(self) -> None:
        """As `Source` says."""
        for _ in range(self._concurrency):
            self._next()

    def ended(self, exchange: Exchange) -> None:
        """As `Source` says."""
        self._sender.note(exchange)
        if exchange.status == BROKEN:
            asyncio.get_running_loop().call_later(_RESPITE_S, self._next)
        else:
            self._next()

    def close(self) -> None:
        """As `Source` says."""
        self._closed = True

    def _next(self) -> None:
        if not self._closed:
            self._sender.send(time.monotonic())


@final
class Open:
    """Requests at times that were fixed before."""

    def __init__(self, sender: Sender, due_s: Seconds) -> None:
        self._sender = sender
        self._due_s: list[float] = due_s.tolist()
        self._next = 0
        self._timer: Timer | None = None

    def start(self) -> None:
        """As `Source` says."""
        self._timer = timer(self._ring)
        self._ring()

    def ended(self, exchange: Exchange) -> None:
        """As `Source` says."""
        self._sender.note(exchange)

    def close(self) -> None:
        """As `Source` says."""
        # What was due and could not be sent yet is late, and not left out.
        self._ring()
        if self._timer is not None:
            self._timer.close()

    def _ring(self) -> None:
        due_s = self._due_s
        while self._next < len(due_s) and due_s[self._next] <= time.monotonic():
            self._sender.send(due_s[self._next])
            self._next += 1
        if self._next < len(due_s) and self._timer is not None:
            self._timer.set(due_s[self._next])


@final
class Groups:
    """So many samples at once; the next so many are due when the last of them is answered. A group counts as one."""

    def __init__(self, sender: Sender, samples: int) -> None:
        self._sender = sender
        self._samples = samples
        self._closed = False
        self._done: list[Exchange] = []

    def start(self) -> None:
        """As `Source` says."""
        due_s = time.monotonic()
        for _ in range(self._samples):
            self._sender.send(due_s)

    def ended(self, exchange: Exchange) -> None:
        """As `Source` says."""
        self._done.append(exchange)
        if len(self._done) < self._samples:
            return
        self._sender.note_group(self._done)
        broken = any(one.status == BROKEN for one in self._done)
        self._done = []
        asyncio.get_running_loop().call_later(_RESPITE_S if broken else 0, self._again)

    def close(self) -> None:
        """As `Source` says."""
        self._closed = True

    def _again(self) -> None:
        if not self._closed:
            self.start()


def source(share: Share, sender: Sender) -> Source:
    """How the requests of that share are due."""
    level = share.level
    match level.kind:
        case "closed":
            own = len(range(share.process, level.concurrency, share.processes))
            return Closed(sender, own)
        case "multi-stream":
            return Groups(sender, level.samples)
        case _:
            return Open(sender, share.begins_s + _offsets(share)[share.process :: share.processes])


def _offsets(share: Share) -> Seconds:
    # Of all processes.
    level = share.level
    match level.kind:
        case "trace":
            assert level.trace is not None  # noqa: S101  # who makes such a level names its file
            return read_trace(level.trace).due_s
        case "offline":
            return np.zeros(level.samples)
        case _:
            return schedule(level.rate, level.warmup_s + level.seconds, level.process, share.seed)

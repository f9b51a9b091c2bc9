"""One HTTP/1.1 connection that asks one thing at a time, at the least cost that Python allows.

A load generator shares the machine with what it measures more often than not, and what a client costs is counted as the
server's latency. httptools reads the answers; docs/decisions/0012 has what the general clients would have cost.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast, final

import httptools

BROKEN: Final = 0
"""The status of a request whose connection broke."""
TIMED_OUT: Final = 1
"""The status of a request for which the client no longer waited."""

_MOST_SAID_BYTES: Final = 300


@final
@dataclass(slots=True)
class Exchange:
    """One request and what has come of it. Times are seconds on the monotonic clock.

    Attributes:
        due_s: when it should have been sent.
        picked_s: when the generator took it up; the difference is the generator's own lag.
        sent_s: when it was written to a connection.
        done_s: when its answer was complete.
        body: which body it sends, by its place in this process.
        mark: how often that body has been sent before.
        status: HTTP's, `BROKEN` or `TIMED_OUT`.
        attempts: how often it was written to a connection.
        kept: the answer's body, if somebody wants to look at it.
        said: the beginning of an answer that is a refusal.
    """

    due_s: float
    picked_s: float
    body: int
    mark: int
    sent_s: float = 0.0
    done_s: float = 0.0
    status: int = BROKEN
    attempts: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    kept: bytearray | None = None
    said: bytes = b""


@final
class Connection(asyncio.Protocol):
    """Sends requests one after the other, and tells when each has been answered or has failed.

    Args:
        finished: told of every exchange, once, with its status; the connection is free again unless it `is_closed`.
    """

    def __init__(self, finished: Callable[["Connection", Exchange], None]) -> None:
        self._finished = finished
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self.answers = 0
        self.is_closed = False

    @property
    def asked_s(self) -> float:
        """When what it waits for was sent; infinite if it waits for nothing."""
        return float("inf") if self._exchange is None else self._exchange.sent_s

    def ask(self, exchange: Exchange, head: bytes, content: bytes | bytearray) -> None:
        """Sends a request. The connection must be free."""
        assert self._transport is not None  # noqa: S101  # the loop connects before it hands the protocol over
        self._exchange = exchange
        exchange.attempts += 1
        exchange.sent_bytes = len(content)
        exchange.sent_s = time.monotonic()
        self._transport.writelines((head, content))

    def give_up(self) -> None:
        """No longer waits: what is in flight has timed out."""
        self._end(TIMED_OUT)

    def close(self) -> None:
        """Ends the connection."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: the connection is there."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class, and do the same

    def data_received(self, data: bytes) -> None:
        """asyncio's: a part of an answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(BROKEN)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio's signature
        """asyncio's: the connection is gone."""
        self._end(BROKEN)

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools': a header of an answer. Names are kept in lower case."""
        if self._exchange is not None and self._exchange.kept is not None:
            self._exchange.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        """httptools': a part of an answer's body."""
        exchange = self._exchange
        if exchange is not None:
            exchange.received_bytes += len(body)
            if self._parser.get_status_code() >= 400 and len(exchange.said) < _MOST_SAID_BYTES:
                exchange.said += body[:_MOST_SAID_BYTES]
            if exchange.kept is not None:
                exchange.kept += body

    def on_message_complete(self) -> None:
        """httptools': the whole answer is there."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.done_s = time.monotonic()
        self.answers += 1
        exchange.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._finished(self, exchange)

    def _end(self, status: int) -> None:
        exchange, self._exchange = self._exchange, None
        self.close()
        if exchange is not None:
            exchange.status, exchange.done_s = status, time.monotonic()
            self._finished(self, exchange)

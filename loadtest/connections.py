"""All connections of a process to a server: each request gets one that is free, or a new one, or waits for one."""

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

from loadtest.connection import BROKEN, Connection, Exchange
from loadtest.target import Target
from loadtest.workload import Made


@final
class Connections:
    """Sends requests, and tells of each when it has ended.

    A request on a connection that the server has closed since its last answer is sent again, as clients do.

    Args:
        target: where they go.
        bodies: what requests send, by `Exchange.body`.
        most: connections at once; beyond that requests wait, and their latency goes on.
        timeout_s: how long an answer is waited for.
        ended: told of every request, once.
    """

    def __init__(
        self, target: Target, bodies: Sequence[Made], most: int, timeout_s: float, ended: Callable[[Exchange], None]
    ) -> None:
        self._target = target
        self._bodies = [made.body for made in bodies]
        self._heads = [target.head(body) for body in self._bodies]
        self._most = most
        self._timeout_s = timeout_s
        self._ended = ended
        self._tls: ssl.SSLContext | None = target.tls()
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting: deque[Exchange] = deque()
        self.in_flight = 0
        self.most_open = 0
        self.had_to_wait = 0

    def submit(self, exchange: Exchange) -> None:
        """Sends a request as soon as there is a connection for it."""
        self.in_flight += 1
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                self._ask(connection, exchange)
                return
            self._open.discard(connection)
        if len(self._open) + len(self._opening) < self._most:
            self._start_opening(exchange)
        else:
            self.had_to_wait += 1
            self._waiting.append(exchange)

    def give_up_late_ones(self) -> None:
        """Ends what has been waited for too long. To be called now and then."""
        oldest_s = time.monotonic() - self._timeout_s
        for connection in [one for one in self._open if one.asked_s < oldest_s]:
            connection.give_up()

    def close(self) -> None:
        """Ends all connections; what is in flight has failed."""
        for task in self._opening:
            task.cancel()
        self._waiting.clear()
        for connection in list(self._open):
            connection.close()

    def _ask(self, connection: Connection, exchange: Exchange) -> None:
        connection.ask(exchange, self._heads[exchange.body], self._bodies[exchange.body].fresh(exchange.mark))

    def _start_opening(self, exchange: Exchange) -> None:
        task = asyncio.create_task(self._connect_and_ask(exchange))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect_and_ask(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._finished), self._target.host, self._target.port, ssl=self._tls
                )
        except (OSError, TimeoutError):
            exchange.sent_s = exchange.done_s = time.monotonic()
            self._end(exchange)
            return
        self._open.add(connection)
        self.most_open = max(self.most_open, len(self._open))
        self._ask(connection, exchange)

    def _finished(self, connection: Connection, exchange: Exchange) -> None:
        if connection.is_closed:
            self._open.discard(connection)
        if exchange.status == BROKEN and connection.answers and exchange.attempts == 1 and not exchange.received_bytes:
            self._start_opening(exchange)
            return
        if not connection.is_closed:
            self._idle.append(connection)
        self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        self.in_flight -= 1
        if self._waiting:
            self.in_flight -= 1
            self.submit(self._waiting.popleft())
        self._ended(exchange)

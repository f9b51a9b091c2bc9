"""Connections to real servers on loopback: who gets one, who waits, and what becomes of requests that go wrong."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from loadtest.connection import BROKEN, TIMED_OUT, Exchange
from loadtest.connections import Connections
from loadtest.protocols import Body
from loadtest.target import parse_target
from loadtest.workload import UNKNOWN, Made
from tests.served import free_port

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
REFUSAL = b"HTTP/1.1 422 No\r\nContent-Length: 7\r\nConnection: close\r\n\r\nbecause"
Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every request."""
    while await request(reader):
        writer.write(ANSWER)
    writer.close()


async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers one request, and closes the connection in the middle of the next."""
    await request(reader)
    writer.write(ANSWER)
    await request(reader)
    writer.close()


async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads, and says nothing."""
    while await request(reader):
        pass
    writer.close()


async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Refuses, and closes the connection as it says."""
    await request(reader)
    writer.write(REFUSAL)
    writer.close()


async def request(reader: asyncio.StreamReader) -> bool:
    """Reads one of our requests; false when there is none any more."""
    try:
        await reader.readuntil(b"\r\n\r\nbody")
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    return True


class Clients:
    """Connections to one server, and what has ended."""

    def __init__(self, port: int, most: int = 8, timeout_s: float = 20.0) -> None:
        self.ended: list[Exchange] = []
        made = Made(Body(b"body", "text/plain"), UNKNOWN)
        target = parse_target(f"http://127.0.0.1:{port}/x")
        self.connections = Connections(target, [made], most, timeout_s, self.ended.append)

    def ask(self) -> None:
        """One request."""
        now = time.monotonic()
        self.connections.submit(Exchange(now, now, body=0, mark=0))

    async def until(self, count: int) -> list[Exchange]:
        """Those that have ended, once there are so many."""
        async with asyncio.timeout(20):
            while len(self.ended) < count:
                await asyncio.sleep(0.005)
                self.connections.give_up_late_ones()
        assert self.connections.in_flight == 0
        return self.ended


def run(handle: Handle, test: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Runs a test beside a server, whose port it is given."""

    async def both() -> None:
        handlers: list[asyncio.Task[Any] | None] = []

        async def tracked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handlers.append(asyncio.current_task())
            await handle(reader, writer)
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(tracked, "127.0.0.1", 0)
        await test(server.sockets[0].getsockname()[1])
        server.close()
        await asyncio.gather(*(task for task in handlers if task is not None))

    asyncio.run(both())


def test_connection_is_used_again() -> None:
    """The second request needs no new one."""

    async def test(port: int) -> None:
        clients = Clients(port)
        for count in (1, 2):
            clients.ask()
            await clients.until(count)
        assert [(one.status, one.received_bytes, one.attempts) for one in clients.ended] == [(200, 2, 1)] * 2
        assert clients.connections.most_open == 1
        clients.connections.close()

    run(answering, test)


def test_beyond_the_most_requests_wait() -> None:
    """They are sent when a connection is free, and counted."""

    async def test(port: int) -> None:
        clients = Clients(port, most=2)
        for _ in range(5):
            clients.ask()
        assert {one.status for one in await clients.until(5)} == {200}
        assert (clients.connections.most_open, clients.connections.had_to_wait) == (2, 3)
        clients.connections.close()

    run(answering, test)


def test_connection_that_was_closed_meanwhile() -> None:
    """The request goes out once more, on a new one, and no further."""

    async def test(port: int) -> None:
        clients = Clients(port)
        for count in (1, 2):
            clients.ask()
            await clients.until(count)
        assert [(one.status, one.attempts) for one in clients.ended] == [(200, 1), (200, 2)]
        clients.connections.close()

    run(once, test)


@pytest.mark.parametrize(
    ("handle", "status", "said"),
    [(never, TIMED_OUT, b""), (refusing, 422, b"because")],
    ids=["never_answered", "refused"],
)
def test_what_goes_wrong_ends_once(handle: Handle, status: int, said: bytes) -> None:
    """With its status, and what was said; the next request gets another connection."""

    async def test(port: int) -> None:
        clients = Clients(port, timeout_s=0.2)
        for count in (1, 2):
            clients.ask()
            await clients.until(count)
        assert [(one.status, one.said) for one in clients.ended] == [(status, said)] * 2
        clients.connections.close()

    run(handle, test)


def test_nobody_listens() -> None:
    """Each request is broken, at once."""

    async def test(_: int) -> None:
        clients = Clients(free_port())
        for _ in range(3):
            clients.ask()
        assert [one.status for one in await clients.until(3)] == [BROKEN] * 3

    run(answering, test)

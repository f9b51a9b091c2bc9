"""A server whose times are known: `python -m tests.loadtest.known_server --service-ms 5 --stall-at 3 --stall-s 1`.

It answers any POST after the service time, as many at once as come; in the stall it answers nobody, and afterwards all
that have come meanwhile. Prints its port, and at the end when requests came.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import httptools
import uvloop


class Times:
    """When answers are due."""

    def __init__(self, service_s: float, stall_at_s: float, stall_s: float) -> None:
        self.came: list[float] = []
        self._service_s = service_s
        self._stall_at_s = stall_at_s
        self._stall_s = stall_s

    def due(self) -> float:
        """For a request that comes now."""
        now = time.monotonic()
        self.came.append(now)
        begins = self.came[0] + self._stall_at_s
        start = begins + self._stall_s if begins <= now < begins + self._stall_s else now
        return start + self._service_s


class Answering(asyncio.Protocol):
    """One connection."""

    def __init__(self, times: Times, answer: bytes, described: bytes | None) -> None:
        self._times = times
        self._answer = answer
        self._described = described
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._transport is not None
        if self._parser.get_method() == b"GET":
            self._transport.write(self._described or b"HTTP/1.1 404 None\r\nContent-Length: 0\r\n\r\n")
            return
        wait_s = self._times.due() - time.monotonic()
        if wait_s < 1e-4:
            self._reply()
        else:
            asyncio.get_running_loop().call_later(wait_s, self._reply)

    def _reply(self) -> None:
        assert self._transport is not None
        self._transport.write(self._answer)


async def serve(make: Callable[[], Answering]) -> None:
    """Until it is told to end."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


def reply(status: int, body: bytes) -> bytes:
    """A whole answer."""
    return f"HTTP/1.1 {status} Told\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def description(size: int) -> bytes:
    """Of a model, as the service gives it, to both questions at once."""
    layer = dict.fromkeys(("query_size", "key_size", "value_size"), size)
    model = {"name": "echo", "version": 1, "layer": layer, "precision": "fp32", "parity": {"limit": 1e-5}}
    return json.dumps({"models": [model], "name": "echo", "versions": [model]}).encode()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("came", type=Path)
    parser.add_argument("--service-ms", type=float, default=0.0)
    parser.add_argument("--stall-at", type=float, default=1e9)
    parser.add_argument("--stall-s", type=float, default=0.0)
    parser.add_argument("--status", type=int, default=200)
    parser.add_argument("--answer-bytes", type=int, default=2)
    parser.add_argument("--describe", type=int, help="As a model of this size, to who asks for /v1/models.")
    given = parser.parse_args()
    times = Times(given.service_ms / 1000, given.stall_at, given.stall_s)
    body = b"x" * given.answer_bytes
    answer = reply(given.status, body)
    described = None if given.describe is None else reply(200, description(given.describe))
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(lambda: Answering(times, answer, described)))
    given.came.write_text(json.dumps(times.came))


if __name__ == "__main__":
    main()

"""Clients that account for every request: answered and right, refused with a code, or broken."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final
from urllib.parse import urlsplit

import numpy as np
from safetensors.numpy import load, save

_RELATIVE: Final = 1e-5
_LIMIT_S: Final = 60.0
# The part of the time in which a queue fills.
_SETTLING: Final = 0.2


@final
@dataclass(frozen=True)
class Question:
    """A request, and what may be answered: the output of each model version that may be served.

    Written once, since who sends ten times what can be done must not need the server's cores for it.
    """

    body: bytes
    right: tuple[np.ndarray, ...]
    kept_alive: bytes
    closed: bytes

    @classmethod
    def of(cls, queries: np.ndarray, *right: np.ndarray) -> "Question":
        """Self-attention of these queries."""
        body = save({"queries": queries})
        kept_alive, closed = (_head(len(body), keep_alive=kept) + body for kept in (True, False))
        return cls(body, right, kept_alive, closed)

    def is_right(self, content: bytes) -> bool:
        """Whether an answer is that of one version, whole."""
        got = load(content)["output"]
        return any(
            got.shape == want.shape and float(np.abs(got - want).max()) <= _RELATIVE * float(np.abs(want).max())
            for want in self.right
        )


@final
@dataclass
class Account:
    """What became of the requests that were sent."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)
    queued_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """With 200, and right."""
        return self.outcomes["answered"]

    def is_complete(self) -> bool:
        """Whether each has exactly one outcome."""
        return self.sent == sum(self.outcomes.values())

    def only(self, *outcomes: str) -> bool:
        """Whether nothing else has happened than these, and answers."""
        return set(self.outcomes) <= {"answered", *outcomes}

    def p99_s(self) -> float:
        """Of the answers, from when each was sent."""
        return float(np.quantile(self.answered_s, 0.99)) if self.answered_s else 0.0

    def queued_p99_s(self) -> float:
        """Of the time that they waited for a worker, as the server says it."""
        return float(np.quantile(self.queued_s, 0.99)) if self.queued_s else 0.0

    def __str__(self) -> str:
        parts = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        return f"{self.sent} sent: {parts}"


@final
class Clients:
    """Asks one server, over connections that are kept or not."""

    def __init__(self, url: str, questions: Sequence[Question], *, keep_alive: bool = True) -> None:
        address = urlsplit(url)
        self._address = (address.hostname or "", address.port or 0)
        self._questions = questions
        self._keep_alive = keep_alive
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.account = Account()

    async def closed_loop(self, connections: int, seconds: float) -> float:
        """Answers a second with so many connections, each asking again when it has its answer.

        Counted as in an open loop: once the queue has filled, while requests come. (Answers that come after the end
        would count without their time.)
        """
        began = time.perf_counter()
        until = began + seconds

        async def client(number: int) -> None:
            while time.perf_counter() < until:
                await self.ask(number)
                number += 1

        clients = asyncio.gather(*(client(number) for number in range(connections)))
        await asyncio.sleep(_SETTLING * seconds)
        since, before = time.perf_counter(), self.account.answered
        await asyncio.sleep(until - since)
        goodput = (self.account.answered - before) / (time.perf_counter() - since)
        await clients
        return goodput

    async def open_loop(self, rate: float, seconds: float) -> float:
        """Answers a second where so many requests come each second, whatever becomes of those before.

        Counted once the queue has filled, while requests come.
        """
        before, began = self.account.answered, time.perf_counter()
        settled: tuple[float, int] | None = None
        tasks: set[asyncio.Task[None]] = set()
        for number in range(int(rate * seconds)):
            pause_s = began + number / rate - time.perf_counter()
            if pause_s > 0 or number % 16 == 0:
                await asyncio.sleep(max(0.0, pause_s))
            if settled is None and number > rate * seconds * _SETTLING:
                settled = (time.perf_counter(), self.account.answered)
            task = asyncio.create_task(self.ask(number))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        since, before = settled or (began, before)
        goodput = (self.account.answered - before) / (time.perf_counter() - since)
        await asyncio.gather(*tasks)
        return goodput

    def close(self) -> None:
        """Ends the connections that are kept."""
        while self._idle:
            self._idle.pop()[1].close()

    async def ask(self, number: int) -> None:
        """One request, and its outcome."""
        question = self._questions[number % len(self._questions)]
        self.account.sent += 1
        started = time.perf_counter()
        try:
            async with asyncio.timeout(_LIMIT_S):
                outcome = await self._outcome(question)
        except TimeoutError:
            outcome = "never answered"
        if outcome == "answered":
            self.account.answered_s.append(time.perf_counter() - started)
        self.account.outcomes[outcome] += 1

    async def _outcome(self, question: Question) -> str:
        try:
            reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        except OSError:
            return "not accepted"
        try:
            writer.write(question.kept_alive if self._keep_alive else question.closed)
            status, headers, content = await _response(reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            writer.close()
            return "broken"
        if self._keep_alive and headers.get("connection", "") != "close":
            self._idle.append((reader, writer))
        else:
            writer.close()
        if status == 200:
            self.account.queued_s.append(_stage_s(headers["server-timing"], "queue"))
            self.account.computed_s.append(_stage_s(headers["server-timing"], "compute"))
            return "answered" if question.is_right(content) else "WRONG"
        polite = status != 429 or "retry-after" in headers
        return _code(status, content) + ("" if polite else " without Retry-After")


async def garbage(url: str, what: bytes, *, then_close: bool, wait_s: float) -> None:
    """A client that sends something else than a request, and stays or leaves."""
    address = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(what)
        await writer.drain()
        if not then_close:
            await asyncio.wait_for(reader.read(), wait_s)
        writer.close()
    except (OSError, TimeoutError):
        return


def head_of(length: int) -> bytes:
    """The head of a request with a body of that length."""
    return _head(length, keep_alive=True)


def _head(length: int, *, keep_alive: bool) -> bytes:
    connection = "keep-alive" if keep_alive else "close"
    return (
        "POST /v1/attention HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/vnd.safetensors\r\n"
        f"Connection: {connection}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _stage_s(timing: str, stage: str) -> float:
    """From a Server-Timing header."""
    (part,) = (part for part in timing.split(", ") if part.startswith(f"{stage};"))
    return float(part.partition("dur=")[2]) / 1e3


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    return int(first.split()[1]), headers, await _content(reader, headers)


async def _content(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    """In pieces, as what stands in front of the server may send it, or whole, as the server does."""
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers["content-length"]))
    pieces = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(pieces)


def _code(status: int, content: bytes) -> str:
    """Why there was no answer: the server's own word, or the status where something in front of it says so."""
    try:
        return str(json.loads(content)["code"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"

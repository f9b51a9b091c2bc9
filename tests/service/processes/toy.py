"""A family of toy processes, for what a server cannot be made to do: `python -m tests.service.processes.toy CASE`.

Three children, of which the last misbehaves as the case says. The first asks for a change and prints what comes of it;
every child prints what it is told.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from service.errors import InvalidArtifact, ServiceError
from service.log import configure_logging
from service.processes import parent
from service.processes.board import Seat
from service.processes.messages import COMMIT, DISCARD, DRAIN, END, PREPARE
from service.processes.parent import Parent
from service.processes.sibling import Sibling

NUM = 3


class Toy:
    """A child that says what it is told, and misbehaves if it is the last."""

    def __init__(self, seat: Seat, case: str) -> None:
        self.seat = seat
        self.of_all = case
        self.case = case if seat.index == NUM - 1 else "behaves"
        self.over = asyncio.Event()
        self.sibling = Sibling(
            seat,
            {
                PREPARE: self.prepare, COMMIT: self.saying("commit"), DISCARD: self.saying("discard"),
                DRAIN: self.stop, END: self.stop, "metrics": self.metrics,
            },
        )  # fmt: skip

    def say(self, what: str) -> None:
        """A whole line at once."""
        os.write(1, f"{self.seat.index} {what}\n".encode())

    def saying(self, what: str) -> Callable[[Any], Awaitable[None]]:
        """A handler that says so."""

        async def handler(_: Any) -> None:
            self.say(what)

        return handler

    async def prepare(self, _: Any) -> None:
        self.say("prepare")
        if self.case == "refuses":
            raise InvalidArtifact("no good")
        if self.case == "breaks":
            raise ZeroDivisionError
        if self.case == "dies":
            os._exit(1)
        if self.case == "sleeps":
            await asyncio.sleep(3600)

    async def metrics(self, _: Any) -> int:
        if self.case == "sleeps":
            await asyncio.sleep(3600)
        return self.seat.index

    async def stop(self, _: Any) -> None:
        self.over.set()

    async def live(self) -> None:
        """A child's life; the first one asks for two changes when all are ready."""
        await self.sibling.open()
        beating = asyncio.create_task(self.beat())
        if self.seat.replaces and self.of_all == "hangs":
            self.say("replaced")
            os.kill(os.getppid(), signal.SIGTERM)
        if not self.seat.replaces:
            self.sibling.note_ready({})
        if self.case == "hangs" and not self.seat.replaces:
            time.sleep(3600)  # noqa: ASYNC251  # that is the case
        if self.seat.index == 0 and self.of_all != "hangs":
            while not self.sibling.started:  # noqa: ASYNC110  # the page of numbers tells nobody
                await asyncio.sleep(0.01)
            self.say(f"metrics {sorted(await self.sibling.ask('metrics'))}")
            for outcome in await asyncio.gather(*(changed(self.sibling, name) for name in "ab")):
                self.say(outcome)
            os.kill(os.getppid(), signal.SIGTERM)
        await self.over.wait()
        beating.cancel()

    async def beat(self) -> None:
        """Comes round now and then."""
        while True:
            self.seat.board.beat(self.seat.index)
            await asyncio.sleep(0.05)


async def changed(sibling: Sibling, name: str) -> str:
    """What comes of a change."""
    try:
        await sibling.change({"do": "load", "name": name})
    except ServiceError as error:
        return f"{error.code}: {error}"
    return "changed"


def main(case: str) -> None:
    """Runs the family."""
    configure_logging("info", "json")
    parent._CHANGE_S = 0.5  # type: ignore[misc]
    parent._REPLY_S = 0.5  # type: ignore[misc]
    parent._HUNG_S = 1.0  # type: ignore[misc]

    def serve(seat: Seat) -> bool:
        asyncio.run(Toy(seat, case).live())
        return True

    listener = socket.create_server(("127.0.0.1", 0))
    sys.exit(0 if Parent(listener, NUM, serve, 0.0, 1.0).run() else 1)


if __name__ == "__main__":
    main(sys.argv[1])

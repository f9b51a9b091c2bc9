"""What stands between a connection and uvicorn's protocol: one way in for a body of known length, one way out."""

import asyncio
from typing import Protocol, final

import numpy as np
from starlette.requests import ClientDisconnect

from service.codec import Body
from service.errors import TooSlow

# How often the pace of a body is looked at.
_WINDOW_S = 5.0


class Owner(Protocol):
    """Whose place a `Filler` takes."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""

    def pause_writing(self) -> None:
        """The client reads slowly."""

    def resume_writing(self) -> None:
        """It has caught up."""

    def take_back(self) -> None:
        """The body is there."""


@final
class HeadWithBody:
    """A transport that writes the head of an answer together with what follows it.

    Two writes would be two packets, each of which wakes the client up: that costs more than decoding a small request.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self.is_closing = transport.is_closing
        self._transport = transport
        self._head: bytes | None = None

    def flush(self) -> None:
        """Writes a head that nothing has followed."""
        if self._head is not None:
            self._transport.write(self._head)
            self._head = None

    def close(self) -> None:
        """Closes the transport once everything is written."""
        self.flush()
        self._transport.close()

    def write(self, data: bytes) -> None:
        """Writes it, or keeps it until the next if it is a head that a body will follow."""
        if self._head is not None:
            self._transport.writelines((self._head, data))
            self._head = None
        elif data[:9] == b"HTTP/1.1 " and data[9:12] != b"100":
            self._head = data
        else:
            self._transport.write(data)


@final
class Filler(asyncio.BufferedProtocol):
    """Stands in for a protocol until a body is full. The transport never reads further than its end."""

    def __init__(self, owner: Owner, num_bytes: int, arrived: bytearray, least_rate: int) -> None:
        loop = asyncio.get_running_loop()
        self.full: asyncio.Future[Body] = loop.create_future()
        self._owner = owner
        self._pace = Pace(least_rate)
        # Not zeroed: pages come as they are written, so memory follows what arrives, not what was announced.
        self._body = np.empty(num_bytes, np.uint8).data
        self._body[: len(arrived)] = arrived
        self._filled = len(arrived)
        self._timer = loop.call_later(_WINDOW_S, self._check_pace)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go."""
        return self._body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        self._filled += nbytes
        if self._filled == len(self._body):
            self._timer.cancel()
            self._owner.take_back()
            if not self.full.done():
                self.full.set_result(self._body)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self._timer.cancel()
        self._owner.connection_lost(exc)
        if not self.full.done():
            self.full.set_exception(ClientDisconnect())

    def pause_writing(self) -> None:
        """The client reads slowly."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._owner.resume_writing()

    def _check_pace(self) -> None:
        try:
            self._pace.check(self._filled)
        except TooSlow as error:
            self.full.set_exception(error)
        else:
            self._timer = asyncio.get_running_loop().call_later(_WINDOW_S, self._check_pace)


@final
class Pace:
    """Whether a body comes fast enough, looked at every few seconds.

    Args:
        least_rate: bytes a second; 0 for no limit.
    """

    window_s = _WINDOW_S

    def __init__(self, least_rate: int) -> None:
        self._least_rate = least_rate
        self._before = 0

    def check(self, arrived: int) -> None:
        """One window is over, and so many bytes have come in all.

        Raises:
            TooSlow: too few of them in this window.
        """
        rate = (arrived - self._before) / _WINDOW_S
        self._before = arrived
        if rate < self._least_rate:
            raise TooSlow(
                f"body: it comes at {rate:.0f} bytes a second, the least is {self._least_rate} (min_body_rate)"
            )

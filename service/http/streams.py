"""What stands between a connection and uvicorn's protocol: one way in for a body of known length, one way out."""

import asyncio
from collections.abc import Callable
from typing import Protocol, final

from starlette.requests import ClientDisconnect

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
    """Stands in for a protocol until a body has come. The transport never reads further than its end.

    Args:
        owner: whose place it takes.
        num_bytes: that have still to come.
        into: where they go; if there is less room, each piece over the one before, for a body that nobody wants.
        least_rate: bytes a second; 0 for no limit.
        on_end: called once: with None when it has come and the owner is back in its place, or with what went wrong.
    """

    def __init__(
        self,
        owner: Owner,
        num_bytes: int,
        into: memoryview,
        least_rate: int,
        on_end: Callable[[ClientDisconnect | TooSlow | None], None],
    ) -> None:
        self._owner = owner
        self._into = into
        self._keeps = len(into) == num_bytes
        self._missing = num_bytes
        self._arrived = 0
        self._has_ended = False
        self._pace = Pace(least_rate)
        self._on_end = on_end
        self._timer = asyncio.get_running_loop().call_later(_WINDOW_S, self._check_pace)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where the next bytes go."""
        return self._into[self._arrived :] if self._keeps else self._into[: self._missing]

    def buffer_updated(self, nbytes: int) -> None:
        """So many have come."""
        self._arrived += nbytes
        self._missing -= nbytes
        if not self._missing:
            self._owner.take_back()
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left."""
        self._owner.connection_lost(exc)
        self._end(ClientDisconnect())

    def pause_writing(self) -> None:
        """The client reads slowly."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._owner.resume_writing()

    def _end(self, error: ClientDisconnect | TooSlow | None) -> None:
        self._timer.cancel()
        if not self._has_ended:
            self._has_ended = True
            self._on_end(error)

    def _check_pace(self) -> None:
        try:
            self._pace.check(self._arrived)
        except TooSlow as error:
            self._end(error)
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

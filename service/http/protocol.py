"""uvicorn's HTTP protocol, with bodies read in place, answers in one write, and our error body for what is no HTTP.

uvicorn hands a body over in pieces of 64 KiB, each copied four times on its way. Tensors are large, so a body of known
length is read by the kernel into the one buffer that it is then decoded in.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import final

import httptools
import numpy as np
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.codec import Body, Chunk
from service.errors import MalformedBody
from service.http.boundary import new_request_id
from service.http.errors import error_response
from service.http.extensions import READ_WHOLE, RESPOND


@final
class Protocol(HttpToolsProtocol):
    """Offers `READ_WHOLE` to the application, and answers what is no HTTP with 400 `malformed_body`.

    `on_closed` is called when the connection has ended, if it is set.
    """

    on_closed: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._writer = _HeadWithBody(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        if self.on_closed is not None:
            self.on_closed()

    def on_response_complete(self) -> None:
        """An answer is complete, perhaps without a body."""
        self._writer.flush()
        super().on_response_complete()

    def on_headers_complete(self) -> None:
        """The parser has a request's head."""
        super().on_headers_complete()
        # The application starts in the event loop's next round, so it finds this.
        self.cycle.transport = self._writer  # type: ignore[assignment]
        self.cycle.scope["extensions"] = {
            READ_WHOLE: {"read": partial(self.read_whole, self.cycle)},
            RESPOND: {"respond": partial(self.respond, self.cycle)},
        }

    async def read_whole(self, cycle: RequestResponseCycle, num_bytes: int) -> Body:
        """The body of a request that has announced so many bytes.

        Raises:
            ClientDisconnect: the client left before the end.
        """
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        if cycle.disconnected:
            raise ClientDisconnect
        arrived, cycle.body = cycle.body, bytearray()
        cycle.message_event.clear()
        if not cycle.more_body:
            return arrived
        filler = _Filler(self, num_bytes, arrived, self.loop.create_future())
        self._switch_to(filler)
        body = await filler.full
        cycle.more_body = False
        cycle.message_event.clear()
        return body

    async def respond(
        self, cycle: RequestResponseCycle, status: int, headers: Iterable[tuple[bytes, bytes]], chunks: Sequence[Chunk]
    ) -> None:
        """A whole answer in one write: what two ASGI messages would do, without judging every header twice.

        Args:
            cycle: of the request.
            status: of the answer.
            headers: valid, lower-case, `content-length` among them.
            chunks: the body.
        """
        if self.flow.write_paused and not cycle.disconnected:
            await self.flow.drain()
        if cycle.disconnected:
            return
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        head = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            head += (name, b": ", value, b"\r\n")
        head.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        self.transport.writelines((b"".join(head), *chunks))
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def send_400_response(self, msg: str) -> None:
        """Sends the answer; `msg` is uvicorn's own, which says no more than that the request is invalid."""
        request_id = new_request_id()
        response = error_response(MalformedBody(f"request: {msg.rstrip('.')}; want HTTP/1.1"), request_id)
        headers = [*response.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
        head = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(response.body))
        self.transport.close()

    def take_back(self) -> None:
        """The body is there: what comes now is another request."""
        # The parser still waits for a body that it was not shown.
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._switch_to(self)

    def _switch_to(self, protocol: asyncio.BaseProtocol) -> None:
        # A transport that is reading keeps its way of reading, so it has to stop and start.
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


@final
class _HeadWithBody:
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
class _Filler(asyncio.BufferedProtocol):
    """Stands in for a protocol until a body is full. The transport never reads further than its end."""

    def __init__(self, owner: Protocol, num_bytes: int, arrived: bytearray, full: "asyncio.Future[memoryview]") -> None:
        self.full = full
        self._owner = owner
        # Not zeroed: pages come as they are written, so memory follows what arrives, not what was announced.
        self._body = np.empty(num_bytes, np.uint8).data
        self._body[: len(arrived)] = arrived
        self._filled = len(arrived)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._body[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == len(self._body):
            self._owner.take_back()
            if not self.full.done():
                self.full.set_result(self._body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)
        if not self.full.done():
            self.full.set_exception(ClientDisconnect())

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

"""uvicorn's HTTP protocol, with bodies read in place, answers in one write, and our error body for what is no HTTP.

uvicorn hands a body over in pieces of 64 KiB, each copied four times on its way. Tensors are large, so a body of known
length is read by the kernel into the one buffer that it is then decoded in.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

import httptools
import numpy as np
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from service.codec import Body, Chunk
from service.errors import MalformedBody, Overloaded, ServiceError, TooSlow
from service.http.boundary import new_request_id
from service.http.errors import error_answer
from service.http.extensions import ON_LEAVE, READ_WHOLE, RESPOND, Header
from service.http.streams import Filler, HeadWithBody

# Beyond the limit so many connections are taken for what a load balancer and a monitor ask, and for nothing else.
_SPARE_CONNECTIONS: Final = 32
_ALWAYS_ANSWERED: Final = (b"/health/", b"/v2/health/", b"/metrics")
# For how long a connection that was refused is read on, to no purpose but that.
_LINGER_S: Final = 2.0
# For a request on its way, where the server ends: its client had the connection before.
_LAST_CHANCE_S: Final = 1.0
# Of a body that nobody wants.
_PIECE_BYTES: Final = 64 * 1024


@final
@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a client may do with a connection.

    Attributes:
        max_connections: that are open at once.
        max_head_bytes: of a request's line and headers.
        head_timeout_s: seconds for them to come.
        min_body_rate: bytes a second at which a body has to come; 0 for no limit.
    """

    max_connections: int
    max_head_bytes: int
    head_timeout_s: float
    min_body_rate: int


@final
class Protocol(HttpToolsProtocol):
    """Offers the extensions to the application, holds clients to the limits, and answers what is no HTTP with 400.

    `on_closed` is called when the connection has ended, if it is set.
    """

    on_closed: Callable[[], None] | None = None
    _on_leave: Callable[[], None] | None = None
    _refusal: ServiceError | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _body_bytes = 0
    _awaits_head = True
    _lingers = False
    _is_spare = False
    _is_last = False

    def __init__(self, *args: Any, limits: ConnectionLimits, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._writer = HeadWithBody(transport)
        beyond = len(self.connections) - self._limits.max_connections
        if beyond > _SPARE_CONNECTIONS:
            self._refuse(self._too_many())
            return
        self._is_spare = beyond > 0
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._give_up_on_head)

    def data_received(self, data: bytes) -> None:
        """Some bytes of requests have come."""
        if self._lingers or self.transport.is_closing():
            return
        super().data_received(data)
        if not self._awaits_head or self._lingers or self.transport.is_closing():
            return
        # The head goes on beyond this piece; that of a connection's later requests has no timer yet.
        self._head_bytes += len(data)
        if self._head_bytes > self._limits.max_head_bytes:
            self._refuse(self._too_long())
        elif self._head_timer is None and self._head_bytes:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._give_up_on_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        self._stop_head_timer()
        if self._on_leave is not None:
            self._on_leave()
        if self.on_closed is not None:
            self.on_closed()

    def shutdown(self) -> None:
        """The server ends. Who has connected before, or begun a request, still gets that one answered.

        To close a connection that was accepted and has not yet been heard of would lose what its client has just sent.
        """
        is_young = self.cycle is None or (self._awaits_head and self._head_bytes > 0)
        if is_young and not self._lingers and not self.transport.is_closing():
            self._is_last = True
            self.loop.call_later(_LAST_CHANCE_S, self._end_unless_asked, self.cycle)
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        """An answer is complete, perhaps without a body."""
        self._writer.flush()
        super().on_response_complete()

    def on_message_begin(self) -> None:
        """The parser has the first byte of a request."""
        super().on_message_begin()
        self._awaits_head, self._head_bytes, self._body_bytes = True, 0, 0

    def on_body(self, body: bytes) -> None:
        """The parser has some of a request's body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """The parser has a request's head."""
        self._awaits_head = False
        self._stop_head_timer()
        head_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head_bytes > self._limits.max_head_bytes:
            self._refusal = self._too_long()
            raise self._refusal  # through the parser, which then takes the request for none
        if self._is_spare and not self.url.startswith(_ALWAYS_ANSWERED):
            self._refusal = self._too_many()
            raise self._refusal
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and not self._is_last
        # The application starts in the event loop's next round, so it finds this.
        self.cycle.transport = self._writer  # type: ignore[assignment]
        self.cycle.scope["extensions"] = {
            READ_WHOLE: {"read": partial(self.read_whole, self.cycle)},
            ON_LEAVE: {"watch": partial(self.watch, self.cycle)},
            RESPOND: {"respond": partial(self.respond, self.cycle)},
        }

    async def read_whole(self, cycle: RequestResponseCycle, num_bytes: int) -> Body:
        """The body of a request that has announced so many bytes.

        Raises:
            ClientDisconnect: the client left before the end.
            TooSlow: the body comes too slowly.
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
        whole: asyncio.Future[Body] = self.loop.create_future()
        # Not zeroed: pages come as they are written, so memory follows what arrives, not what was announced.
        body = np.empty(num_bytes, np.uint8).data
        body[: len(arrived)] = arrived

        def end(error: ClientDisconnect | TooSlow | None) -> None:
            if whole.done():
                return
            if error is None:
                whole.set_result(body)
            else:
                whole.set_exception(error)

        self._fill(body[len(arrived) :], num_bytes - len(arrived), end)
        await whole
        cycle.more_body = False
        cycle.message_event.clear()
        return body

    def watch(self, cycle: RequestResponseCycle, on_leave: Callable[[], None] | None) -> None:
        """What to do when the client of a request leaves; None for nothing more. Requests of a connection take turns.

        Raises:
            ClientDisconnect: it has left already.
        """
        if on_leave is not None and cycle.disconnected:
            raise ClientDisconnect
        self._on_leave = on_leave

    async def respond(
        self,
        cycle: RequestResponseCycle,
        status: int,
        headers: Iterable[Header],
        chunks: Sequence[Chunk],
        *,
        closes: bool = False,
    ) -> None:
        """A whole answer in one write: what two ASGI messages would do, without judging every header twice.

        Args:
            cycle: of the request.
            status: of the answer.
            headers: valid, lower-case, `content-length` among them.
            chunks: the body.
            closes: the connection ends with it.
        """
        # Whether a body comes that nobody has asked to go on is the client's choice, so what follows could be anything.
        closes = closes or cycle.waiting_for_100_continue
        cycle.keep_alive = cycle.keep_alive and not closes
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
        missing = self._missing_bytes(cycle)
        if missing and cycle.keep_alive:
            # To be read, and cheaply, since it is under load that bodies are refused before they have come.
            piece = np.empty(min(missing, _PIECE_BYTES), np.uint8).data
            self._fill(piece, missing, partial(self._after_unwanted_body, cycle))
            return
        if missing:
            self._linger()
        elif not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def send_400_response(self, msg: str) -> None:
        """Sends the answer; `msg` is uvicorn's own, which says no more than that the request is invalid."""
        self._refuse(self._refusal or MalformedBody(f"request: {msg.rstrip('.')}; want HTTP/1.1"))

    def _refuse(self, error: ServiceError) -> None:
        """Answers outside of any request, and ends the connection: at once, or when the client has seen the answer."""
        self._stop_head_timer()
        answer = error_answer(error, new_request_id())
        head = b"".join(b"%b: %b\r\n" % header for header in (*answer.headers, (b"connection", b"close")))
        self.transport.write(STATUS_LINE[answer.status] + head + b"\r\n" + answer.body)
        self._linger()

    def _linger(self) -> None:
        """Ends the connection when the client has seen the answer: to close with bytes unread could lose it."""
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self._lingers = True
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _give_up_on_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._head_bytes:
            self._refuse(TooSlow(f"request: no head within {self._limits.head_timeout_s:g} s (head_timeout_s)"))
        else:
            self.transport.close()  # nothing was asked, so there is nothing to answer

    def _end_unless_asked(self, before: RequestResponseCycle | None) -> None:
        if self.cycle is before and not self._lingers:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_long(self) -> MalformedBody:
        most = self._limits.max_head_bytes
        return MalformedBody(f"request: its line and headers are longer than {most} bytes (max_head_bytes)")

    def _too_many(self) -> Overloaded:
        most = self._limits.max_connections
        return Overloaded(f"{most} connections are open, the limit (max_connections); retry later", 1)

    def _fill(
        self, into: memoryview, num_bytes: int, on_end: Callable[[ClientDisconnect | TooSlow | None], None]
    ) -> None:
        self._switch_to(Filler(self, num_bytes, into, self._limits.min_body_rate, on_end))

    def _missing_bytes(self, cycle: RequestResponseCycle) -> int:
        """How many bytes of a request's body have still to come; 0 where that is not known."""
        if not cycle.more_body or cycle is not self.cycle:
            return 0
        named = dict(cycle.scope["headers"])
        return 0 if b"transfer-encoding" in named else int(named.get(b"content-length", b"0")) - self._body_bytes

    def _after_unwanted_body(self, cycle: RequestResponseCycle, error: ClientDisconnect | TooSlow | None) -> None:
        if error is None:
            cycle.on_response()
        elif isinstance(error, TooSlow):
            self.transport.abort()

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

"""uvicorn with our way to start and to end: a socket bound with a clear error, and a drain on SIGTERM."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Final, final

import structlog
import uvicorn
from starlette.types import ASGIApp

from service.errors import StartupError
from service.http.protocol import ConnectionLimits, Protocol
from service.http.siblings import handlers
from service.http.state import ServerState
from service.processes.board import Seat
from service.processes.sibling import NoSiblings, Sibling
from service.settings import Settings

_log = structlog.get_logger(__name__)
_BACKLOG: Final = 2048
_TAKEN_AT_ONCE: Final = 64


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        StartupError: the address is no address, or is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)  # from here on a client waits instead of being refused
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from error
    return sock


def serve(
    state: ServerState,
    source: socket.socket | Seat,
    make_app: Callable[[Callable[[], None]], ASGIApp],
) -> bool:
    """Serves until told to stop; returns whether it ended as it should.

    Args:
        state: its `draining` is set when the server is told to stop, its `siblings` here.
        source: a listening socket from `bind`, or a seat at which connections are dealt.
        make_app: makes the application, given what to call if models cannot be loaded.
    """
    seat = source if isinstance(source, Seat) else None
    server = _Server(state, seat)
    handling = handlers(state, server.drain, server.end)
    state.siblings = NoSiblings(handling) if seat is None else Sibling(seat, handling)
    server.config.app = make_app(server.give_up)
    server.run(sockets=[source] if isinstance(source, socket.socket) else [])
    return not server.failed


def log_listening(sock: socket.socket, scheme: str) -> None:
    """Says where the server is."""
    host, port = sock.getsockname()[:2]
    _log.info("listening", url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")


@final
class _Server(uvicorn.Server):
    """Ends in two steps: at the first signal it stops being ready, after the drain delay it stops accepting.

    A second signal ends it at once. At a seat, both come from the parent, as a message and as the end of what it deals.
    """

    def __init__(self, state: ServerState, seat: Seat | None) -> None:
        num_processes = 1 if seat is None else seat.board.num_seats
        super().__init__(_config(state, num_processes))
        self._make_protocol = _protocol(state.settings, num_processes)
        self.failed = False
        self._state = state
        self._seat = seat
        self._stop_at: float | None = None
        self._adopting: set[asyncio.Task[None]] = set()

    def give_up(self) -> None:
        self.failed = True
        self.should_exit = True

    def drain(self) -> None:
        self._state.draining = True

    def end(self) -> None:
        self._state.draining = True
        self.should_exit = self.force_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._seat is not None:
            return  # a terminal sends its signals to every process; the parent passes on what they mean
        if self._stop_at is not None:
            self.end()
            return
        self.drain()
        self._stop_at = time.monotonic() + self._state.settings.drain_delay_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._seat is None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._state.secrets.reload)
            return
        self._seat.deal.settimeout(0)
        asyncio.get_running_loop().add_reader(self._seat.deal, self._take_dealt, self._seat)

    async def on_tick(self, counter: int) -> bool:
        if self._seat is not None:
            self._seat.board.beat(self._seat.index)
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)

    def _take_dealt(self, seat: Seat) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            try:
                marks, descriptors, _, _ = socket.recv_fds(seat.deal, 1, 1)
            except BlockingIOError:
                return
            for descriptor in descriptors:
                task = asyncio.create_task(self._adopt(seat, socket.socket(fileno=descriptor)))
                self._adopting.add(task)
                task.add_done_callback(self._adopting.discard)
            if not marks:  # the parent accepts no more, or is no more
                asyncio.get_running_loop().remove_reader(seat.deal)
                self.drain()
                self.should_exit = True
                return

    async def _adopt(self, seat: Seat, connection: socket.socket) -> None:
        protocol = self._make_protocol(self.config, self.server_state, self.lifespan.state)
        protocol.on_closed = lambda: seat.board.count_closed(seat.index)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, connection, ssl=self.config.ssl)
        except OSError:  # the client has left already
            connection.close()
            protocol.on_closed()
        else:
            if self.should_exit:  # those that are there have been told
                protocol.shutdown()


def _protocol(settings: Settings, num_processes: int) -> Callable[..., Protocol]:
    limits = ConnectionLimits(
        max_connections=-(-settings.max_connections // num_processes),
        max_head_bytes=settings.max_head_bytes,
        head_timeout_s=settings.head_timeout_s,
        min_body_rate=settings.min_body_rate,
    )
    return partial(Protocol, limits=limits)


def _config(state: ServerState, num_processes: int) -> uvicorn.Config:
    tls = state.secrets.tls
    return uvicorn.Config(
        app="",
        loop="uvloop",
        http=_protocol(state.settings, num_processes),  # type: ignore[arg-type]  # a class, or what makes its objects
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
        timeout_keep_alive=state.settings.keep_alive_s,
        timeout_graceful_shutdown=max(1, round(state.settings.drain_timeout_s)),
    )

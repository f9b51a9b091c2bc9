"""uvicorn with our way to start and to end: a socket bound with a clear error, and a drain on SIGTERM."""

import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, final

import structlog
import uvicorn
from starlette.types import ASGIApp

from service.errors import StartupError
from service.http.protocol import Protocol
from service.http.state import ServerState

_log = structlog.get_logger(__name__)
_BACKLOG: Final = 2048


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


def serve(state: ServerState, sock: socket.socket, make_app: Callable[[Callable[[], None]], ASGIApp]) -> bool:
    """Serves until told to stop; returns whether it ended as it should.

    Args:
        state: its `draining` is set at the first SIGTERM or SIGINT.
        sock: from `bind`.
        make_app: makes the application, given what to call if models cannot be loaded.
    """
    server = _Server(state)
    app = make_app(server.give_up)
    server.config.app = app
    host, port = sock.getsockname()[:2]
    _log.info("listening", url=f"http://{f'[{host}]' if ':' in host else host}:{port}")
    server.run(sockets=[sock])
    return not server.failed


@final
class _Server(uvicorn.Server):
    """Ends in two steps: at the first signal it stops being ready, after the drain delay it stops accepting.

    A second signal ends it at once.
    """

    def __init__(self, state: ServerState) -> None:
        super().__init__(_config(state))
        self.failed = False
        self._state = state
        self._stop_at: float | None = None

    def give_up(self) -> None:
        self.failed = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._stop_at is not None:
            self.should_exit = self.force_exit = True
            return
        self._state.draining = True
        self._state.metrics.ready.set(0)
        self._stop_at = time.monotonic() + self._state.settings.drain_delay_s

    async def on_tick(self, counter: int) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


def _config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        app="",
        loop="uvloop",
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(state.settings.drain_timeout_s)),
    )

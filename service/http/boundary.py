"""The outermost layer of the application: request ids, a log line and a count for each request, no exception past it.

Pure ASGI. `except Exception` stands here, because here a defect becomes an opaque 500 instead of a lost request.
"""

import random
import re
import time
from collections.abc import Sequence
from typing import Final, final

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.codec import Chunk
from service.errors import EngineFailure, Internal, Overloaded, ServiceError
from service.http.errors import error_answer
from service.http.extensions import ON_STAGE, RESPOND, Header, Respond
from service.log import Sampled
from service.metrics import Metrics
from service.traces import Stage, Trace, Traces

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")
_REFUSALS_S: Final = 1.0
# The status of a client that left, which no client sees; nginx's number for it.
_LEFT: Final = 499
_log = structlog.get_logger("service.access")


@final
class Boundary:
    """Wraps the application. A valid `X-Request-Id` is kept, else one is made; it is in the answer and in the log.

    Args:
        app: what is wrapped.
        metrics: where requests are counted.
        traces: where they are traced, or None.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, traces: Traces | None) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces
        # Under load they come by the thousand, and each line is work that answers could have had.
        self._refusals = Sampled(_REFUSALS_S, time.monotonic)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lifespan passes through; a request gets exactly one answer, unless its client left."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send)
        if scope["method"] == "HEAD":
            # The answer to HEAD is that to GET without its body, which the server below leaves out.
            scope = {**scope, "method": "GET"}
        if exchange.can_respond:
            scope["extensions"] = {**scope["extensions"], RESPOND: {"respond": exchange.respond}}
        if self._traces is not None:
            scope["extensions"] = {**scope.get("extensions", {}), ON_STAGE: {"note": exchange.stages.append}}
        self._metrics.in_flight += 1
        try:
            await self._answer(exchange, scope, receive)
        finally:
            self._metrics.in_flight -= 1
        self._count(exchange, scope)

    async def _answer(self, exchange: "_Exchange", scope: Scope, receive: Receive) -> None:
        try:
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            exchange.code = "client_disconnected"
        except ServiceError as error:
            if isinstance(error, EngineFailure):  # opaque to the client, so the reason has to be here
                _log.error("engine failure", request_id=exchange.request_id, exc_info=error.__cause__)
            await exchange.fail(error)
        except Exception:
            _log.error("internal error", request_id=exchange.request_id, exc_info=True)
            if exchange.status is not None:
                raise  # the head is out: only a broken connection can still say that something is wrong
            opaque = Internal("internal error; the server's log has it under this request_id")
            await exchange.fail(opaque)

    def _count(self, exchange: "_Exchange", scope: Scope) -> None:
        route = _route(scope)
        ended = time.perf_counter()
        seconds = ended - exchange.started
        status = exchange.status or _LEFT
        self._metrics.requests.add((route, scope["method"], str(status), exchange.code))
        self._metrics.request_seconds.observe((route,), seconds)
        fields: dict[str, int | str] = {}
        quiet = route.startswith(("/health", "/v2/health", "/metrics"))
        if self._traces is not None and not quiet:
            whole = Stage(route, exchange.started, ended, {"mha.request_id": exchange.request_id})
            trace = Trace(scope["method"], route, status, exchange.code, scope["headers"], whole, exchange.stages)
            fields["trace_id"] = self._traces.record(trace)
        if exchange.code == Overloaded.code:
            unlogged = self._refusals.turn()
            quiet, fields["unlogged"] = unlogged is None, unlogged or 0
        (_log.debug if quiet else _log.info)(
            "request",
            request_id=exchange.request_id,
            method=scope["method"],
            route=route,
            status=exchange.status,
            code=exchange.code,
            duration_ms=round(seconds * 1000, 3),
            **fields,
        )


def new_request_id() -> str:
    """An id for a request that brought none."""
    return f"{random.getrandbits(128):032x}"


def _route(scope: Scope) -> str:
    # FastAPI notes its own routes in the scope, Starlette only the endpoint, which for inference says its route itself.
    return str(getattr(scope.get("route"), "path", None) or getattr(scope.get("endpoint"), "route", "other"))


@final
class _Exchange:
    """One request on its way, and what became of it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        # The server below leaves out the body of an answer to HEAD only where it comes as messages.
        extension = None if scope["method"] == "HEAD" else scope.get("extensions", {}).get(RESPOND)
        self._respond: Respond | None = extension and extension["respond"]
        self.started = time.perf_counter()
        self.status: int | None = None
        self.code = "ok"
        self.stages: list[Stage] = []
        sent_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        self.request_id = sent_id.decode() if _REQUEST_ID.fullmatch(sent_id) else new_request_id()

    @property
    def can_respond(self) -> bool:
        """Whether a whole answer may be given at once."""
        return self._respond is not None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
        await self._send(message)

    async def respond(self, status: int, headers: Sequence[Header], chunks: Sequence[Chunk]) -> None:
        assert self._respond is not None  # noqa: S101  # it is offered to nobody else
        self.status = status
        await self._respond(status, (*headers, (b"x-request-id", self.request_id.encode())), chunks)

    async def fail(self, error: ServiceError) -> None:
        self.code = error.code
        answer = error_answer(error, self.request_id)
        self.status = answer.status
        if self._respond is not None:
            await self._respond(answer.status, answer.headers, (answer.body,), closes=answer.closes)
            return
        headers = [*answer.headers, (b"connection", b"close")] if answer.closes else [*answer.headers]
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": answer.body})

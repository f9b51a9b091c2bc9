"""The application: routes, boundary, and the loading of models in the background."""

import asyncio
import gc
import importlib.metadata
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from service.errors import StartupError
from service.http.attention import AttentionEndpoint
from service.http.boundary import Boundary
from service.http.cors import Cors
from service.http.dispatch import Dispatch
from service.http.errors import from_http_exception, from_validation_error
from service.http.oip import OIP_INFER_ROUTES, OipInferEndpoint
from service.http.oip_routes import oip_routes
from service.http.openapi import install_openapi
from service.http.pages import add_pages
from service.http.repository_routes import repository_routes
from service.http.routes import read_routes
from service.http.state import ServerState

_log = structlog.get_logger(__name__)


def create_app(state: ServerState, load: Callable[[], None], give_up: Callable[[], None]) -> ASGIApp:
    """The ASGI application of one server.

    Args:
        state: shared by all routes.
        load: fills the state's library; called in a thread, while health is already answered.
        give_up: called if `load` raises `StartupError`, to end the server.
    """
    app = FastAPI(
        title="mha-service",
        version=importlib.metadata.version("mha-service"),
        description="Multi-head attention as a service.",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(state, load, give_up),
        redirect_slashes=False,
    )
    app.add_middleware(Boundary, metrics=state.metrics, traces=state.traces)
    app.add_exception_handler(HTTPException, from_http_exception)
    app.add_exception_handler(RequestValidationError, from_validation_error)
    inference = [
        Route(AttentionEndpoint.route, AttentionEndpoint(state), methods=["POST"]),
        *(Route(path, OipInferEndpoint(state, path), methods=["POST"]) for path in OIP_INFER_ROUTES),
    ]
    app.router.routes += inference
    app.include_router(read_routes(state))
    app.include_router(oip_routes(state))
    app.include_router(repository_routes(state))
    add_pages(app)
    install_openapi(app, state)
    dispatch = Dispatch(app, inference, state.metrics, state.traces)
    origins = [origin.strip() for origin in (state.settings.cors_origins or "").split(",") if origin.strip()]
    return Cors(dispatch, origins) if origins else dispatch


def _lifespan(
    state: ServerState, load: Callable[[], None], give_up: Callable[[], None]
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await state.siblings.open()
        loading = asyncio.create_task(_load(state, load, give_up))
        yield
        await loading
        state.siblings.note_unready()
        state.scheduler.close()
        if state.traces is not None:
            await asyncio.to_thread(state.traces.close)

    return lifespan


async def _load(state: ServerState, load: Callable[[], None], give_up: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(load)
    except StartupError as error:
        _log.error("start-up failed", reason=str(error))
    finally:
        if not state.library.is_loaded:
            give_up()  # whatever went wrong: a server that never becomes ready is worse than none
    if not state.library.is_loaded:
        return
    state.announce_models()
    gc.collect()
    gc.freeze()  # what was imported and loaded stays; without it every full collection looks at all of it again
    content = {"models": state.names(), "device": state.device.name, "reason": state.device.reason}
    state.siblings.note_ready(content)

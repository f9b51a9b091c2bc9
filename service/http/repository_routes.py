"""`/v2/repository`: which models there are, and loading and unloading them while requests run."""

import asyncio
from typing import Annotated, Any, Final

import orjson
import structlog
from fastapi import APIRouter, Path, Request

from service.errors import InvalidParameter, MalformedBody
from service.http.body import BodyLimits, read_body
from service.http.oip_views import index_entry
from service.http.siblings import load, unload
from service.http.state import ServerState
from service.http.views import ErrorBody

_log = structlog.get_logger(__name__)
_MAX_BODY_BYTES: Final = 64 * 1024

Model = Annotated[str, Path(description="Name of the model.", examples=["attention"])]

# Bodies are read by hand, with a limit of their own; clients send none, or `{"parameters": {...}}`.
_BODY: Final = {
    "requestBody": {"required": False, "content": {"application/json": {"schema": {"type": "object"}, "example": {}}}}
}
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in (
        (400, "malformed_body, invalid_parameter"),
        (401, "unauthorized"),
        (403, "forbidden"),
        (404, "model_not_found"),
        (413, "body_too_large"),
        (422, "invalid_artifact"),
        (503, "not_ready"),
    )
}


def repository_routes(state: ServerState) -> APIRouter:
    """The router of the model repository extension."""
    router = APIRouter(prefix="/v2/repository", tags=["Open Inference Protocol"], responses=_ERRORS)

    async def admitted(request: Request) -> dict[str, Any]:
        if state.secrets.api_keys is not None:
            state.secrets.api_keys.check(request.headers, "repository")
        limits = BodyLimits(_MAX_BODY_BYTES, state.settings.min_body_rate)
        with state.admission.holding() as held:
            return _payload(bytes(await read_body(request.scope, request.headers, request.receive, limits, held)))

    @router.post("/index", openapi_extra=_BODY)
    async def oip_index(request: Request) -> list[dict[str, Any]]:
        """Every version in the repository, whether it is served, and why not. `{"ready": true}` lists served ones."""
        payload = await admitted(request)
        entries = await asyncio.to_thread(state.library.index)
        return [index_entry(entry) for entry in entries if entry.ready or payload.get("ready") is not True]

    @router.post("/models/{model}/load", openapi_extra=_BODY)
    async def oip_load(request: Request, model: Model) -> dict[str, Any]:
        """Serves every version that the repository holds now. If one is broken, what was served before still is."""
        _refuse_overrides(await admitted(request))
        await state.siblings.change(load(model))
        _log.info("loaded", model=model, models=state.names())
        return {}

    @router.post("/models/{model}/unload", openapi_extra=_BODY)
    async def oip_unload(request: Request, model: Model) -> dict[str, Any]:
        """Serves no version from now on; requests that run are answered."""
        await admitted(request)
        await state.siblings.change(unload(model))
        _log.info("unloaded", model=model, models=state.names())
        return {}

    return router


def _payload(body: bytes) -> dict[str, Any]:
    try:
        payload = orjson.loads(body) if body.strip() else {}
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"body: not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise MalformedBody("body: want a JSON object, or nothing")
    return payload


def _refuse_overrides(payload: dict[str, Any]) -> None:
    parameters = payload.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidParameter("parameters: want an object")
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            raise InvalidParameter(f"parameters: {name[:64]!r} is not offered; models are loaded as they are stored")

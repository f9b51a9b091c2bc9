"""Everything that is read: health, models, metrics. Never queued, never behind a key."""

from fastapi import APIRouter
from starlette.responses import Response

from service.http.siblings import METRICS
from service.http.state import ServerState
from service.http.views import NOT_YET, ErrorBody, ModelList, ModelVersions, model_view


def read_routes(state: ServerState) -> APIRouter:
    """The router of all routes that only read."""
    router = APIRouter()
    _add_health(router, state)
    _add_models(router, state)

    @router.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics() -> Response:
        """Counts and times in Prometheus' text format."""
        state.metrics.ready.set(state.is_ready)
        elsewhere = await state.siblings.ask(METRICS)
        return Response(state.metrics.exposition(elsewhere), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def _add_health(router: APIRouter, state: ServerState) -> None:
    @router.get("/health/live", tags=["health"], responses=NOT_YET)
    async def live() -> dict[str, bool]:
        """200 unless only a restart can help: 503 once a GPU computes no more."""
        state.check_live()
        return {"live": True}

    @router.get("/health/ready", tags=["health"], responses=NOT_YET)
    async def ready() -> dict[str, bool]:
        """200 while new requests are welcome.

        503 while models load, from the moment the server is told to stop, and while an engine call does not return.
        """
        state.check_ready()
        return {"ready": True}

    @router.get("/health/startup", tags=["health"], responses=NOT_YET)
    async def startup() -> dict[str, bool]:
        """200 once models have been loaded, and ever after."""
        state.check_started()
        return {"started": True}


def _add_models(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models", tags=["models"], responses=NOT_YET)
    async def models() -> ModelList:
        """What is served: sizes, heads, limits, parity, digest."""
        catalog = state.served()
        newest = [catalog.versions(name)[-1] for name in catalog.names()]
        return ModelList(models=[model_view(model, state.device, state.settings) for model in newest])

    @router.get(
        "/v1/models/{name}",
        tags=["models"],
        responses={**NOT_YET, 404: {"model": ErrorBody, "description": "model_not_found"}},
    )
    async def model(name: str) -> ModelVersions:
        """Every version of one model."""
        versions = state.served().versions(name)
        return ModelVersions(name=name, versions=[model_view(one, state.device, state.settings) for one in versions])

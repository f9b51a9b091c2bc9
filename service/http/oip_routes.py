"""What the Open Inference Protocol reads: health, metadata, configuration, statistics. With and without a version."""

import importlib.metadata
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path

from service.catalog import ServedModel
from service.http.oip_views import EXTENSIONS, model_config, model_metadata, model_statistics
from service.http.siblings import statistics_elsewhere
from service.http.state import ServerState
from service.http.views import NOT_YET, ErrorBody

_MODEL: Final[dict[int | str, dict[str, Any]]] = {
    404: {"model": ErrorBody, "description": "model_not_found"},
    **NOT_YET,
}

Model = Annotated[str, Path(description="Name of the model.", examples=["attention"])]
Version = Annotated[str, Path(description="Version of the model.", examples=["1"])]


def oip_routes(state: ServerState) -> APIRouter:
    """The router of all `/v2` routes that only read."""
    router = APIRouter(prefix="/v2", tags=["Open Inference Protocol"])
    _add_server(router, state)
    _add_statistics(router, state)
    _add_models(router, state)
    return router


def _add_server(router: APIRouter, state: ServerState) -> None:
    @router.get("/health/live", responses=NOT_YET)
    async def oip_live() -> dict[str, bool]:
        """200 unless only a restart can help."""
        state.check_live()
        return {"live": True}

    @router.get("/health/ready", responses=NOT_YET)
    async def oip_ready() -> dict[str, bool]:
        """200 while new requests are welcome."""
        state.check_ready()
        return {"ready": True}

    @router.get("")
    async def oip_server() -> dict[str, Any]:
        """Name, version, and the extensions that exist."""
        return {
            "name": "mha-service",
            "version": importlib.metadata.version("mha-service"),
            "extensions": list(EXTENSIONS),
        }


def _add_statistics(router: APIRouter, state: ServerState) -> None:
    async def statistics_of(models: list[ServedModel]) -> dict[str, Any]:
        elsewhere = await statistics_elsewhere(state)
        return {
            "model_stats": [
                model_statistics(
                    one.artifact, one.statistics.merged_with(elsewhere(one.artifact.name, one.artifact.version))
                )
                for one in models
            ]
        }

    # Before the routes with a name, so that `stats` is not taken for one.
    @router.get("/models/stats", responses=NOT_YET)
    async def oip_all_statistics() -> dict[str, Any]:
        """Counts and times of every version of every model."""
        return await statistics_of(list(state.served()))

    @router.get("/models/{model}/stats", responses=_MODEL)
    async def oip_model_statistics(model: Model) -> dict[str, Any]:
        """Counts and times of every version of one model."""
        return await statistics_of(state.served().versions(model))

    @router.get("/models/{model}/versions/{version}/stats", responses=_MODEL)
    async def oip_version_statistics(model: Model, version: Version) -> dict[str, Any]:
        """Counts and times of one version."""
        return await statistics_of([state.served().find(model, version)])


def _add_models(router: APIRouter, state: ServerState) -> None:
    def add(path: str, name: str, answer: Any) -> None:
        async def newest(model: Model) -> dict[str, Any]:
            return dict(answer(model, None))

        async def versioned(model: Model, version: Version) -> dict[str, Any]:
            return dict(answer(model, version))

        for suffix, endpoint in (("", newest), ("/versions/{version}", versioned)):
            router.add_api_route(
                f"/models/{{model}}{suffix}{path}",
                endpoint,
                name=f"{name}{'_of_version' if suffix else ''}",
                description=answer.__doc__,
                responses=_MODEL,
            )

    def metadata(model: str, version: str | None) -> dict[str, Any]:
        """Inputs and outputs with their datatypes and shapes; -1 is a dynamic axis."""
        catalog = state.served()
        return model_metadata(catalog.find(model, version), catalog.versions(model))

    def ready(model: str, version: str | None) -> dict[str, Any]:
        """200 if the model answers."""
        state.check_ready()
        return {"name": state.served().find(model, version).artifact.name, "ready": True}

    def config(model: str, version: str | None) -> dict[str, Any]:
        """The configuration in Triton's terms."""
        return model_config(state.served().find(model, version))

    add("", "oip_model_metadata", metadata)
    add("/ready", "oip_model_ready", ready)
    add("/config", "oip_model_config", config)

"""The service on a Ray cluster: `serve run deploy.ray_serve:app`, or `serve deploy deploy/ray_serve.yaml`.

The application is the one that `mha serve` has, in as many replicas as there is work for. Ray's proxies stand in front
of them: they speak HTTP, choose a replica, and queue only what none may take. What a replica is, is `deploy.replica`.
"""

import asyncio
import math
import os
from typing import Any, Final

import ray
from pydantic import BaseModel, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, BackpressureConfig
from starlette.types import ASGIApp

from deploy.replica import Replica, settings_of
from service.log import configure_logging
from service.settings import Settings

# What another replica says of itself is there at once or not worth waiting for.
_REPLY_S: Final = 2.0
_RETRY_AFTER_S: Final = 1


class Scale(BaseModel):
    """How many replicas, and how large: `serve run deploy.ray_serve:app num_cpus=2 max_replicas=8`."""

    num_cpus: float = Field(1, gt=0, description="CPUs of a replica, which are its engine calls at once, too.")
    num_gpus: float = Field(0, ge=0, description="GPUs of a replica.")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(2, ge=1)
    target_ongoing_requests: float = Field(
        2, gt=0, description="Requests at once that a replica should have: beyond them there will be more replicas."
    )


@serve.deployment
@serve.ingress()
class Attention:
    """A replica as Ray Serve sees it."""

    async def __init__(self, settings: Settings) -> None:
        configure_logging(settings.log_level, settings.log_format)
        cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
        self._replica = await asyncio.to_thread(Replica.start, settings, math.ceil(cpus), _ask_others)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application, whose lifespan Ray runs."""
        return self._replica.app

    async def reconfigure(self, user_config: Any) -> None:  # noqa: ARG002  # that it has changed is all that it says
        """The repository holds something else now."""
        await self._replica.reread()

    async def check_health(self) -> None:
        """Raises where only another replica can help."""
        self._replica.check_health()

    async def reply(self, subject: str, asker: str) -> Any:
        """What this replica says when another asks; None to itself."""
        return None if _own_name() == asker else await self._replica.reply(subject)


def app(scale: Scale) -> Application:
    """The service as a Ray Serve application, set by the `MHA_*` variables of this environment.

    Raises:
        StartupError: a setting is wrong.
    """
    settings = settings_of(os.environ)
    return Attention.options(
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            target_ongoing_requests=scale.target_ongoing_requests,
        ),
        # Ray's own 5 would keep all others in a queue that has no end and that the service does not see: it is the
        # service that knows what a request costs, and refuses it with 429. Beyond this, Ray does so in the same words.
        max_ongoing_requests=settings.max_connections,
        max_queued_requests=settings.max_connections,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=_RETRY_AFTER_S),
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config={"enable_access_log": False},  # the service has its own
    ).bind(settings)


def _own_name() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


async def _ask_others(subject: str) -> list[Any]:
    """See `AskOthers`."""
    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, context.app_name)
    asked = handle.broadcast("reply", subject, _own_name())
    try:
        replies = await asked.results_async(timeout_s=_REPLY_S, return_exceptions=True)
    except TimeoutError:
        return []
    return [reply for reply in replies if reply is not None and not isinstance(reply, Exception)]

"""Ray Serve: a proxy in front of replicas, each an actor; bodies as Starlette gives them."""

import os
import signal
from pathlib import Path

import orjson
import ray
from attention import Attention, Setup
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from wire import from_lists, unpack

setup = Setup.read()


@serve.deployment(
    num_replicas=setup.processes,
    max_ongoing_requests=32,
    ray_actor_options={"num_cpus": 0},
    logging_config={"enable_access_log": False},
)
class Layer:
    """One replica; a call takes its event loop, since there is nothing else for it to do."""

    def __init__(self) -> None:
        self._attention = Attention(setup.model, setup.threads)

    async def __call__(self, request: Request) -> Response:
        """The output in the format of the request."""
        body = await request.body()
        if request.headers["content-type"] == "application/json":
            output = self._attention(from_lists(orjson.loads(body)))
            answer = orjson.dumps({"output": output}, option=orjson.OPT_SERIALIZE_NUMPY)
            return Response(answer, media_type="application/json")
        return Response(self._attention(unpack(body)).tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    here = str(Path(__file__).parent)
    variables = {name: value for name, value in os.environ.items() if name.startswith(("BENCH_", "RAY_"))}
    ray.init(
        _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False, logging_level="error",
        runtime_env={"env_vars": {**variables, "PYTHONPATH": here}},
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": setup.port}, logging_config={"enable_access_log": False})
    serve.run(Layer.bind())
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    ray.shutdown()

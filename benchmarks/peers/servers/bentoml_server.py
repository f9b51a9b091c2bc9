"""BentoML: its own JSON of arrays, and a mounted ASGI application for raw bytes, which its API methods do not take."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import bentoml
import numpy as np
from attention import Attention, Setup
from bentoml.validators import DType
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from wire import spread, unpack

setup = Setup.read()
attention = Attention(setup.model, setup.threads)
pool = ThreadPoolExecutor(setup.callers)
Tensor = Annotated[np.ndarray, DType("float32")]


def _answer(body: bytes) -> bytes:
    return attention(unpack(body)).tobytes()


async def _raw(request: Request) -> Response:
    content = await asyncio.get_running_loop().run_in_executor(pool, _answer, await request.body())
    return Response(content, media_type="application/octet-stream")


@bentoml.service(
    workers=setup.processes, threads=setup.callers, traffic={"timeout": 30}, logging={"access": {"enabled": False}}
)
@bentoml.asgi_app(Starlette(routes=[Route("/raw", _raw, methods=["POST"])]), path="/")
class Layer:
    """The service; `bentoml serve bentoml_server:Layer` starts it."""

    @bentoml.api(route="/json")
    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The layer's output where every key counts."""
        feed = {"queries": queries, "keys": keys, "values": values}
        return attention({**feed, "valid_lens": spread(None, feed)})

"""BentoML: a mounted ASGI application, since its API methods take no raw bytes and read JSON several times slower."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import bentoml
import orjson
from attention import Attention, Setup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from wire import from_lists, unpack

setup = Setup.read()
attention = Attention(setup.model, setup.threads)
pool = ThreadPoolExecutor(setup.callers)


def _answer_json(body: bytes) -> bytes:
    output = attention(from_lists(orjson.loads(body)))
    return orjson.dumps({"output": output}, option=orjson.OPT_SERIALIZE_NUMPY)


def _answer_bytes(body: bytes) -> bytes:
    return attention(unpack(body)).tobytes()


async def _attend(request: Request) -> Response:
    body, media_type = await request.body(), request.headers["content-type"]
    answer = _answer_json if media_type == "application/json" else _answer_bytes
    content = await asyncio.get_running_loop().run_in_executor(pool, answer, body)
    return Response(content, media_type=media_type)


@bentoml.service(
    workers=setup.processes, threads=setup.callers, traffic={"timeout": 30}, logging={"access": {"enabled": False}}
)
@bentoml.asgi_app(Starlette(routes=[Route("/attend", _attend, methods=["POST"])]), path="/")
class Layer:
    """The service; `bentoml serve bentoml_server:Layer` starts it."""

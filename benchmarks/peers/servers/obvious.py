"""The server that one writes in an afternoon: FastAPI, uvicorn, a thread pool around the session."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import orjson
import uvicorn
from attention import Attention, Setup
from fastapi import FastAPI, Request, Response
from wire import from_lists, unpack

setup = Setup.read()
attention = Attention(setup.model, setup.threads)
pool = ThreadPoolExecutor(setup.callers)
app = FastAPI()


def _answer_json(body: bytes) -> bytes:
    output = attention(from_lists(orjson.loads(body)))
    return orjson.dumps({"output": output}, option=orjson.OPT_SERIALIZE_NUMPY)


def _answer_bytes(body: bytes) -> memoryview:
    return attention(unpack(body)).data.cast("B")


@app.post("/")
async def attend(request: Request) -> Response:
    """The layer's output in the format of the request."""
    body = await request.body()
    media_type = request.headers["content-type"]
    answer = _answer_json if media_type == "application/json" else _answer_bytes
    content = await asyncio.get_running_loop().run_in_executor(pool, answer, body)
    return Response(content, media_type=media_type)


@app.get("/ready")
async def ready() -> Response:
    """200."""
    return Response()


if __name__ == "__main__":
    uvicorn.run(
        "obvious:app",
        port=setup.port,
        workers=setup.processes,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )

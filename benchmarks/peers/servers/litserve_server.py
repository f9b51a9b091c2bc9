"""LitServe: uvicorn in front of worker processes. Bodies as a FastAPI dependency."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import litserve
import numpy as np
import orjson
from attention import Attention, Setup
from fastapi import Depends, Request, Response
from wire import from_lists, unpack

setup = Setup.read()


@dataclass(frozen=True, slots=True)
class _Body:
    """Bytes that are cheap to print: LitServe formats each request for a debug line, also where none is written."""

    content: bytes = field(repr=False)


async def _read(request: Request) -> _Body:
    return _Body(await request.body())


class _Layer(litserve.LitAPI):
    """Raw bytes in and out."""

    def setup(self, device: str) -> None:  # noqa: ARG002  # LitServe's signature
        self._attention = Attention(setup.model, setup.threads)

    def decode_request(self, request: Annotated[_Body, Depends(_read)]) -> dict[str, np.ndarray]:
        return unpack(request.content)

    def predict(self, x: Mapping[str, np.ndarray]) -> np.ndarray:
        return self._attention(x)

    def encode_response(self, output: np.ndarray) -> Response:
        return Response(output.tobytes(), media_type="application/octet-stream")


class _JsonLayer(_Layer):
    """JSON through orjson in the worker: LitServe's own reading prints what it has read, all its numbers."""

    def decode_request(self, request: Annotated[_Body, Depends(_read)]) -> dict[str, np.ndarray]:
        return from_lists(orjson.loads(request.content))

    def encode_response(self, output: np.ndarray) -> Response:
        answer = orjson.dumps({"output": output}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(answer, media_type="application/json")


if __name__ == "__main__":
    server = litserve.LitServer(
        [_Layer(api_path="/raw"), _JsonLayer(api_path="/json")],
        accelerator="cpu",
        workers_per_device=setup.processes,
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1", port=setup.port, num_api_servers=2, log_level="warning", generate_client_file=False,
        access_log=False,
    )  # fmt: skip

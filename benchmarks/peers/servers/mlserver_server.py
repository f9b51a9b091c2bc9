"""MLServer: the Open Inference Protocol as JSON, and a custom endpoint for raw bytes, which its protocol lacks."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from attention import Attention, Setup
from fastapi import Body, Response
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.handlers import custom_handler
from mlserver.types import InferenceRequest, InferenceResponse
from wire import spread, unpack

setup = Setup.read()


class Layer(MLModel):
    """The layer as a custom runtime; workers import it by name."""

    async def load(self) -> bool:
        """True once the graph is there."""
        self._attention = Attention(setup.model, setup.threads)
        self._pool = ThreadPoolExecutor(setup.callers)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """The output of tensors as lists of numbers."""
        feed = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        feed["valid_lens"] = spread(feed.get("valid_lens"), feed)
        output = await asyncio.get_running_loop().run_in_executor(self._pool, self._attention, feed)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output", output)])

    @custom_handler(rest_path="/raw")
    async def raw(self, body: Annotated[bytes, Body()]) -> Response:
        """The output of raw bytes."""

        def answer() -> bytes:
            return self._attention(unpack(body)).tobytes()

        content = await asyncio.get_running_loop().run_in_executor(self._pool, answer)
        return Response(content, media_type="application/octet-stream")


async def main() -> None:
    """Serves until it is told to end."""
    settings = Settings(
        debug=False, host="127.0.0.1", http_port=setup.port, grpc_port=setup.port + 1, metrics_endpoint=None,
        parallel_workers=setup.processes if setup.processes > 1 else 0, gzip_enabled=False,
    )  # fmt: skip
    model = ModelSettings(name="attention", implementation="mlserver_server.Layer")
    await MLServer(settings).start([model])


if __name__ == "__main__":
    asyncio.run(main())

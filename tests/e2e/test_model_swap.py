"""Changing what is served under traffic: nothing lost, nothing mixed, and a broken version changes nothing."""

import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest

from model.attention import MultiHeadAttention, seeded_layer
from tests.conftest import publish, weights_of
from tests.oracle import multi_head_attention
from tests.served import serving

SWAPS = 20
REQUESTS_PER_S = 50


@pytest.fixture(scope="module")
def layers() -> dict[int, MultiHeadAttention]:
    """Two versions of a model, with the same sizes and other weights."""
    return {version: seeded_layer(12, 3, seed=version) for version in (1, 2)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, layers: dict[int, MultiHeadAttention]) -> Path:
    """Both versions, exported once."""
    folder = tmp_path_factory.mktemp("store")
    for version, layer in layers.items():
        publish(layer, folder, "layer", version)
    return folder


def test_twenty_swaps_under_load(tmp_path: Path, store: Path, layers: dict[int, MultiHeadAttention]) -> None:
    """Version 2 comes and goes twenty times under 50 requests a second: none fails, none is of two versions."""
    repository = tmp_path / "models"
    shutil.copytree(store, repository)
    newest = repository / "layer" / "2"
    queries = np.random.default_rng(0).standard_normal((2, 5, 12), np.float32)
    expected = {
        version: multi_head_attention(weights_of(layer), layer.num_heads, queries, queries, queries)[0]
        for version, layer in layers.items()
    }
    answered: Counter[int] = Counter()
    failures: list[str] = []
    stop = threading.Event()

    def ask_steadily(url: str, offset_s: float) -> None:
        # Four clients, each at a quarter of the rate, on a schedule of its own.
        body = {"queries": queries.tolist()}
        with httpx.Client(base_url=url, timeout=30) as client:
            due = time.monotonic() + offset_s
            while not stop.is_set():
                time.sleep(max(0.0, due - time.monotonic()))
                due += 4 / REQUESTS_PER_S
                response = client.post("/v1/attention", json=body)
                if response.status_code != 200:
                    failures.append(response.text)
                    continue
                version = int(response.headers["mha-version"])
                output = np.array(response.json()["output"])
                if np.abs(output - expected[version]).max() > 1e-5 * np.abs(expected[version]).max():
                    failures.append(f"not the answer of version {version}")
                answered[version] += 1

    with serving(tmp_path / "log", "--models", str(repository)) as server:
        threads = [
            threading.Thread(target=ask_steadily, args=(server.url, index / REQUESTS_PER_S)) for index in range(4)
        ]
        for thread in threads:
            thread.start()
        for swap in range(SWAPS):
            if swap % 2 == 0:
                shutil.move(newest, tmp_path / "away")
            else:
                shutil.move(tmp_path / "away", newest)
            assert server.client.post("/v2/repository/models/layer/load").status_code == 200
            time.sleep(0.2)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert min(answered[1], answered[2]) > SWAPS  # both versions did answer


@pytest.fixture
def broken_store(tmp_path: Path, store: Path) -> Path:
    """A repository whose version 2 is cut short."""
    repository = tmp_path / "models"
    shutil.copytree(store, repository)
    graph = repository / "layer" / "2" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-100])
    return repository


def test_broken_version_leaves_the_old_one(tmp_path: Path, broken_store: Path) -> None:
    """A new version that is not whole is refused with its reason, and what was served still is."""
    broken = shutil.move(broken_store / "layer" / "2", tmp_path / "aside")
    with serving(tmp_path / "log", "--models", str(broken_store)) as server:
        shutil.move(broken, broken_store / "layer" / "2")
        response = server.client.post("/v2/repository/models/layer/load")
        assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact")
        says = response.json()["error"]
        assert "'layer' was not loaded: layer/2/model.onnx: sha256 is" in says
        assert str(tmp_path) not in says  # nothing of the machine's paths
        index = server.client.post("/v2/repository/index").json()
        assert [(entry["version"], entry["state"]) for entry in index] == [("1", "READY"), ("2", "UNAVAILABLE")]
        assert "sha256 is" in index[1]["reason"]
        answer = server.client.post("/v1/attention", json={"queries": [[[0.5] * 12]]})
        assert (answer.status_code, answer.headers["mha-version"]) == (200, "1")
        server.client.post("/v2/repository/models/layer/unload")
        assert server.client.post("/v2/repository/models/layer/load").status_code == 422
        shutil.rmtree(broken_store / "layer" / "2")
        assert server.client.post("/v2/repository/models/layer/load").status_code == 200
        assert server.client.get("/v2/models/layer/ready").status_code == 200


def test_version_overwritten_in_place(tmp_path: Path, store: Path, layers: dict[int, MultiHeadAttention]) -> None:
    """A version that was exported anew with --force is served after a load, with its own weights."""
    repository = tmp_path / "models"
    shutil.copytree(store / "layer" / "1", repository / "layer" / "1")
    queries = np.random.default_rng(1).standard_normal((1, 3, 12), np.float32)
    with serving(tmp_path / "log", "--models", str(repository)) as server:
        body = {"queries": queries.tolist()}
        before = np.array(server.client.post("/v1/attention", json=body).json()["output"])
        shutil.rmtree(repository / "layer" / "1")
        shutil.copytree(store / "layer" / "2", repository / "layer" / "1")
        assert server.client.post("/v2/repository/models/layer/load").status_code == 200
        after = np.array(server.client.post("/v1/attention", json=body).json()["output"])
        info = [line for line in server.client.get("/metrics").text.splitlines() if line.startswith("mha_model_info{")]
    for version, got in ((1, before), (2, after)):
        layer = layers[version]
        expected, _ = multi_head_attention(weights_of(layer), layer.num_heads, queries, queries, queries)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert len(info) == 1  # the metrics know only what is served


def test_repository_that_is_gone(tmp_path: Path, store: Path) -> None:
    """A repository that cannot be read is told as such, without its path, and what was loaded is still served."""
    repository = tmp_path / "models"
    shutil.copytree(store, repository)
    with serving(tmp_path / "log", "--models", str(repository)) as server:
        shutil.rmtree(repository)
        for path in ("/v2/repository/models/layer/load", "/v2/repository/index"):
            response = server.client.post(path)
            assert (response.status_code, response.json()["code"]) == (422, "invalid_artifact"), path
            assert str(tmp_path) not in response.json()["error"]
        assert server.client.post("/v1/attention", json={"queries": [[[0.5] * 12]]}).status_code == 200

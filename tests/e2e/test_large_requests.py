"""Requests that are large in one way or another: memory stays bounded, answers exact, and small requests get by."""

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load, save

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, serving

WORKSPACE_BYTES = 4_000_000
NUM_TOKENS = 3001
SAFETENSORS = {"Content-Type": "application/vnd.safetensors"}


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server whose calls may take 4 MB of scores each."""
    log = tmp_path_factory.mktemp("tight") / "log"
    flags = ("--models", str(seeds_repository), "--workspace-bytes", str(WORKSPACE_BYTES))
    with serving(log, *flags) as process:
        yield process


def test_long_self_attention_fits_the_workspace(tight: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
    """3,001 tokens, whose scores would take 360 MB at once, cost a few tens; sampled queries equal the oracle."""
    queries = np.random.default_rng(0).standard_normal((1, NUM_TOKENS, 100), np.float32)
    lengths = np.full((1, NUM_TOKENS), NUM_TOKENS)
    sampled = [0, 1499, 1500, NUM_TOKENS - 1]
    lengths[0, sampled] = [NUM_TOKENS, 0, 1, 2500]
    body = save({"queries": queries, "valid_lens": lengths})
    small = save({"queries": queries[:, :100]})
    tight.client.post("/v1/attention", content=small, headers=SAFETENSORS)
    before = tight.peak_memory_bytes()
    response = tight.client.post("/v1/attention", content=body, headers=SAFETENSORS)
    assert response.status_code == 200, response.text
    grown = tight.peak_memory_bytes() - before
    output = load(response.content)["output"]
    expected, _ = multi_head_attention(
        weights_of(seeds_layer), seeds_layer.num_heads, queries[:, sampled], queries, queries, lengths[:, sampled]
    )
    assert np.abs(output[:, sampled] - expected).max() <= 1e-5 * np.abs(expected).max()
    # Two workers' scores, and for each the projections and their transposes (six arrays of 1.2 MB); the body, the
    # answer and its copy; twice all that, because the runtime's arena grows by doubling. All scores at once are 360 MB.
    assert grown <= 2 * (2 * (WORKSPACE_BYTES + 6 * queries.nbytes) + 4 * queries.nbytes)


def test_many_shapes_do_not_add_up(tight: ServerProcess) -> None:
    """After a quarter of 200 requests of random shapes, memory hardly grows."""
    rng = np.random.default_rng(1)
    after_a_quarter = 0
    for index in range(200):
        batch, num_queries, num_kv = (int(rng.integers(1, most)) for most in (9, 129, 129))
        tensors = {
            "queries": rng.standard_normal((batch, num_queries, 100), np.float32),
            "keys": rng.standard_normal((batch, num_kv, 100), np.float32),
            "valid_lens": rng.integers(0, num_kv + 1, batch),
        }
        assert tight.client.post("/v1/attention", content=save(tensors), headers=SAFETENSORS).status_code == 200
        if index == 50:
            after_a_quarter = tight.peak_memory_bytes()
    assert tight.peak_memory_bytes() <= 1.1 * after_a_quarter


def test_small_requests_pass_between(tight: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
    """While a large request is computed, small ones are answered before it is."""
    rng = np.random.default_rng(2)
    large = save({"queries": rng.standard_normal((1, NUM_TOKENS, 100), np.float32)})
    small = save({"queries": rng.standard_normal((1, 3, 100), np.float32)})
    finished: list[float] = []

    def ask_large() -> None:
        response = httpx.post(f"{tight.url}/v1/attention", content=large, headers=SAFETENSORS, timeout=60)
        assert response.status_code == 200
        finished.append(time.monotonic())

    thread = threading.Thread(target=ask_large)
    thread.start()
    time.sleep(0.05)
    answered = []
    while thread.is_alive():
        assert tight.client.post("/v1/attention", content=small, headers=SAFETENSORS).status_code == 200
        answered.append(time.monotonic())
    thread.join()
    assert sum(when < finished[0] for when in answered) >= 3


def test_metrics_tell_the_waste(tight: ServerProcess) -> None:
    """Keys received, valid and computed are counted as they were."""

    def keys() -> dict[str, float]:
        lines = tight.client.get("/metrics").text.splitlines()
        counted = (line.split() for line in lines if line.startswith("mha_keys_total{"))
        return {name.split('"')[1]: float(value) for name, value in counted}

    before = keys()
    tensors = {
        "queries": np.ones((3, 2, 100), np.float32),
        "keys": np.ones((3, 50, 100), np.float32),
        "valid_lens": np.array([7, 7, 7]),
    }
    assert tight.client.post("/v1/attention", content=save(tensors), headers=SAFETENSORS).status_code == 200
    after = keys()
    assert {kind: after[kind] - before[kind] for kind in after} == {"received": 150, "valid": 21, "computed": 21}


def test_out_of_memory_is_one_request_s_own(tmp_path: Path, seeds_repository: Path) -> None:
    """Where the system has no more memory to give, the request that wants it fails, and the next one is answered."""
    small, large = (save({"queries": np.ones(shape, np.float32)}) for shape in ((1, 4, 100), (64, 1200, 100)))
    with serving(tmp_path / "log", "--models", str(seeds_repository), "--processes", "1") as server:

        def status(body: bytes) -> int:
            return server.client.post("/v1/attention", content=body, headers=SAFETENSORS).status_code

        assert status(small) == 200
        pid = server.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + 8 * 1024 * 1024, hard))
        assert status(large) == 500
        assert status(small) == 200
        assert server.client.get("/health/live").status_code == 200
        resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
        assert status(large) == 200

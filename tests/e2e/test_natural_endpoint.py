"""What the README promises, through a real server: the seeds' example, every codec, and the contract over HTTP."""

import io
import json
import shlex
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, serving

JSON, SAFETENSORS, NPZ = "application/json", "application/vnd.safetensors", "application/x-npz"
ROOT = Path(__file__).parents[2]

Tensors = dict[str, np.ndarray]


def to_json(tensors: Tensors) -> bytes:
    return json.dumps({name: tensor.tolist() for name, tensor in tensors.items()}).encode()


def to_npz(tensors: Tensors) -> bytes:
    file = io.BytesIO()
    np.savez(file, **tensors)
    return file.getvalue()


def from_json(body: bytes) -> Tensors:
    return {name: np.array(value, np.float32) for name, value in json.loads(body).items()}


def from_npz(body: bytes) -> Tensors:
    with np.load(io.BytesIO(body)) as archive:
        return dict(archive)


WRITE: dict[str, Callable[[Tensors], bytes]] = {JSON: to_json, SAFETENSORS: safetensors.numpy.save, NPZ: to_npz}
READ: dict[str, Callable[[bytes], Tensors]] = {JSON: from_json, SAFETENSORS: safetensors.numpy.load, NPZ: from_npz}


def ask(client: httpx.Client, tensors: Tensors, codec: str = SAFETENSORS, **params: Any) -> Tensors:
    """The answer's tensors."""
    response = client.post(
        "/v1/attention", params={"model": "attention", **params}, content=WRITE[codec](tensors),
        headers={"Content-Type": codec},
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == codec
    return READ[codec](response.content)


def drawn(layer: MultiHeadAttention, batch: int = 3, num_queries: int = 5, num_kv: int = 7, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    sizes = {"queries": layer.W_q.in_features, "keys": layer.W_k.in_features, "values": layer.W_v.in_features}
    lengths = {"queries": num_queries, "keys": num_kv, "values": num_kv}
    tensors = {name: rng.standard_normal((batch, lengths[name], sizes[name]), np.float32) for name in sizes}
    return {**tensors, "valid_lens": rng.integers(0, num_kv + 1, (batch, num_queries))}


def close(got: np.ndarray, want: np.ndarray, limit: float = 1e-5) -> bool:
    """Within the limit, relative to the scale of what is wanted."""
    return got.shape == want.shape and bool(np.abs(got - want).max() <= limit * np.abs(want).max())


def test_seeds_example(server: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
    """The example body in the repository gives the seeds' (2, 4, 100) answer, equal to torch within 1e-5."""
    body = (ROOT / "examples" / "seeds.json").read_bytes()
    response = server.client.post(
        "/v1/attention?model=attention", content=body, headers={"Content-Type": "application/json"}
    )
    answer = np.array(response.json()["output"])
    with torch.inference_mode():
        ones = torch.ones(2, 6, 100)
        expected = seeds_layer(torch.ones(2, 4, 100), ones, ones, torch.tensor([3, 2])).numpy()
    assert answer.shape == (2, 4, 100)
    assert close(answer, expected)


def test_readme_curl(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> None:
    """The README's curl line, run as it stands but for the port, is answered."""
    readme = (ROOT / "README.md").read_text()
    (line,) = (line for line in readme.splitlines() if line.startswith("curl ") and "seeds.json" in line)
    with serving(tmp_path_factory.mktemp("curl") / "log", "--models", str(seeds_repository)) as server:
        command = shlex.split(line.replace("http://127.0.0.1:8000", server.url))
        run = subprocess.run([*command, "--silent", "--fail"], cwd=ROOT, capture_output=True, check=True)
    assert np.array(json.loads(run.stdout)["output"]).shape == (2, 4, 100)


@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
@pytest.mark.parametrize("model", ["attention", "odd", "additive"])
def test_equals_oracle(server: ServerProcess, request: pytest.FixtureRequest, model: str, codec: str) -> None:
    """Output and weights are the oracle's, for every kind of layer, through every codec."""
    layer = request.getfixturevalue("seeds_layer" if model == "attention" else f"{model}_layer")
    tensors = drawn(layer)
    answer = ask(server.client, tensors, codec, model=model, need_weights="true")
    expected = multi_head_attention(weights_of(layer), layer.num_heads, **tensors)
    assert set(answer) == {"output", "weights"}
    assert close(answer["output"], expected[0])
    assert close(answer["weights"], expected[1])


@pytest.mark.parametrize("asked_in", [JSON, SAFETENSORS, NPZ])
@pytest.mark.parametrize("accepted", [JSON, SAFETENSORS, NPZ])
def test_accept_chooses_the_answer(
    server: ServerProcess, seeds_layer: MultiHeadAttention, asked_in: str, accepted: str
) -> None:
    """Any codec in, any codec out; the numbers are the same to the last bit."""
    tensors = drawn(seeds_layer)
    headers = {"Content-Type": asked_in, "Accept": accepted}
    body = WRITE[asked_in](tensors)
    response = server.client.post("/v1/attention?model=attention", content=body, headers=headers)
    assert response.headers["content-type"] == accepted
    np.testing.assert_array_equal(READ[accepted](response.content)["output"], ask(server.client, tensors)["output"])


@pytest.mark.parametrize(
    ("accept", "answered_in"),
    [
        pytest.param("*/*", NPZ, id="anything: as it was asked"),
        pytest.param("application/*", NPZ, id="any application type: as it was asked"),
        pytest.param(f"{JSON};q=0.5, {SAFETENSORS}", SAFETENSORS, id="the preferred one"),
        pytest.param(f"text/html, {JSON};q=0.1", JSON, id="the only one that can be made"),
    ],
)
def test_accept_preferences(
    server: ServerProcess, seeds_layer: MultiHeadAttention, accept: str, answered_in: str
) -> None:
    """Accept is honoured with its wildcards and weights."""
    headers = {"Content-Type": NPZ, "Accept": accept}
    body = to_npz(drawn(seeds_layer))
    response = server.client.post("/v1/attention?model=attention", content=body, headers=headers)
    assert response.headers["content-type"] == answered_in


def test_absent_tensors(server: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
    """Without keys the queries are the keys, without values the keys are, without valid_lens every key counts."""
    queries = drawn(seeds_layer)["queries"]
    full = np.full(len(queries), queries.shape[1])
    explicit = ask(server.client, {"queries": queries, "keys": queries, "values": queries, "valid_lens": full})
    alone = ask(server.client, {"queries": queries})
    np.testing.assert_allclose(alone["output"], explicit["output"], rtol=0, atol=1e-6)
    response = server.client.post(
        "/v1/attention?model=attention",
        json={"queries": queries.tolist(), "keys": None, "values": None, "valid_lens": None},
    )
    np.testing.assert_allclose(np.array(response.json()["output"]), explicit["output"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("torch_dtype", "precision"),
    [
        pytest.param(torch.float16, 2**-11, id="float16"),
        pytest.param(torch.bfloat16, 2**-8, id="bfloat16"),
        pytest.param(torch.float64, 2**-24, id="float64"),
    ],
)
def test_answers_in_the_queries_dtype(
    server: ServerProcess, seeds_layer: MultiHeadAttention, torch_dtype: torch.dtype, precision: float
) -> None:
    """Half, bfloat16 and double queries are answered in their own type, computed in float32."""
    tensors = {name: torch.from_numpy(value) for name, value in drawn(seeds_layer).items()}
    typed = {name: value.to(torch_dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    response = server.client.post(
        "/v1/attention?model=attention", content=safetensors.torch.save(typed), headers={"Content-Type": SAFETENSORS}
    )
    answer = safetensors.torch.load(response.content)["output"]
    assert answer.dtype == torch_dtype
    plain = {
        name: value.to(torch.float64).numpy() if value.is_floating_point() else value.numpy()
        for name, value in typed.items()
    }
    expected, _ = multi_head_attention(weights_of(seeds_layer), seeds_layer.num_heads, **plain)
    # One rounding to the answer's type, and float32's own error over a sum of 100 products.
    scale = np.abs(expected).max()
    assert np.abs(answer.to(torch.float64).numpy() - expected).max() <= scale * (precision + 1e-5)


def test_length_zero_alone_and_under_load(server: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
    """Length 0 gives the mean of the projected values through W_o, alone and with other requests in flight."""
    tensors = drawn(seeds_layer)
    tensors["valid_lens"] = np.zeros(3, np.int64)
    mean = tensors["values"].mean(axis=1, keepdims=True)
    with torch.inference_mode():
        expected = seeds_layer.W_o(seeds_layer.W_v(torch.from_numpy(mean))).expand(-1, 5, -1).numpy()
    assert close(ask(server.client, tensors)["output"], expected)
    others = [drawn(seeds_layer, batch=11, num_kv=53, seed=seed) for seed in range(1, 9)]
    failures: list[str] = []

    def hammer(tensors: Tensors, want: np.ndarray | None) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for _ in range(20):
                got = ask(client, tensors)["output"]
                if want is not None and not close(got, want):
                    failures.append("an answer changed under load")

    threads = [threading.Thread(target=hammer, args=(tensors, expected)) for _ in range(2)]
    threads += [threading.Thread(target=hammer, args=(other, None)) for other in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_concurrent_answers_are_their_own(server: ServerProcess, odd_layer: MultiHeadAttention) -> None:
    """Of many requests at once, each gets the answer to its own tensors."""
    jobs = [
        drawn(odd_layer, batch=1 + seed % 3, num_queries=2 + seed % 5, num_kv=3 + seed, seed=seed) for seed in range(24)
    ]
    answers: list[np.ndarray | None] = [None] * len(jobs)

    def run(start: int) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for index in range(start, len(jobs), 6):
                answers[index] = ask(client, jobs[index], model="odd")["output"]

    threads = [threading.Thread(target=run, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tensors, answer in zip(jobs, answers, strict=True):
        expected, _ = multi_head_attention(weights_of(odd_layer), odd_layer.num_heads, **tensors)
        assert answer is not None
        assert close(answer, expected)


@pytest.mark.parametrize("path", ["/health/live", "/v1/models", "/docs"])
def test_head(server: ServerProcess, path: str) -> None:
    """HEAD is answered as GET is, without the body."""
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))


class TestHeaders:
    def test_server_timing(self, server: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
        """Server-Timing has the four stages, each in milliseconds."""
        body = safetensors.numpy.save(drawn(seeds_layer))
        response = server.client.post(
            "/v1/attention?model=attention", content=body, headers={"Content-Type": SAFETENSORS}
        )
        stages = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
        assert list(stages) == ["decode", "queue", "compute", "encode"]
        assert all(float(duration) >= 0 for duration in stages.values())

    def test_who_answered(self, server: ServerProcess, odd_layer: MultiHeadAttention) -> None:
        """The answer names the model and version that made it."""
        body = safetensors.numpy.save(drawn(odd_layer))
        response = server.client.post(
            "/v1/attention?model=odd&version=1", content=body, headers={"Content-Type": SAFETENSORS}
        )
        assert (response.headers["mha-model"], response.headers["mha-version"]) == ("odd", "1")

    @pytest.mark.parametrize(
        ("sent", "kept"),
        [
            pytest.param("job-17.3:a_B", True, id="a good id is kept"),
            pytest.param("a" * 128, True, id="128 characters are kept"),
            pytest.param("a" * 129, False, id="129 are not"),
            pytest.param("two words", False, id="no spaces"),
            pytest.param('"},{"x":1', False, id="nothing that could forge a log line"),
        ],
    )
    def test_request_id(self, server: ServerProcess, sent: str, kept: bool) -> None:
        """A client's request id comes back if it is a plain one, else a new one is made."""
        response = server.client.get("/health/live", headers={"X-Request-Id": sent})
        assert (response.headers["x-request-id"] == sent) == kept
        assert len(response.headers["x-request-id"]) >= 32 or kept

"""Weights of some heads, or averaged over heads, on every protocol, held against the oracle's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.e2e.test_natural_endpoint import JSON, NPZ, SAFETENSORS, Tensors, ask, close, drawn
from tests.oracle import multi_head_attention
from tests.served import ServerProcess, serving

# What is asked for, and what it is of the weights (B, H, Q, K) of all heads.
WANTED: dict[str, tuple[dict[str, str], Any]] = {
    "mean": ({"need_weights": "mean"}, lambda weights: weights.mean(axis=1)),
    "heads": ({"heads": "3,0"}, lambda weights: weights[:, [3, 0]]),
    "one head": ({"need_weights": "true", "heads": "2"}, lambda weights: weights[:, [2]]),
    "mean of heads": ({"need_weights": "mean", "heads": "1,4"}, lambda weights: weights[:, [1, 4]].mean(axis=1)),
}
wanted = pytest.mark.parametrize(("asked", "taken"), WANTED.values(), ids=WANTED)


@pytest.fixture(scope="module")
def tensors(seeds_layer: MultiHeadAttention) -> Tensors:
    """Three entries of unlike lengths, 0 among them."""
    return drawn(seeds_layer)


@pytest.fixture(scope="module")
def expected(seeds_layer: MultiHeadAttention, tensors: Tensors) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's output, and the weights of all heads."""
    return multi_head_attention(weights_of(seeds_layer), seeds_layer.num_heads, **tensors)


@wanted
@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
def test_natural_endpoint(
    server: ServerProcess, tensors: Tensors, expected: tuple[np.ndarray, np.ndarray], codec: str, asked: Any, taken: Any
) -> None:
    """Every codec carries what was asked for; the output is what it always is."""
    answer = ask(server.client, tensors, codec, **asked)
    assert close(answer["output"], expected[0])
    assert close(answer["weights"], taken(expected[1]))


@wanted
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "JSON"])
@pytest.mark.parametrize("named", [True, False], ids=["outputs named", "none named"])
def test_open_inference_protocol(
    server: ServerProcess, tensors: Tensors, expected: tuple[np.ndarray, np.ndarray], binary: bool, named: bool,
    asked: Any, taken: Any,
) -> None:  # fmt: skip
    """The same parameters, by the protocol's own client, whether outputs are named or not."""
    inputs = []
    for name, values in tensors.items():
        inputs.append(
            tritonclient.http.InferInput(name, list(values.shape), "INT64" if name == "valid_lens" else "FP32")
        )
        inputs[-1].set_data_from_numpy(values, binary_data=binary)
    outputs = [tritonclient.http.InferRequestedOutput(name, binary) for name in ("weights", "output")]
    client = tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"))
    answer = client.infer("attention", inputs, outputs=outputs if named else None, parameters=asked)
    client.close()
    assert close(answer.as_numpy("output"), expected[0])
    assert close(answer.as_numpy("weights"), taken(expected[1]))


@pytest.mark.parametrize(
    ("parameters", "outputs", "said"),
    [
        ({"heads": "7"}, None, "heads: got 7, want 0 to 4"),
        ({"heads": [0, 3]}, None, 'heads: want text such as "0,3", or one number, got a list'),
        ({"heads": True}, None, "heads: want text"),
        ({"need_weights": 1.5}, None, "need_weights: want true, false"),
        ({"need_weights": "none"}, None, "need_weights: got 'none'"),
        ({"need_weights": "mean"}, ["output"], "weights are not among the outputs"),
        ({"need_weights": False, "heads": 1}, None, "heads: got '1' beside need_weights=False"),
    ],
)
def test_parameters_of_the_protocol_that_mean_nothing(
    server: ServerProcess, parameters: dict[str, Any], outputs: list[str] | None, said: str
) -> None:
    """Refused with what is wrong; a parameter may be of any JSON type there."""
    queries = {"name": "queries", "shape": [1, 2, 100], "datatype": "FP32", "data": [0.5] * 200}
    body = {"inputs": [queries], "parameters": parameters}
    if outputs is not None:
        body["outputs"] = [{"name": name} for name in outputs]
    refused = server.client.post("/v2/models/attention/infer", json=body)
    assert refused.status_code == 400, refused.text
    assert said in refused.json()["error"]


def test_true_and_one_number_are_parameters_of_the_protocol(server: ServerProcess) -> None:
    """JSON has truth and numbers, so that nobody need write them as text."""
    queries = {"name": "queries", "shape": [1, 2, 100], "datatype": "FP32", "data": [0.5] * 200}
    for parameters, shape in (({"need_weights": True}, [1, 5, 2, 2]), ({"heads": 4}, [1, 1, 2, 2])):
        answer = server.client.post("/v2/models/attention/infer", json={"inputs": [queries], "parameters": parameters})
        assert {one["name"]: one["shape"] for one in answer.json()["outputs"]}["weights"] == shape


@wanted
def test_packed(
    server: ServerProcess, tensors: Tensors, expected: tuple[np.ndarray, np.ndarray], asked: Any, taken: Any
) -> None:
    """Entries of unequal length: beyond each entry's own queries and keys there are zeros."""
    query_lens, key_lens = [5, 2, 3], [4, 7, 1]
    packed = {
        "queries": np.concatenate([one[:length] for one, length in zip(tensors["queries"], query_lens, strict=True)]),
        "query_lens": np.array(query_lens),
        "keys": np.concatenate([one[:length] for one, length in zip(tensors["keys"], key_lens, strict=True)]),
        "values": np.concatenate([one[:length] for one, length in zip(tensors["values"], key_lens, strict=True)]),
        "valid_lens": np.array(key_lens),
    }
    weights = ask(server.client, packed, need_weights="true")["weights"]
    assert close(ask(server.client, packed, **asked)["weights"], taken(weights))
    assert (taken(weights)[1, ..., 2:, :] == 0).all()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, seeds_repository: Path) -> Iterator[ServerProcess]:
    """A server whose calls hold 1 MiB of scores, and whose answers are of at most 2 MiB."""
    flags = ("--workspace-bytes", str(2**20), "--max-answer-bytes", str(2**21))
    with serving(tmp_path_factory.mktemp("narrow") / "log", "--models", str(seeds_repository), *flags) as process:
        yield process


class TestMemory:
    """512 queries and keys: 5.2 MB of weights, of which one head's are 1 MB; and scores beyond one call's room."""

    def test_less_of_them_fits_where_all_do_not(self, narrow: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
        """The limit is of what is answered; the call is made in tiles, and equals that of a server with room."""
        tensors = {"queries": drawn(seeds_layer, 1, 512, 1, seed=5)["queries"], "valid_lens": np.array([500])}
        with pytest.raises(AssertionError, match="answer_too_large"):
            ask(narrow.client, tensors, need_weights="true")
        _, weights = multi_head_attention(
            weights_of(seeds_layer),
            5,
            tensors["queries"][:, :8],
            tensors["queries"],
            tensors["queries"],
            np.array([500]),
        )
        mean = ask(narrow.client, tensors, need_weights="mean")["weights"]
        assert mean.shape == (1, 512, 512)
        assert close(mean[:, :8], weights.mean(axis=1))
        np.testing.assert_allclose(mean.sum(axis=-1), 1, rtol=1e-5)
        assert close(ask(narrow.client, tensors, heads="4")["weights"][:, :, :8], weights[:, [4]])


def test_the_page_of_parameters_names_them(server: ServerProcess) -> None:
    """OpenAPI says what may be asked for."""
    operation = httpx.get(f"{server.url}/openapi.json").json()["paths"]["/v1/attention"]["post"]
    names = {parameter["name"]: parameter["schema"] for parameter in operation["parameters"]}
    assert "mean" in json.dumps(names["need_weights"])
    assert "heads" in names

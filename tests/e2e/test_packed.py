"""Entries of unequal length without padding, through a real server and every codec, against the oracle."""

import io
import json
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.e2e.test_natural_endpoint import JSON, NPZ, SAFETENSORS, close
from tests.oracle import multi_head_attention
from tests.served import ServerProcess

Array = np.ndarray[Any, Any]

QUERY_LENS, KEY_LENS = [3, 1, 5], [7, 2, 11]


class Entries:
    """Three entries of a layer's sizes, each of a length of its own."""

    def __init__(self, layer: MultiHeadAttention, key_lens: list[int] = KEY_LENS) -> None:
        rng = np.random.default_rng(61)
        sizes = (layer.W_q.in_features, layer.W_k.in_features, layer.W_v.in_features)
        self.queries = [rng.standard_normal((length, sizes[0]), np.float32) for length in QUERY_LENS]
        self.keys = [rng.standard_normal((length, sizes[1]), np.float32) for length in key_lens]
        self.values = [rng.standard_normal((length, sizes[2]), np.float32) for length in key_lens]
        self._layer = layer

    def packed(self) -> dict[str, Array]:
        """One after the other."""
        return {
            "queries": np.concatenate(self.queries),
            "query_lens": np.array([len(entry) for entry in self.queries], np.int32),
            "keys": np.concatenate(self.keys),
            "values": np.concatenate(self.values),
            "valid_lens": np.array([len(entry) for entry in self.keys]),
        }

    def ragged(self) -> dict[str, list[Any]]:
        """As lists of different lengths."""
        tensors = {"queries": self.queries, "keys": self.keys, "values": self.values}
        return {name: [entry.tolist() for entry in entries] for name, entries in tensors.items()}

    def expected(self, valid_lens: list[int] | None = None) -> tuple[list[Array], list[Array]]:
        """Output and weights of each entry by itself."""
        parameters, num_heads = weights_of(self._layer), self._layer.num_heads
        lens = [len(entry) for entry in self.keys] if valid_lens is None else valid_lens
        answers = [
            multi_head_attention(parameters, num_heads, q[None], k[None], v[None], np.array([n]))
            for q, k, v, n in zip(self.queries, self.keys, self.values, lens, strict=True)
        ]
        return [output[0] for output, _ in answers], [weights[0] for _, weights in answers]


def post(server: ServerProcess, body: bytes, codec: str, accept: str = "", **params: str) -> httpx.Response:
    """The answer, which has to be one."""
    headers = {"Content-Type": codec, "Accept": accept or codec}
    response = server.client.post("/v1/attention", params={"model": "odd", **params}, content=body, headers=headers)
    assert response.status_code == 200, response.text
    return response


def npz(tensors: dict[str, Array]) -> bytes:
    """As numpy writes it."""
    file = io.BytesIO()
    np.savez(file, **tensors)  # type: ignore[arg-type]
    return file.getvalue()


class TestPacked:
    @pytest.mark.parametrize("codec", [SAFETENSORS, NPZ])
    def test_comes_back_packed(self, server: ServerProcess, odd_layer: MultiHeadAttention, codec: str) -> None:
        """The output is one row a query, equal to what each entry gives by itself."""
        entries = Entries(odd_layer)
        write = {SAFETENSORS: safetensors.numpy.save, NPZ: npz}[codec]
        content = post(server, write(entries.packed()), codec).content
        answer = safetensors.numpy.load(content) if codec == SAFETENSORS else dict(np.load(io.BytesIO(content)))
        assert set(answer) == {"output"}
        assert close(answer["output"], np.concatenate(entries.expected()[0]))

    def test_is_answered_in_json_entry_by_entry(self, server: ServerProcess, odd_layer: MultiHeadAttention) -> None:
        """A client that accepts JSON gets a list for each entry."""
        entries = Entries(odd_layer)
        output = post(server, safetensors.numpy.save(entries.packed()), SAFETENSORS, JSON).json()["output"]
        assert [len(entry) for entry in output] == QUERY_LENS
        for got, want in zip(output, entries.expected()[0], strict=True):
            assert close(np.array(got, np.float32), want)

    def test_weights_are_padded(self, server: ServerProcess, odd_layer: MultiHeadAttention) -> None:
        """Weights have the longest number of queries and keys, 0 beyond each entry's own."""
        entries = Entries(odd_layer)
        content = post(server, safetensors.numpy.save(entries.packed()), SAFETENSORS, need_weights="true").content
        weights = safetensors.numpy.load(content)["weights"]
        assert weights.shape == (3, odd_layer.num_heads, max(QUERY_LENS), max(KEY_LENS))
        for got, want in zip(weights, entries.expected()[1], strict=True):
            assert close(got[:, : want.shape[1], : want.shape[2]], want)
            assert got.sum() == pytest.approx(want.sum(), rel=1e-5)

    def test_keys_alone(self, server: ServerProcess, odd_layer: MultiHeadAttention) -> None:
        """Padded queries with packed keys get a padded output."""
        entries = Entries(odd_layer)
        entries.queries = [entries.queries[2]] * 3
        packed = entries.packed() | {"queries": np.stack(entries.queries)}
        del packed["query_lens"]
        answer = safetensors.numpy.load(post(server, safetensors.numpy.save(packed), SAFETENSORS).content)
        assert close(answer["output"], np.stack(entries.expected()[0]))

    def test_computes_no_padding(self, lone_server: ServerProcess, seeds_layer: MultiHeadAttention) -> None:
        """The metrics of packed self-attention of very unequal entries tell that hardly more than it was computed."""
        lens = np.array([97, 1, 3, 89, 2])
        tensors = {"queries": np.ones((int(lens.sum()), seeds_layer.W_q.in_features), np.float32), "query_lens": lens}
        before = _counts(lone_server)
        response = lone_server.client.post(
            "/v1/attention", content=safetensors.numpy.save(tensors), headers={"Content-Type": SAFETENSORS}
        )
        assert safetensors.numpy.load(response.content)["output"].shape == (lens.sum(), 100)
        gained = {name: count - before[name] for name, count in _counts(lone_server).items()}
        for tokens in ("keys", "queries"):
            assert gained[f'mha_{tokens}_total{{kind="valid"}}'] == lens.sum()
            assert lens.sum() <= gained[f'mha_{tokens}_total{{kind="computed"}}'] <= 97 * len(lens)
        assert gained['mha_keys_total{kind="received"}'] == lens.sum()


class TestRagged:
    @pytest.mark.parametrize(
        "valid_lens", [pytest.param(None, id="absent"), pytest.param([7, 0, 4], id="shorter_and_0")]
    )
    def test_lists_of_different_lengths(
        self, server: ServerProcess, odd_layer: MultiHeadAttention, valid_lens: list[int] | None
    ) -> None:
        """Entries may differ in JSON; lengths follow from them or are shorter, and 0 averages an entry's own keys."""
        entries = Entries(odd_layer)
        document = entries.ragged() | {"valid_lens": valid_lens}
        output = post(server, json.dumps(document).encode(), JSON).json()["output"]
        assert [len(entry) for entry in output] == QUERY_LENS
        for got, want in zip(output, entries.expected(valid_lens)[0], strict=True):
            assert close(np.array(got, np.float32), want)

    def test_is_answered_in_binary_as_packed(self, server: ServerProcess, odd_layer: MultiHeadAttention) -> None:
        """A client that accepts safetensors gets one row a query."""
        entries = Entries(odd_layer)
        content = post(server, json.dumps(entries.ragged()).encode(), JSON, SAFETENSORS).content
        assert close(safetensors.numpy.load(content)["output"], np.concatenate(entries.expected()[0]))


def _counts(server: ServerProcess) -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    wanted = [line.rsplit(" ", 1) for line in lines if line.startswith(("mha_keys_total", "mha_queries_total"))]
    return {name: float(value) for name, value in wanted}

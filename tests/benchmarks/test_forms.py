"""The bytes that are sent to the peers hold what is sent to the service."""

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import load

from benchmarks.peers.forms import CODECS
from benchmarks.peers.limit import feeds
from benchmarks.peers.servers.wire import from_lists, unpack
from benchmarks.peers.workloads import WORKLOADS, Tensors, Workload, dense, ragged, ragged_to_longest


@pytest.fixture
def row() -> Tensors:
    return dense(3, 5)(np.random.default_rng(0))


@pytest.fixture
def rows() -> Tensors:
    return ragged_to_longest(np.random.default_rng(0))


def assert_same(feed: dict[str, np.ndarray], tensors: Tensors) -> None:
    (want,) = feeds([tensors])
    assert feed.keys() == want.keys()
    for name, tensor in want.items():
        np.testing.assert_array_equal(feed[name], tensor)


def test_raw_holds_dense_tensors(row: Tensors) -> None:
    """A peer unpacks the tensors that were packed; where no length is sent, all keys count."""
    assert_same(unpack(CODECS["raw"].encode(row)), row)


def test_raw_holds_lengths(rows: Tensors) -> None:
    """Lengths of rows arrive, once for each query."""
    assert_same(unpack(CODECS["raw"].encode(rows)), rows)


def test_json_holds_float32(row: Tensors) -> None:
    """JSON's decimals give the same float32 back."""
    assert_same(from_lists(orjson.loads(CODECS["json"].encode(row))), row)


def test_oip_json_is_flat_and_shaped(row: Tensors) -> None:
    """The Open Inference Protocol's tensors are flat lists with their shape."""
    document: Any = orjson.loads(CODECS["oip-json"].encode(row))
    for tensor in document["inputs"]:
        np.testing.assert_array_equal(np.float32(tensor["data"]).reshape(tensor["shape"]), row[tensor["name"]])


def test_packed_drops_exactly_the_padding(rows: Tensors) -> None:
    """Packed keys and values are those of every row within its length, one row after the other."""
    packed = load(CODECS["packed"].encode(rows))
    for name in ("keys", "values"):
        want = np.concatenate([row[:length] for row, length in zip(rows[name], rows["valid_lens"], strict=True)])
        np.testing.assert_array_equal(packed[name], want)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b'{"output": [[1.5, 2.5]]}', id="by_name"),
        pytest.param(b"[[1.5, 2.5]]", id="bare"),
        pytest.param(b'{"outputs": [{"name": "output", "data": [1.5, 2.5]}]}', id="open_inference_protocol"),
    ],
)
def test_json_answers_of_every_peer_are_read(answer: bytes) -> None:
    """Whatever a peer wraps its numbers in, the numbers are compared."""
    np.testing.assert_array_equal(CODECS["json"].decode(answer).ravel(), np.float32([1.5, 2.5]))


@pytest.mark.parametrize("workload", WORKLOADS, ids=[one.name for one in WORKLOADS])
def test_requests_are_distinct_and_the_same_each_time(workload: Workload) -> None:
    """Bodies differ from each other, so that no cache can answer, and two runs send the same ones."""
    few = replace(workload, num_bodies=2)
    one, other = few.requests(), few.requests()
    assert not np.array_equal(one[0]["queries"], one[1]["queries"])
    np.testing.assert_array_equal(one[1]["queries"], other[1]["queries"])


def test_ragged_lengths_have_the_mean_that_is_claimed() -> None:
    """Lengths are within 1 to 256, and 28 on average."""
    rng = np.random.default_rng(1)
    lengths = np.concatenate([ragged(rng)["valid_lens"] for _ in range(200)])
    assert 1 <= lengths.min() <= lengths.max() <= 256
    assert lengths.mean() == pytest.approx(28, rel=0.1)

"""Bodies in every protocol: other libraries read from them what was written, with the mark of each time."""

import io
import json
import struct
from collections.abc import Callable

import numpy as np
import orjson
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from loadtest.errors import LoadTestError
from loadtest.protocols import PROTOCOLS, Protocol, read_output, write
from loadtest.tensors import mark

TENSORS = {
    "queries": np.random.default_rng(1).standard_normal((2, 3, 5), np.float32),
    "keys": np.random.default_rng(2).standard_normal((2, 7, 5), np.float32),
    "valid_lens": np.array([3, 7]),
}
Tensors = dict[str, NDArray[np.float32]]


def from_json(content: bytes) -> Tensors:
    """With Python's own reader."""
    return {name: np.array(one, np.float32) for name, one in json.loads(content).items()}


def from_npz(content: bytes) -> Tensors:
    """With numpy, whose zipfile checks the checksums."""
    return dict(np.load(io.BytesIO(content)))


def from_oip_json(content: bytes) -> Tensors:
    """As the protocol's text has it."""
    return {
        one["name"]: np.array(one["data"], np.float32).reshape(one["shape"]) for one in json.loads(content)["inputs"]
    }


def from_oip_binary(content: bytes) -> Tensors:
    """Header first, then the tensors behind each other."""
    header, _ = json.JSONDecoder().raw_decode(content.decode("latin-1"))
    offset = len(orjson.dumps(header))
    tensors = {}
    for one in header["inputs"]:
        size = one["parameters"]["binary_data_size"]
        dtype = {"FP32": "<f4", "INT64": "<i8"}[one["datatype"]]
        tensors[one["name"]] = np.frombuffer(content[offset : offset + size], dtype).reshape(one["shape"])
        offset += size
    assert offset == len(content)
    return tensors


READERS: dict[Protocol, Callable[[bytes], Tensors]] = {
    "json": from_json,
    "safetensors": safetensors.numpy.load,
    "npz": from_npz,
    "oip-json": from_oip_json,
    "oip-binary": from_oip_binary,
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("number", [0, 1, 999_998, 12_345_678], ids=str)
def test_body_holds_the_tensors_and_its_mark(protocol: Protocol, number: int) -> None:
    """All is as it was given, but for the last element of the queries, which tells one sending from another."""
    read = READERS[protocol](bytes(write(protocol, TENSORS).fresh(number)))
    assert read["queries"].flat[-1] == np.float32(mark(number))
    assert read["queries"].ravel()[:-1] == pytest.approx(TENSORS["queries"].ravel()[:-1], rel=1e-7)
    assert (read["keys"] == TENSORS["keys"]).all()
    assert (read["valid_lens"] == TENSORS["valid_lens"]).all()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_two_are_alike(protocol: Protocol) -> None:
    """A thousand sendings of one body are a thousand bodies of the same length."""
    body = write(protocol, TENSORS)
    sent = {bytes(body.fresh(number)) for number in range(1000)}
    assert len(sent) == 1000
    assert {len(one) for one in sent} == {len(body.content)}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_one_number_alone(protocol: Protocol) -> None:
    """The smallest queries there are have their mark, too."""
    body = write(protocol, {"queries": np.ones((1, 1, 1), np.float32)})
    assert READERS[protocol](bytes(body.fresh(41)))["queries"].ravel() == pytest.approx([42e-6])


OUTPUT = np.arange(6, dtype=np.float32).reshape(1, 2, 3)


def binary_answer() -> tuple[dict[str, str], bytes]:
    """Weights before the output, so that offsets matter."""
    outputs = [
        {"name": "weights", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
        {"name": "output", "shape": [1, 2, 3], "datatype": "FP32", "parameters": {"binary_data_size": 24}},
    ]
    header = orjson.dumps({"outputs": outputs})
    return {"inference-header-content-length": str(len(header))}, header + struct.pack("<2f", 7, 8) + OUTPUT.tobytes()


def npz_answer() -> bytes:
    """As numpy writes it."""
    file = io.BytesIO()
    np.savez(file, output=OUTPUT)
    return file.getvalue()


ANSWERS: dict[Protocol, tuple[dict[str, str], bytes]] = {
    "json": ({}, orjson.dumps({"output": OUTPUT.tolist()})),
    "safetensors": ({}, safetensors.numpy.save({"output": OUTPUT})),
    "npz": ({}, npz_answer()),
    "oip-json": (
        {},
        orjson.dumps({"outputs": [{"name": "output", "shape": [1, 2, 3], "data": OUTPUT.ravel().tolist()}]}),
    ),
    "oip-binary": binary_answer(),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_output_is_read(protocol: Protocol) -> None:
    """Of the shape and with the numbers that the answer has."""
    output = read_output(protocol, *ANSWERS[protocol])
    assert output.shape == (1, 2, 3)
    assert (output == OUTPUT).all()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("content", [b"", b"garbage", b"{}"], ids=["nothing", "garbage", "no_output"])
def test_answer_that_is_none(protocol: Protocol, content: bytes) -> None:
    """Is said to be none, and does not end the test."""
    with pytest.raises(LoadTestError, match=f"not one of {protocol}"):
        read_output(protocol, {}, content)

"""The Open Inference Protocol's bodies, written and read here by hand: json, struct-free bytes, and nothing of ours."""

import contextlib
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from service.codec.oip import InferRequest, decode_request, encode_response
from service.errors import InvalidDtype, InvalidParameter, InvalidShape, MalformedBody, ServiceError
from service.tensors import AttentionOutput, WireTensors

DTYPES = {
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "UINT8": np.dtype(np.uint8),
}
IN_JSON = ("FP32", "FP64", "INT32", "INT64", "UINT8")

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5)


@st.composite
def tensors(draw: st.DrawFn, datatype: str) -> np.ndarray:
    """A tensor of that datatype, any finite value; binary also nan and infinities."""
    dtype = DTYPES[datatype]
    if datatype == "BF16":
        bits = draw(hnp.arrays(np.uint16, draw(SHAPES)))
        return bits.view(ml_dtypes.bfloat16)
    elements = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else None
    return draw(hnp.arrays(dtype, draw(SHAPES), elements=elements))


@st.composite
def inputs(draw: st.DrawFn) -> list[tuple[str, str, np.ndarray, str]]:
    """One to four inputs: name, datatype, values, and how each is sent: binary, flat or nested."""
    names = draw(st.lists(st.sampled_from(["queries", "keys", "values", "valid_lens"]), min_size=1, unique=True))
    drawn = []
    for name in names:
        datatype = draw(st.sampled_from(sorted(DTYPES)))
        ways = ["binary", "flat", "nested"] if datatype in IN_JSON else ["binary"]
        drawn.append((name, datatype, draw(tensors(datatype)), draw(st.sampled_from(ways))))
    return drawn


def body_of(sent: list[tuple[str, str, np.ndarray, str]], **fields: Any) -> tuple[bytes, int]:
    """A request body as a client writes it, and the length of its header."""
    entries, data = [], b""
    for name, datatype, values, way in sent:
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(values.shape)}
        if way == "binary":
            entry["parameters"] = {"binary_data_size": values.nbytes}
            data += values.tobytes()
        else:
            entry["data"] = (values.reshape(-1) if way == "flat" else values).tolist()
        entries.append(entry)
    header = json.dumps({"inputs": entries, **fields}).encode()
    return header + data, len(header)


@settings(max_examples=150, deadline=None)
@given(sent=inputs(), identifier=st.none() | st.text(max_size=20))
def test_any_mix_arrives_bit_for_bit(sent: list[tuple[str, str, np.ndarray, str]], identifier: str | None) -> None:
    """Tensors in any mix of binary, flat and nested JSON arrive with their shape and every bit."""
    body, length = body_of(sent, **({} if identifier is None else {"id": identifier}))
    request = decode_request(body, length)
    assert request.id == identifier
    assert set(request.tensors.tensors) == {name for name, *_ in sent}
    for name, _, values, way in sent:
        got = request.tensors.tensors[name]
        assert got.shape == values.shape
        if way == "binary":
            assert got.dtype == values.dtype
            assert got.tobytes() == values.tobytes()
        else:
            np.testing.assert_array_equal(got.astype(values.dtype), values)


@settings(max_examples=100, deadline=None)
@given(
    output=hnp.arrays(np.float32, (2, 3, 5), elements={"allow_nan": False, "allow_infinity": False}),
    weights=st.none() | hnp.arrays(np.float32, (2, 1, 3, 7), elements={"min_value": 0, "max_value": 1}),
    datatype=st.sampled_from(["FP16", "BF16", "FP32", "FP64"]),
    binary=st.fixed_dictionaries({"output": st.booleans(), "weights": st.booleans()}),
    identifier=st.none() | st.text(max_size=20),
)
def test_any_mix_leaves_bit_for_bit(
    output: np.ndarray, weights: np.ndarray | None, datatype: str, binary: dict[str, bool], identifier: str | None
) -> None:
    """Answers in any mix of binary and JSON are read back with every bit; half precision has no JSON."""
    if datatype in ("FP16", "BF16"):
        binary = {"output": True, "weights": True}
    if weights is None:
        binary = {"output": binary["output"]}
    output = output / max(1.0, float(np.abs(output).max()))  # fits every dtype
    answer = AttentionOutput.cast(output, weights, DTYPES[datatype])
    request = InferRequest(identifier, WireTensors({}), binary, None, None)
    response = encode_response("layer", 3, request, answer)
    body = b"".join(response.chunks)
    header = json.loads(body[: response.header_length])
    assert (header["model_name"], header["model_version"]) == ("layer", "3")
    assert header.get("id") == identifier
    offset = response.header_length
    for entry in header["outputs"]:
        want = answer.named()[entry["name"]]
        assert (entry["datatype"], entry["shape"]) == (datatype, list(want.shape))
        if binary[entry["name"]]:
            assert entry["parameters"] == {"binary_data_size": want.nbytes}
            assert offset is not None
            got = np.frombuffer(body[offset : offset + want.nbytes], want.dtype)
            offset += want.nbytes
        else:
            assert "parameters" not in entry  # the C++ client takes any for a binary size
            got = np.array(entry["data"], want.dtype)
        assert got.reshape(want.shape).tobytes() == want.tobytes()
    assert offset is None or offset == len(body)


def test_binary_is_not_copied() -> None:
    """A binary tensor is a view of the body, and a binary answer is the output's own memory."""
    values = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    body, length = body_of([("queries", "FP32", values, "binary")])
    got = decode_request(body, length).tensors.tensors["queries"]
    assert np.shares_memory(got, np.frombuffer(body, np.uint8))
    request = InferRequest(None, WireTensors({}), {"output": True}, None, None)
    response = encode_response("layer", 1, request, AttentionOutput.cast(values, None, np.dtype(np.float32)))
    assert np.shares_memory(np.frombuffer(response.chunks[1], np.uint8), values)


@pytest.mark.parametrize(
    ("fields", "outputs"),
    [
        pytest.param({}, {"output": False}, id="none named: the output, as JSON"),
        pytest.param({"outputs": []}, {"output": False}, id="an empty list is as none"),
        pytest.param({"outputs": None}, {"output": False}, id="null is as none"),
        pytest.param({"parameters": {"binary_data_output": True}}, {"output": True}, id="none named, binary"),
        pytest.param({"outputs": [{"name": "weights"}]}, {"weights": False}, id="weights alone"),
        pytest.param(
            {
                "parameters": {"binary_data_output": True},
                "outputs": [{"name": "output", "parameters": {"binary_data": False}}, {"name": "weights"}],
            },
            {"output": False, "weights": True},
            id="an output's own wish wins",
        ),
    ],
)
def test_outputs(fields: dict[str, Any], outputs: dict[str, bool]) -> None:
    """What is asked for, and in which form."""
    body, length = body_of([("queries", "FP32", np.zeros((1, 1, 1), np.float32), "flat")], **fields)
    assert decode_request(body, length).outputs == outputs


def test_header_length_of_pure_json() -> None:
    """The header may be stated also where all of the body is JSON, as the C++ client does, or left out."""
    body, length = body_of([("queries", "FP32", np.ones((1, 1, 2), np.float32), "flat")])
    for stated in (None, length):
        np.testing.assert_array_equal(decode_request(body, stated).tensors.tensors["queries"], np.ones((1, 1, 2)))


def test_strings_may_hold_brackets() -> None:
    """An id or a parameter with brackets in it is no nested list."""
    body, length = body_of(
        [("queries", "FP32", np.ones((1, 2, 2), np.float32), "nested")], id="[[a]", parameters={"note": "[[["}
    )
    assert decode_request(body, length).id == "[[a]"


GOOD = {"name": "queries", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}


def with_input(**fields: Any) -> dict[str, Any]:
    entry = {name: value for name, value in {**GOOD, **fields}.items() if value is not ...}
    return {"inputs": [entry]}


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        pytest.param([], MalformedBody, "want a JSON object", id="a list"),
        pytest.param({}, MalformedBody, "want a list of tensors, got nothing", id="no inputs"),
        pytest.param({"inputs": {}}, MalformedBody, "want a list of tensors, got an object", id="inputs object"),
        pytest.param({"inputs": [1]}, MalformedBody, r"inputs\[0\]: want an object, got 1", id="input no object"),
        pytest.param({"inputs": [GOOD], "model": "x"}, MalformedBody, "unknown field 'model'", id="unknown field"),
        pytest.param({"inputs": [GOOD], "id": 7}, MalformedBody, "id: want a string, got 7", id="numeric id"),
        pytest.param(with_input(name=...), MalformedBody, r"name: want a string, got nothing", id="no name"),
        pytest.param({"inputs": [GOOD, GOOD]}, MalformedBody, "'queries' is given twice", id="twice"),
        pytest.param(with_input(datatype="FLOAT"), InvalidDtype, "datatype is 'FLOAT'", id="unknown datatype"),
        pytest.param(with_input(datatype="BYTES"), InvalidDtype, "datatype is 'BYTES'", id="BYTES"),
        pytest.param(with_input(datatype="FP16"), InvalidDtype, "FP16 exists only as binary", id="FP16 in JSON"),
        pytest.param(with_input(datatype="BF16"), InvalidDtype, "BF16 exists only as binary", id="BF16 in JSON"),
        pytest.param(with_input(datatype="INT64"), None, "", id="integers are read"),
        pytest.param(with_input(datatype="INT64", data=[1, 2.5]), InvalidDtype, "want integers, got 2.5", id="2.5"),
        pytest.param(with_input(data=[1, True]), InvalidDtype, "queries: holds a string, boolean", id="boolean"),
        pytest.param(with_input(data=..., shape=[0, 2**62], parameters={"binary_data_size": 0}), MalformedBody,
                     "larger than any array", id="a giant empty shape"),
        pytest.param(with_input(name="mask"), MalformedBody, "unknown tensor 'mask'", id="unknown input"),
        pytest.param({"inputs": [GOOD], "parameters": {str(n): n for n in range(65)}}, MalformedBody,
                     "more than 64 fields", id="many parameters"),
        pytest.param(with_input(data=["1", "2"]), InvalidDtype, "queries: holds a string", id="strings"),
        pytest.param(with_input(data="AAA="), InvalidDtype, "want nested lists of numbers, got a string", id="string"),
        pytest.param(with_input(shape=...), MalformedBody, "queries: shape: want a list of", id="no shape"),
        pytest.param(with_input(shape=[1, -1, 2]), MalformedBody, "shape: want a list of", id="negative size"),
        pytest.param(with_input(shape=[1, True, 2]), MalformedBody, "shape: want a list of", id="boolean size"),
        pytest.param(with_input(shape=[2**62, 2**62]), InvalidShape, "data has 2 elements", id="giant shape"),
        pytest.param(with_input(shape=[1, 1, 3]), InvalidShape, r"2 elements, shape \[1, 1, 3\] wants 3", id="short"),
        pytest.param(with_input(data=[[1], [2]]), InvalidShape, r"nested as \[2, 1\]", id="nested otherwise"),
        pytest.param(with_input(data=[[[1, 2]]]), None, "", id="nested as the shape"),
        pytest.param(with_input(data=[1, [2]]), InvalidShape, "nested to the same depth", id="mixed depth"),
        pytest.param(with_input(data=...), MalformedBody, "either data or parameters", id="neither"),
        pytest.param(
            with_input(parameters={"binary_data_size": 8}), MalformedBody, "either data or parameters", id="both"
        ),
        pytest.param(
            with_input(data=..., parameters={"binary_data_size": 8}), MalformedBody, "0 bytes are left", id="no bytes"
        ),
        pytest.param(
            with_input(data=..., parameters={"binary_data_size": 9}), InvalidShape, "is 9, shape .* wants 8", id="size"
        ),
        pytest.param(
            with_input(data=..., parameters={"binary_data_size": -8}), InvalidParameter, "0 or more", id="negative"
        ),
        pytest.param(
            with_input(data=..., parameters={"shared_memory_region": "r"}), InvalidParameter, "shared memory", id="shm"
        ),
        pytest.param(
            {"inputs": [GOOD], "outputs": [{"name": "logits"}]}, MalformedBody, "got 'logits', want each", id="output"
        ),
        pytest.param(
            {"inputs": [GOOD], "outputs": [{"name": "output"}] * 2}, MalformedBody, "at most once", id="output twice"
        ),
        pytest.param(
            {"inputs": [GOOD], "outputs": [{"name": "output", "parameters": {"classification": 3}}]},
            InvalidParameter, "classification", id="classification",
        ),
        pytest.param(
            {"inputs": [GOOD], "parameters": {"sequence_id": 5}}, InvalidParameter, "sequences", id="sequence"
        ),
        pytest.param(
            {"inputs": [GOOD], "parameters": {"timeout": "soon"}}, InvalidParameter, "want a number", id="timeout"
        ),
        pytest.param(
            {"inputs": [GOOD], "parameters": {"binary_data_output": 1}}, InvalidParameter, "true or false", id="flag"
        ),
        pytest.param(
            {"inputs": [GOOD], "parameters": {"priority": -1}}, InvalidParameter, "priority: want", id="priority"
        ),
        pytest.param({"inputs": [GOOD], "parameters": {"anything": 1, "sequence_id": 0}}, None, "", id="free"),
    ],
)  # fmt: skip
def test_what_is_refused(request_: Any, error: type[ServiceError] | None, says: str) -> None:
    """Every departure from the protocol is refused with what, where, got and want; nothing else is."""
    body = json.dumps(request_).encode()
    if error is None:
        decode_request(body, None)
        return
    with pytest.raises(error, match=says):
        decode_request(body, None)


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        pytest.param(0, "raw binary request, which only models with one input take", id="raw binary"),
        pytest.param(10_000, "got 10000, the body has", id="beyond the body"),
        pytest.param(5, "not JSON", id="in the middle of the JSON"),
    ],
)
def test_header_length_that_lies(stated: int, says: str) -> None:
    """A header length that cannot be is refused."""
    with pytest.raises(MalformedBody, match=says):
        decode_request(json.dumps({"inputs": [GOOD]}).encode(), stated)


def test_bytes_that_belong_to_nothing() -> None:
    """Bytes behind the last binary tensor are refused."""
    body, length = body_of([("queries", "FP32", np.zeros((1, 1, 2), np.float32), "binary")])
    with pytest.raises(MalformedBody, match="3 bytes behind the header belong to no input"):
        decode_request(body + b"abc", length)


def test_half_precision_answer_as_json() -> None:
    """An FP16 answer that is wanted as JSON is refused, since the protocol has no such thing."""
    answer = AttentionOutput.cast(np.zeros((1, 1, 1), np.float32), None, np.dtype(np.float16))
    with pytest.raises(InvalidDtype, match="FP16 exists only as binary"):
        encode_response("layer", 1, InferRequest(None, WireTensors({}), {"output": False}, None, None), answer)


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=200), stated=st.none() | st.integers(0, 300))
def test_any_bytes(body: bytes, stated: int | None) -> None:
    """No bytes whatever raise anything but a service error."""
    with pytest.raises(ServiceError):
        decode_request(body, stated)


@settings(max_examples=200, deadline=None)
@given(sent=inputs(), data=st.data())
def test_mutated_bodies(sent: list[tuple[str, str, np.ndarray, str]], data: st.DataObject) -> None:
    """A good body with some of its bytes changed is read or refused, and nothing else happens."""
    body, length = body_of(sent)
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ServiceError):
        decode_request(bytes(mutated), length)

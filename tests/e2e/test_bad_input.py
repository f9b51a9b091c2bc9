"""Everything a client can send wrong, as real requests: refused with its code and reason, and the next one is answered.

A table a codec holds the bodies that only this format can get wrong; what any format can say wrong stands in one table
of tensors that every codec carries. A case is: what is sent, how it is refused, and words that its message must have.
The numbers of the statuses are written out here, because they are the contract.
"""

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.e2e.test_natural_endpoint import JSON, NPZ, SAFETENSORS, WRITE, Tensors, ask, close, to_json, to_npz
from tests.oracle import multi_head_attention
from tests.served import ServerProcess

Refusal = tuple[int, str]

MALFORMED: Refusal = (400, "malformed_body")
PARAMETER: Refusal = (400, "invalid_parameter")
UNKNOWN_PATH: Refusal = (404, "not_found")
UNKNOWN_MODEL: Refusal = (404, "model_not_found")
WRONG_METHOD: Refusal = (405, "method_not_allowed")
UNACCEPTABLE: Refusal = (406, "not_acceptable")
TOO_LARGE: Refusal = (413, "body_too_large")
UNSUPPORTED: Refusal = (415, "unsupported_media_type")
SHAPE: Refusal = (422, "invalid_shape")
DTYPE: Refusal = (422, "invalid_dtype")
LENGTH: Refusal = (422, "invalid_valid_lens")
NON_FINITE: Refusal = (422, "non_finite")
OVERFLOW: Refusal = (422, "overflow")
EMPTY: Refusal = (422, "empty_axis")

_RNG = np.random.default_rng(0)
# For the model `odd`: B 2, Q 3, K 5, and no two of its sizes are equal.
GOOD: Tensors = {
    "queries": _RNG.standard_normal((2, 3, 11), np.float32),
    "keys": _RNG.standard_normal((2, 5, 13), np.float32),
    "values": _RNG.standard_normal((2, 5, 17), np.float32),
    "valid_lens": np.array([[1, 3, 2], [5, 4, 1]]),
}
QUERIES, KEYS, VALUES = GOOD["queries"], GOOD["keys"], GOOD["values"]


def table(cases: Mapping[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """The cases by id, as parameters of a test."""
    rows = [pytest.param(sent, refusal, words, id=name) for name, (sent, refusal, *words) in cases.items()]
    return pytest.mark.parametrize(("sent", "refusal", "words"), rows)


def changed(**changes: np.ndarray | None) -> Tensors:
    """The good tensors with some of them replaced, or left out where the change is None."""
    return {name: tensor for name, tensor in {**GOOD, **changes}.items() if tensor is not None}


def poked(name: str, where: tuple[int, int, int], value: float, lens: Any, dtype: Any = np.float32) -> Tensors:
    """The good tensors with these lengths, and one number replaced."""
    tensor = GOOD[name].astype(dtype)
    tensor[where] = value
    return changed(**{name: tensor, "valid_lens": np.array(lens)})


def post(client: httpx.Client, body: bytes, codec: str, query: str = "model=odd", **headers: str) -> httpx.Response:
    """The response to one body."""
    return client.post(f"/v1/attention?{query}", content=body, headers={"Content-Type": codec, **headers})


def check_refused(response: httpx.Response, refusal: Refusal, *words: str) -> None:
    """The status, the one error body, its request id also in the header, and these words in its message."""
    body = response.json()
    assert (response.status_code, body["code"]) == refusal, body
    assert list(body) == ["error", "code", "request_id"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == body["request_id"]
    assert not [word for word in words if word not in body["error"]], body["error"]


@pytest.fixture(scope="module")
def expected(odd_layer: MultiHeadAttention) -> np.ndarray:
    """The oracle's output for the good tensors."""
    output, _ = multi_head_attention(weights_of(odd_layer), odd_layer.num_heads, **GOOD)
    return output


@pytest.fixture
def client(server: ServerProcess, expected: np.ndarray) -> Iterator[httpx.Client]:
    """A client of the real server. Whatever a test sends, the next good request must be answered, and right."""
    yield server.client
    assert close(ask(server.client, GOOD, model="odd")["output"], expected)


# What every format can say wrong.

WRONG_TENSORS = {
    "nothing": ({}, MALFORMED, "queries: missing", "no tensor"),
    "no queries": (changed(queries=None), MALFORMED, "queries: missing", "got "),
    "misspelt tensor": (changed(keys=None, kyes=KEYS), MALFORMED, "'kyes'", "did you mean keys?"),
    "unknown tensor": (changed(zzz=KEYS), MALFORMED, "'zzz'", "want queries, keys, values, valid_lens"),
    "1-D queries": (changed(queries=np.ones(11, np.float32)), SHAPE, "queries", "(11,)", "want 3"),
    "2-D queries": (changed(queries=QUERIES[0]), SHAPE, "queries", "(3, 11)", "want 3"),
    "4-D keys": (changed(keys=KEYS[None]), SHAPE, "keys", "(1, 2, 5, 13)", "want 3"),
    "size of queries": (changed(queries=QUERIES[..., :10]), SHAPE, "queries: last axis is 10, the model expects 11"),
    "size of keys": (changed(keys=KEYS[..., :12]), SHAPE, "keys: last axis is 12, the model expects 13"),
    "size of values": (changed(values=VALUES[..., :16]), SHAPE, "values: last axis is 16, the model expects 17"),
    "absent keys do not fit": (changed(keys=None), SHAPE, "keys (absent, so the queries serve): last axis is 11", "13"),
    "absent values do not fit": (changed(values=None), SHAPE, "values (absent, so the keys serve)", "is 13", "17"),
    "batch of keys": (changed(keys=KEYS[:1]), SHAPE, "keys: batch is 1, queries have 2"),
    "batch of values": (changed(values=VALUES[:1]), SHAPE, "values: batch is 1, queries have 2"),
    "too few values": (changed(values=VALUES[:, :4]), SHAPE, "values: 4 of them, but 5 keys"),
    "too many values": (changed(keys=KEYS[:, :4]), SHAPE, "values: 5 of them, but 4 keys"),
    "one length of many": (changed(valid_lens=np.array([[1, 3, 2], [5, 6, 1]])), LENGTH, "valid_lens[1, 1]", "got 6"),
    "a result beyond float32": (
        {name: np.full_like(GOOD[name], 3e38) for name in ("queries", "keys", "values")}, OVERFLOW, "output", "float32"
    ),
    **{
        f"{name} without {axis}": (changed(**{name: GOOD[name][where]}), EMPTY, name, "at least 1")
        for name in ("queries", "keys", "values")
        for axis, where in (("batch", np.s_[:0]), ("length", np.s_[:, :0]), ("features", np.s_[..., :0]))
    },
    **{
        f"no valid_lens, {shape}": (changed(valid_lens=np.zeros(shape, np.int64)), EMPTY, "valid_lens", "at least 1")
        for shape in ((0,), (2, 0))
    },
    **{
        f"valid_lens {shape}": (changed(valid_lens=np.ones(shape, np.int64)), SHAPE, f"is {shape}", "(2,) or (2, 3)")
        for shape in ((3,), (3, 2), (2, 5), (1, 3), (2, 3, 1))
    },
    **{
        f"length {length}": (changed(valid_lens=np.array([5, length])), LENGTH, "valid_lens[1]", f"{length}", "0 to 5")
        for length in (6, -1, 2**63 - 1, -(2**63))
    },
}  # fmt: skip


@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
@table(WRONG_TENSORS)
def test_tensors(client: httpx.Client, codec: str, sent: Tensors, refusal: Refusal, words: list[str]) -> None:
    """Tensors that mean nothing to the layer are refused in every codec alike, with what, where, got, want."""
    check_refused(post(client, WRITE[codec](sent), codec), refusal, *words)


# What only binary formats can say wrong: types, and numbers that are none.

B_LENS, BQ_LENS = [3, 5], [[1, 3, 2], [5, 4, 1]]

WRONG_BINARY = {
    "int64 queries": (changed(queries=QUERIES.astype(np.int64)), DTYPE, "queries", "int64", "want float16"),
    "uint8 keys": (changed(keys=np.ones((2, 5, 13), np.uint8)), DTYPE, "keys", "uint8", "want float16"),
    "boolean values": (changed(values=np.ones((2, 5, 17), bool)), DTYPE, "values", "bool", "want float16"),
    "float lengths": (changed(valid_lens=np.ones(2, np.float32)), DTYPE, "valid_lens", "float32", "want integers"),
    "boolean lengths": (changed(valid_lens=np.ones(2, bool)), DTYPE, "valid_lens", "bool", "want integers"),
    "one length for all": (changed(valid_lens=np.array(3)), SHAPE, "valid_lens", "()", "(2,) or (2, 3)"),
    "length 2**63": (changed(valid_lens=np.array([1, 2**63], np.uint64)), LENGTH, "valid_lens[1]", f"{2**63}"),
    "an answer beyond float16": (
        changed(queries=QUERIES.astype(np.float16), values=VALUES * np.float32(1e6)), OVERFLOW, "output", "float16"
    ),
    **{
        f"{value} in {place}, {kind} lengths": (poked(name, where, value, lens), NON_FINITE, place, f"{value}")
        for name, where, place in (
            ("queries", (1, 2, 10), "queries[1][2][10]"),
            ("keys", (0, 2, 12), "keys[0][2][12]"),
            ("values", (1, 4, 0), "values[1][4][0]"),
        )
        for value in (np.nan, np.inf, -np.inf)
        for kind, lens in (("(B,)", B_LENS), ("(B, Q)", BQ_LENS))
    },
    **{
        f"nan in {name}, {kind}": (poked(name, (0, 4, 0), np.nan, lens), NON_FINITE, f"{name}[0][4][0]", "nan")
        for name in ("keys", "values")
        for kind, lens in (("row of length 0", [0, 5]), ("query of length 0", [[1, 0, 2], [5, 4, 1]]))
    },
    **{
        f"{name} beyond float32": (poked(name, (0, 0, 0), 1e39, B_LENS, np.float64), NON_FINITE, f"{name}[0]", "1e+39")
        for name in ("queries", "keys", "values")
    },
}  # fmt: skip


@pytest.mark.parametrize("codec", [SAFETENSORS, NPZ])
@table(WRONG_BINARY)
def test_binary_tensors(client: httpx.Client, codec: str, sent: Tensors, refusal: Refusal, words: list[str]) -> None:
    """Types without a meaning and numbers that cannot be computed with are refused where they would be used."""
    check_refused(post(client, WRITE[codec](sent), codec), refusal, *words)


# JSON.


def fields(**raw: str) -> bytes:
    """The good tensors as a JSON object, some of its values replaced by this text."""
    texts = {name: json.dumps(tensor.tolist()) for name, tensor in GOOD.items()} | raw
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}").encode()


def element(text: str) -> bytes:
    """The good tensors, this text in the place of the first number of the queries."""
    numbers = json.dumps(QUERIES.tolist())
    return fields(queries="[[[" + text + numbers[numbers.index(",") :])


WHOLE_JSON = to_json(GOOD)
NUMBERS, _, LAST = json.dumps(QUERIES.tolist()).rpartition(", ")
LAST_IN_A_LIST = f"{NUMBERS}, [{LAST.rstrip(']')}]]]]"
RAGGED_KEYS = json.dumps([KEYS[0].tolist(), KEYS[1, :4].tolist()])

WRONG_JSON = {
    "empty body": (b"", MALFORMED, "body: not JSON", "no JSON found"),
    "white space": (b" \n", MALFORMED, "body: not JSON"),
    "cut in a list": (b'{"queries": [[[', MALFORMED, "body: not JSON", "missing"),
    "without its last brace": (WHOLE_JSON[:-1], MALFORMED, "body: not JSON", "missing"),
    "trailing garbage": (WHOLE_JSON + b"x", MALFORMED, "body: not JSON", "left over"),
    "two documents": (WHOLE_JSON * 2, MALFORMED, "body: not JSON", "left over"),
    "a trailing zero byte": (WHOLE_JSON + b"\0", MALFORMED, "body: not JSON"),
    "a trailing comma": (fields(queries="[[[1,]]]"), MALFORMED, "body: not JSON"),
    "single quotes": (WHOLE_JSON.replace(b'"', b"'"), MALFORMED, "body: not JSON"),
    "a comment": (WHOLE_JSON[:-1] + b"/* */}", MALFORMED, "body: not JSON"),
    "UTF-16": (WHOLE_JSON.decode().encode("utf-16"), MALFORMED, "body: not JSON"),
    "not UTF-8": (b'{"\xff": 1}', MALFORMED, "body: not JSON", "UTF-8"),
    "half a surrogate pair": (b'{"\\ud800": 1}', MALFORMED, "body: not JSON"),
    "an array": (b"[" + WHOLE_JSON + b"]", MALFORMED, "want a JSON object with queries"),
    "a number": (b"3", MALFORMED, "want a JSON object"),
    "null": (b"null", MALFORMED, "want a JSON object"),
    "a field twice": (WHOLE_JSON[:-1] + b', "keys": [[[1]]]}', MALFORMED, "keys: given twice"),
    "queries are null": (b'{"queries": null}', MALFORMED, "queries: missing"),
    "a name of 99,999 letters": (b'{"' + b"k" * 99_999 + b'": 1}', MALFORMED, "unknown tensor 'kkk"),
    "5000 brackets": (b'{"queries": ' + b"[" * 5000, MALFORMED, "body: not JSON"),
    "900 axes": (b'{"queries": ' + b"[" * 900 + b"]" * 900 + b"}", SHAPE, "queries", "axes", "want 3"),
    "NaN": (element("NaN"), MALFORMED, "body: not JSON", "NaN and Infinity are none"),
    "Infinity": (element("Infinity"), MALFORMED, "body: not JSON", "NaN and Infinity are none"),
    "-Infinity": (element("-Infinity"), MALFORMED, "body: not JSON", "number is malformed"),
    "nan": (element("nan"), MALFORMED, "body: not JSON"),
    "1e400": (element("1e400"), MALFORMED, "body: not JSON", "beyond the range of float64"),
    "-1e400": (element("-1e400"), MALFORMED, "body: not JSON", "beyond the range of float64"),
    "1e39": (element("1e39"), NON_FINITE, "queries[0][0][0]", "float32"),
    "an integer of 30 digits": (element("1" * 30), MALFORMED, "body: not JSON", "64 bits"),
    **{token: (element(token), MALFORMED, "body: not JSON") for token in ("01", "+1", "0x1p3", ".5", "1.", "1_0")},
    "a list for the first number": (element("[1]"), SHAPE, "queries"),
    "a list for the last number": (fields(queries=LAST_IN_A_LIST), SHAPE, "queries", "same depth"),
    "a number for a list": (fields(keys="[[[1, 2], 3]]"), SHAPE, "keys: a number stands where a list should"),
    "mixed depth": (fields(keys="[[[1, 2], [3, [4]]]]"), SHAPE, "keys", "same depth"),
    "ragged features": (fields(keys="[[[1, 2], [3]]]"), SHAPE, "keys", "differ in length, 2 and 1"),
    "ragged keys of dense values": (fields(keys=RAGGED_KEYS), SHAPE, "values: 5 of entry 1, but 4 keys", "one value a"),
    "ragged valid_lens": (fields(valid_lens="[[1, 2, 3], [4, 5]]"), SHAPE, "valid_lens", "3 and 2"),
    **{
        f"{token} among numbers": (element(token), DTYPE, "queries", "want numbers")
        for token in ('"1"', "true", "null", '{"a": 1}')
    },
    "a string for a list": (fields(values='[[[1], "a"]]'), DTYPE, "values", "got a string"),
    "values are a string": (fields(values='"[[[1]]]"'), DTYPE, "values: want nested lists of numbers, got a string"),
    "values are a boolean": (fields(values="true"), DTYPE, "values: want nested lists of numbers, got a boolean"),
    "values are a number": (fields(values="1.5"), DTYPE, "values: want nested lists of numbers, got 1.5"),
    "values are an object": (fields(values='{"a": 1}'), DTYPE, "values: want nested lists of numbers, got an object"),
    "one length for all": (fields(valid_lens="3"), DTYPE, "valid_lens: want nested lists of numbers, got 3"),
    "length 2.5": (fields(valid_lens="[3, 2.5]"), DTYPE, "valid_lens: want integers, got 2.5"),
    "length 3.0": (fields(valid_lens="[3, 3.0]"), DTYPE, "valid_lens: want integers, got 3.0"),
    "length true": (fields(valid_lens="[3, true]"), DTYPE, "valid_lens: want integers, got a boolean"),
    "length null": (fields(valid_lens="[3, null]"), DTYPE, "valid_lens: want integers, got null"),
    "length '3'": (fields(valid_lens='[3, "3"]'), DTYPE, "valid_lens: want integers, got a string"),
    "length {}": (fields(valid_lens="[3, {}]"), DTYPE, "valid_lens: want integers, got an object"),
    "length 2**63": (fields(valid_lens=f"[3, {2**63}]"), LENGTH, "valid_lens", f"{2**63}"),
    "length 2**64": (fields(valid_lens=f"[3, {2**64}]"), MALFORMED, "body: not JSON", "64 bits"),
}  # fmt: skip


@table(WRONG_JSON)
def test_json(client: httpx.Client, sent: bytes, refusal: Refusal, words: list[str]) -> None:
    """A body that is no JSON object of nested lists of numbers is refused with the reason."""
    check_refused(post(client, sent, JSON), refusal, *words)


# Safetensors.


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header, or these bytes for one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    """The entry of 44 bytes of queries, (1, 1, 11), some of it replaced."""
    return {"dtype": "F32", "shape": [1, 1, 11], "data_offsets": [0, 44], **changes}


def lying(**changes: Any) -> bytes:
    """A file of 44 bytes of data whose header says something else of them."""
    return file_of({"queries": entry(**changes)}, bytes(44))


def two(begin: int, end: int) -> bytes:
    """A file of queries, and of keys in these bytes."""
    return file_of({"queries": entry(), "keys": entry(data_offsets=[begin, end])}, bytes(max(44, end)))


WHOLE_FILE = safetensors.numpy.save(GOOD)
NAME_TWICE = f'{{"queries": {json.dumps(entry())}, "queries": {json.dumps(entry(data_offsets=[44, 88]))}}}'.encode()

WRONG_SAFETENSORS = {
    "empty body": (b"", MALFORMED, "body: 0 bytes"),
    "7 bytes": (b"1234567", MALFORMED, "body: 7 bytes", "at least the 8"),
    "cut in the header": (WHOLE_FILE[:50], MALFORMED, "header length", "at most 42"),
    "cut in the data": (WHOLE_FILE[:-1], MALFORMED, "data_offsets"),
    "trailing bytes": (WHOLE_FILE + b"\0", MALFORMED, "1 bytes belong to no tensor"),
    "header of 2**63 bytes": (struct.pack("<Q", 2**63) + b"{}", MALFORMED, f"header length is {2**63}", "at most 2"),
    "header of 2**64 - 1 bytes": (b"\xff" * 8 + b"{}", MALFORMED, f"header length is {2**64 - 1}", "at most 2"),
    "header beyond 64 KiB": (file_of(b" " * 65_537), MALFORMED, "header length is 65537", "at most 65536"),
    "header of no bytes": (file_of(b""), MALFORMED, "header is not JSON"),
    "header is broken JSON": (file_of(b"{"), MALFORMED, "header is not JSON"),
    "header is not UTF-8": (file_of(b'{"\xff": 1}'), MALFORMED, "header is not JSON"),
    "header of 60,000 brackets": (file_of(b"[" * 60_000), MALFORMED, "header is not JSON"),
    "header is a list": (file_of([]), MALFORMED, "header is no JSON object"),
    "entry is null": (file_of({"queries": None}), MALFORMED, "queries", "dtype, shape and data_offsets"),
    "entry is empty": (file_of({"queries": {}}), MALFORMED, "queries", "dtype, shape and data_offsets"),
    "entry has an unknown field": (lying(x=1), MALFORMED, "queries", "exactly"),
    **{
        f"dtype {dtype}": (lying(dtype=dtype), DTYPE, "queries", str(dtype), "want one of F16, BF16, F32")
        for dtype in ("F8_E4M3", "f32", "C64", None, 4, ["F32"])
    },
    **{
        f"shape {shape}": (lying(shape=shape), MALFORMED, "queries", "0 to 44 of 44 bytes, shape and dtype want")
        for shape in ([1, 1, 10], [2, 1, 11], [2**63, 1, 11], [2**31, 2**31, 2**31], [0, 1, 11], [])
    },
    **{
        f"shape {shape}": (lying(shape=shape), MALFORMED, "queries", "lists of sizes")
        for shape in ([-1, -1, 11], [True, 1, 11], [1.0, 1, 11], [2**64, 1, 11], "111", None, {}, [1] * 9)
    },
    **{
        f"shape {shape} of no bytes": (
            file_of({"queries": entry(shape=shape, data_offsets=[0, 0])}), MALFORMED, "queries", "larger than any array"
        )
        for shape in ([0, 2**63], [0, 2**64 - 1], [0, 2**62, 8], [2**32, 2**32, 0])
    },
    "a dtype of another size": (lying(dtype="F64"), MALFORMED, "queries", "want 88 bytes"),
    **{
        f"offsets {offsets}": (lying(data_offsets=offsets), MALFORMED, "queries", "of 44 bytes")
        for offsets in ([0, 48], [4, 48], [44, 0], [0, 40], [0, 2**63], [2**63, 2**63 + 44])
    },
    **{
        f"offsets {offsets}": (lying(data_offsets=offsets), MALFORMED, "queries", "lists of sizes")
        for offsets in ([-44, 0], [False, 44], [0.0, 44.0], [0, 2**64], [0], [0, 44, 44], "044", None)
    },
    "a gap before the data": (
        lying(shape=[1, 1, 10], data_offsets=[4, 44]), MALFORMED, "queries: data begins at 4, want 0", "no gap"
    ),
    "a gap between two tensors": (two(48, 92), MALFORMED, "keys: data begins at 48, want 44", "no gap"),
    "two tensors overlap": (two(40, 84), MALFORMED, "keys: data begins at 40, want 44", "no overlap"),
    "two tensors in the same bytes": (two(0, 44), MALFORMED, "data begins at 0, want 44", "no overlap"),
    "a name twice": (file_of(NAME_TWICE, bytes(88)), MALFORMED, "queries: data begins at 44, want 0"),
}  # fmt: skip


@table(WRONG_SAFETENSORS)
def test_safetensors(client: httpx.Client, sent: bytes, refusal: Refusal, words: list[str]) -> None:
    """A file whose header lies about itself or its data is refused with what it says and what it wants."""
    check_refused(post(client, sent, SAFETENSORS), refusal, *words)


# npz.


def npy(header: bytes, data: bytes = bytes(44), version: bytes = b"\1\0") -> bytes:
    """A .npy file with this header, true or not."""
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


def npy_of(descr: Any = "<f4", shape: str = "(1, 1, 11)", data: bytes = bytes(44)) -> bytes:
    """A .npy file of 44 bytes of data whose header may say something else of them."""
    return npy(f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}\n".encode(), data)


def archive(*files: tuple[str, bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of these files, which may have the same name."""
    body = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(body, "w", packing) as file:
        warnings.simplefilter("ignore")
        for name, data in files:
            file.writestr(name, data)
    return body.getvalue()


def of_queries(file: bytes, packing: int = zipfile.ZIP_STORED) -> bytes:
    """An archive that holds nothing but these queries."""
    return archive(("queries.npy", file), packing=packing)


def directory(body: bytes, field: int, data: bytes) -> bytes:
    """The archive, its first directory entry patched at this field (PKWARE's APPNOTE, 4.3.12)."""
    start = body.index(b"PK\1\2") + field
    return body[:start] + data + body[start + len(data) :]


FLAGS, PACKED_SIZE, SIZE, OFFSET = 8, 20, 24, 42
ONE = npy_of()
WHOLE_ARCHIVE = of_queries(ONE)

WRONG_NPZ = {
    "empty body": (b"", MALFORMED, "body: not an npz archive"),
    "npy, not npz": (ONE, MALFORMED, "body: not an npz archive", "zip"),
    "cut in the end record": (WHOLE_ARCHIVE[:-1], MALFORMED, "body: not an npz archive"),
    "cut in an entry": (WHOLE_ARCHIVE[:60], MALFORMED, "body: not an npz archive"),
    "without its beginning": (WHOLE_ARCHIVE[60:], MALFORMED, "body: not an npz archive"),
    "another checksum": (WHOLE_ARCHIVE.replace(bytes(44), b"\1" * 44), MALFORMED, "CRC", "queries"),
    "entry beyond the end": (directory(WHOLE_ARCHIVE, OFFSET, b"\xfe" * 4), MALFORMED, "body: not an npz archive"),
    "directory says too little": (directory(WHOLE_ARCHIVE, SIZE, b"\x63\0\0\0"), MALFORMED, "CRC", "queries"),
    "directory says too much": (directory(WHOLE_ARCHIVE, PACKED_SIZE, b"\xff\xff\0\0" * 2), MALFORMED, "too early"),
    "directory says 4 GB": (directory(WHOLE_ARCHIVE, SIZE, b"\xfe" * 4), TOO_LARGE, "inflates to 4278124286", "limit"),
    "encrypted flag": (directory(WHOLE_ARCHIVE, FLAGS, b"\1"), MALFORMED, "queries", "encrypted"),
    "bzip2": (of_queries(ONE, zipfile.ZIP_BZIP2), MALFORMED, "queries", "want stored or deflated"),
    "lzma": (of_queries(ONE, zipfile.ZIP_LZMA), MALFORMED, "queries", "want stored or deflated"),
    "an entry twice": (archive(("queries.npy", ONE), ("queries.npy", ONE)), MALFORMED, "queries: given twice"),
    "a tensor under two names": (archive(("queries.npy", ONE), ("queries", ONE)), MALFORMED, "queries: given twice"),
    "17 entries": (archive(*((f"{number}.npy", ONE) for number in range(17))), MALFORMED, "17 entries", "at most 16"),
    "another file": (archive(("queries.npy", ONE), ("readme.txt", b"hello")), MALFORMED, "readme.txt", "numpy.save"),
    "an entry with a path": (archive(("../queries.npy", ONE)), MALFORMED, "unknown tensor '../queries'"),
    "a folder": (archive(("queries/", b"")), MALFORMED, "queries/", "numpy.save"),
    "npy version 3": (of_queries(npy(b"{}", version=b"\3\0")), MALFORMED, "queries: npy version is (3, 0)", "1.0"),
    **{
        f"{what} for a file": (of_queries(file), MALFORMED, "queries", "no array as numpy.save writes it")
        for what, file in {
            "nothing": b"",
            "a header of no bytes": npy(b""),
            "a header of zeros": npy(bytes(100)),
            "a header of 3000 brackets": npy(b"(" * 3000),
            "a header of 3000 signs": npy(b"-" * 3000 + b"1"),
            "a header of 5000 bytes": npy(b" " * 5000),
            "a header that calls": npy(b"__import__('os').getpid()\n"),
        }.items()
    },
    "a pickled array": (to_npz({"queries": np.array([{"a": 1}])}), DTYPE, "queries", "object", "want numbers"),
    "float128": (of_queries(npy_of("<f16", data=bytes(176))), DTYPE, "queries", "want float16"),
    **{
        f"dtype {descr}": (of_queries(npy_of(descr)), DTYPE, "queries", "want numbers")
        for descr in ("|O", "<c8", "<U11", "|S4", "|V4", "<M8[s]", "<m8[s]", [("a", "<f4")], "f4,f4", "(2,3)<f4")
    },
    **{
        f"dtype {descr}": (of_queries(npy_of(descr)), MALFORMED, "queries", "numpy.save")
        for descr in ("zzz", None, 5, "<f999", {"a": ("f4", 0)})
    },
    "negative shape": (of_queries(npy_of(shape="(-1, -1, 11)")), MALFORMED, "queries", "negative"),
    **{
        f"shape {shape}": (of_queries(npy_of(shape=shape)), MALFORMED, "queries", "holds 44 bytes")
        for shape in ("(1, 1, 10)", "(1, 1, 12)", f"({2**63}, 1, 11)", f"({2**30}, {2**30}, 99)", "(0, 1, 11)", "()")
    },
    **{
        f"shape {shape} of no bytes": (of_queries(npy_of(shape=shape, data=b"")), MALFORMED, "queries", "numpy.save")
        for shape in (f"(0, {2**63})", f"(0, {2**32}, {2**32})", "(0,) * 3")
    },
    **{
        f"shape {shape[:20]}": (of_queries(npy_of(shape=shape)), MALFORMED, "queries", "numpy.save")
        for shape in ("(True, 1, 11)", "(1.0, 1, 11)", "None", "'1'", "(" + "1, " * 65 + "11)")
    },
}  # fmt: skip


@table(WRONG_NPZ)
def test_npz(client: httpx.Client, sent: bytes, refusal: Refusal, words: list[str]) -> None:
    """An archive that is broken, lies, or holds anything but arrays of numbers is refused, and nothing is unpickled."""
    check_refused(post(client, sent, NPZ), refusal, *words)


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"__import__('os')\n", id="a call"),
        pytest.param(b"[lambda: 0]\n", id="a function"),
        pytest.param(b" " * 5000, id="a long header"),
    ],
)
def test_npz_says_nothing_of_the_server(client: httpx.Client, header: bytes) -> None:
    """A refused header is answered in our words: numpy's would quote memory addresses and advise allow_pickle."""
    message = post(client, of_queries(npy(header)), NPZ).json()["error"]
    assert not [word for word in (" at 0x", "pickle", "ast.", "numpy.lib") if word in message], message


# What is unusual and right.


def big_endian(tensors: Tensors) -> Tensors:
    """The tensors as a SPARC would write them."""
    return {name: tensor.astype(tensor.dtype.newbyteorder(">")) for name, tensor in tensors.items()}


def fortran(tensors: Tensors) -> Tensors:
    """The tensors, their first axis fastest."""
    return {name: np.asfortranarray(tensor) for name, tensor in tensors.items()}


def deflated(tensors: Tensors) -> bytes:
    """The tensors as `numpy.savez_compressed` writes them."""
    body = io.BytesIO()
    np.savez_compressed(body, **tensors)
    return body.getvalue()


@pytest.mark.parametrize(
    ("codec", "body"),
    [
        pytest.param(JSON, b"\xef\xbb\xbf" + WHOLE_JSON, id="JSON with a byte order mark"),
        pytest.param(JSON, b"\n\t " + WHOLE_JSON + b"\r\n", id="JSON in white space"),
        pytest.param(JSON, WHOLE_JSON.replace(b'"keys"', b'"\\u006beys"'), id="JSON with an escaped name"),
        pytest.param(JSON, json.dumps(json.loads(WHOLE_JSON), indent=1).encode(), id="JSON of one number a line"),
        pytest.param("Application/JSON; charset=utf-8", WHOLE_JSON, id="a media type with a parameter, in other case"),
        pytest.param(SAFETENSORS, safetensors.numpy.save(GOOD, {"made_by": "a test"}), id="safetensors with metadata"),
        pytest.param(
            SAFETENSORS, safetensors.numpy.save(changed(valid_lens=GOOD["valid_lens"].astype(np.uint8))),
            id="uint8 lengths",
        ),
        pytest.param(NPZ, to_npz(big_endian(GOOD)), id="big-endian npz"),
        pytest.param(NPZ, to_npz(fortran(GOOD)), id="npz in Fortran order"),
        pytest.param(NPZ, to_npz(big_endian(fortran(GOOD))), id="big-endian npz in Fortran order"),
        pytest.param(NPZ, deflated(GOOD), id="deflated npz"),
        pytest.param(NPZ, b"#!/bin/sh\n" + to_npz(GOOD), id="npz behind other bytes"),
        pytest.param(NPZ, to_npz({name: GOOD[name] for name in reversed(GOOD)}), id="npz in another order"),
    ],
)  # fmt: skip
def test_unusual_and_right(client: httpx.Client, codec: str, body: bytes) -> None:
    """What a format allows is read, however rare, and answered to the same last bit."""
    response = post(client, body, codec, Accept=SAFETENSORS)
    assert response.status_code == 200, response.text
    output = safetensors.numpy.load(response.content)["output"]
    np.testing.assert_array_equal(output, ask(client, GOOD, model="odd")["output"])


@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
@pytest.mark.parametrize("lens", [[0, 5], [5, 0], [5, 5], [[0, 1, 5], [5, 0, 0]]], ids=str)
def test_lengths_at_their_limits(client: httpx.Client, odd_layer: MultiHeadAttention, codec: str, lens: Any) -> None:
    """Lengths of 0 and of K are in the range, and answered as the oracle does."""
    tensors = changed(valid_lens=np.array(lens))
    output, _ = multi_head_attention(weights_of(odd_layer), odd_layer.num_heads, **tensors)
    assert close(ask(client, tensors, codec, model="odd")["output"], output)


@pytest.mark.parametrize("lens", [B_LENS, BQ_LENS], ids=["(B,)", "(B, Q)"])
@pytest.mark.parametrize(
    ("codec", "garbage", "dtype"),
    [
        *(
            pytest.param(codec, garbage, dtype, id=f"{codec} {garbage}")
            for codec in (SAFETENSORS, NPZ)
            for garbage, dtype in (
                (np.nan, np.float32), (np.inf, np.float32), (-np.inf, np.float64), (1e300, np.float64),
                (3e38, np.float32),
            )
        ),
        pytest.param(JSON, 1e300, np.float64, id=f"{JSON} 1e300"),
    ],
)  # fmt: skip
def test_padding_changes_nothing(client: httpx.Client, codec: str, lens: Any, garbage: float, dtype: Any) -> None:
    """Whatever stands beyond the valid length, the answer is that of zeros there, to the last bit."""
    clean = changed(valid_lens=np.array(lens), keys=KEYS.astype(dtype), values=VALUES.astype(dtype))
    dirty = {name: tensor.copy() for name, tensor in clean.items()}
    for name in ("keys", "values"):
        clean[name][0, 3:] = 0
        dirty[name][0, 3:] = garbage
    want = ask(client, clean, codec, model="odd", need_weights="true")
    got = ask(client, dirty, codec, model="odd", need_weights="true")
    np.testing.assert_array_equal(got["output"], want["output"])
    np.testing.assert_array_equal(got["weights"], want["weights"])


@pytest.mark.parametrize("codec", [SAFETENSORS, NPZ])
@pytest.mark.parametrize("dtype", [np.float16, np.float64], ids=["float16", "float64"])
def test_answered_in_the_dtype_of_the_queries(
    client: httpx.Client, odd_layer: MultiHeadAttention, codec: str, dtype: Any
) -> None:
    """The queries' type is the answer's, whatever the others are; it is rounded to once, at the end."""
    tensors = changed(queries=QUERIES.astype(dtype))
    got = ask(client, tensors, codec, model="odd")["output"]
    output, _ = multi_head_attention(weights_of(odd_layer), odd_layer.num_heads, **tensors)
    assert got.dtype == dtype
    # One rounding to the answer's type, and float32's error over a sum of 21 products.
    assert close(got.astype(np.float64), output, float(np.finfo(dtype).eps) / 2 + 1e-5)


def test_bfloat16(client: httpx.Client) -> None:
    """Queries in bfloat16 are answered so in safetensors; npz has no such type, and its refusal says what to do."""
    tensors = {name: torch.from_numpy(tensor) for name, tensor in GOOD.items()}
    body = safetensors.torch.save(tensors | {"queries": tensors["queries"].bfloat16()})
    answer = safetensors.torch.load(post(client, body, SAFETENSORS).content)
    assert answer["output"].dtype == torch.bfloat16
    check_refused(post(client, body, SAFETENSORS, Accept=NPZ), DTYPE, "output", "bfloat16", "accept safetensors")


# What stands around a body.

BAD_QUERIES = {
    "no model named": ("", UNKNOWN_MODEL, "no model named", "want ?model= one of: additive, attention, odd"),
    "unknown model": ("model=nope", UNKNOWN_MODEL, "model 'nope' is not served", "additive, attention, odd"),
    "model without a name": ("model=", UNKNOWN_MODEL, "model ''"),
    "model in other case": ("model=ODD", UNKNOWN_MODEL, "model 'ODD'"),
    "model with a path": ("model=../odd", UNKNOWN_MODEL, "model '../odd'"),
    "model with an absolute path": ("model=/etc/passwd", UNKNOWN_MODEL, "model '/etc/passwd'"),
    "model with a zero byte": ("model=odd%00", UNKNOWN_MODEL, r"model 'odd\x00'"),
    "model with its version": ("model=odd/1", UNKNOWN_MODEL, "model 'odd/1'"),
    "model of 9999 letters": ("model=" + "o" * 9999, UNKNOWN_MODEL, "model 'ooo"),
    "unknown version": ("model=odd&version=2", UNKNOWN_MODEL, "model 'odd' has no version '2'", "want one of: 1"),
    **{
        f"version {text!r}": (f"model=odd&version={text}", UNKNOWN_MODEL, f"no version '{text}'")
        for text in ("", "01", "-1", "1.0", "latest", "../1", "1/../1")
    },
    "unknown parameter": ("model=odd&modle=odd", PARAMETER, "'modle'", "want model, version"),
    "parameter in other case": ("MODEL=odd", PARAMETER, "'MODEL'", "want model, version"),
    "model twice": ("model=odd&model=odd", PARAMETER, "twice"),
    **{
        f"need_weights {text!r}": (f"model=odd&need_weights={text}", PARAMETER, "need_weights", f"'{text}'", "mean")
        for text in ("maybe", "", "2", "yes")
    },
    "heads beyond the layer": ("model=odd&heads=0,3", PARAMETER, "heads: got 3", "want 0 to 2"),
    **{
        f"heads {text[:8]!r}": (f"model=odd&heads={text}", PARAMETER, "heads", f"'{text[:64]}'", "0,3")
        for text in ("", "0,", "-1", "1.5", "all", "0;1", "1" * 5, "9," * 999)
    },
    "heads twice the same": ("model=odd&heads=1,1", PARAMETER, "heads", "at most once"),
    "heads of no weights": ("model=odd&need_weights=false&heads=1", PARAMETER, "heads: got '1' beside"),
    **{
        f"timeout_ms {text!r}": (f"model=odd&timeout_ms={text}", PARAMETER, "timeout_ms", f"'{text}'", "positive")
        for text in ("0", "-1", "1.5", "abc", "1e3", "9999999999", "")
    },
}  # fmt: skip


@table(BAD_QUERIES)
def test_query(client: httpx.Client, sent: str, refusal: Refusal, words: list[str]) -> None:
    """A query that names nothing served, or says what means nothing, is refused with what could be said."""
    check_refused(post(client, WHOLE_FILE, SAFETENSORS, sent), refusal, *words)


BAD_HEADERS = {
    **{
        f"type {text[:20]!r}": ({"Content-Type": text}, UNSUPPORTED, "Content-Type", f"'{text[:64]}'", SAFETENSORS)
        for text in (
            "text/plain", "application/octet-stream", "application/x-www-form-urlencoded", "json", "", "*/*", ";" * 999,
            "application/json+x", "application/ json", "application/json, text/plain",
            "multipart/form-data; boundary=x",
        )
    },
    **{
        f"encoding {text}": ({"Content-Encoding": text}, UNSUPPORTED, "Content-Encoding", f"'{text}'", "want none")
        for text in ("gzip", "deflate", "br", "zstd", "gzip, gzip")
    },
    **{
        f"accept {text[:20]}": ({"Accept": text}, UNACCEPTABLE, "Accept", f"'{text[:64]}'", JSON)
        for text in (
            "text/html", "image/*", "application/json;q=0", "*/*;q=0", "application", "a/b/c", ",", ";", "/", '"',
            "x" * 9999,
        )
    },
}  # fmt: skip


@table(BAD_HEADERS)
def test_headers(client: httpx.Client, sent: dict[str, str], refusal: Refusal, words: list[str]) -> None:
    """A body no codec reads, or an answer none can write, is refused with the types that there are."""
    headers = {"Content-Type": SAFETENSORS, **sent}
    check_refused(client.post("/v1/attention?model=odd", content=WHOLE_FILE, headers=headers), refusal, *words)


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ROUTES = {
    "/v1/attention": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/health/live": "GET",
    "/health/ready": "GET",
    "/health/startup": "GET",
    "/metrics": "GET",
    "/v2": "GET",
    "/v2/health/live": "GET",
    "/v2/health/ready": "GET",
    "/v2/models/stats": "GET",
    **{
        f"/v2/models/{{model}}{version}{path}": method
        for version in ("", "/versions/{version}")
        for path, method in {"": "GET", "/ready": "GET", "/config": "GET", "/stats": "GET", "/infer": "POST"}.items()
    },
    "/v2/repository/index": "POST",
    "/v2/repository/models/{model}/load": "POST",
    "/v2/repository/models/{model}/unload": "POST",
}
PAGES = {
    "/": "GET",
    "/assets/main.js": "GET",
    "/docs": "GET",
    "/openapi.json": "GET",
    "/docs/assets/swagger-ui.css": "GET",
}


def test_routes_are_all_here(server: ServerProcess) -> None:
    """No documented route is missing from the table of methods."""
    assert set(server.client.get("/openapi.json").json()["paths"]) == set(ROUTES)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        pytest.param(method, path.format(name="odd", model="odd", version="1"), allowed, id=f"{method} {path}")
        for path, allowed in (ROUTES | PAGES).items()
        for method in METHODS
        if method != allowed
    ],
)
def test_method(client: httpx.Client, method: str, path: str, allowed: str) -> None:
    """A route asked with another method says which one it wants, in words and in the Allow header."""
    response = client.request(method, path)
    check_refused(response, WRONG_METHOD, f"{method} {path}: want {allowed}")
    assert allowed in response.headers["allow"].split(", ")


BAD_PATHS = {
    **{
        path: (path, UNKNOWN_PATH, f"GET {path}: no such route", "GET /docs")
        for path in (
            "/nope", "/v1", "/v1/", "/v1/attentions", "/V1/models", "/v1/attention/", "/v1/models/", "/health/live/",
            "//v1/models", "/v1/models/../models", "/v1/models/odd/1", "/docs/assets/../../service/errors.py",
            "/index.html", "/assets", "/assets/", "/assets/nope.js", "/assets/../index.html",
        )
    },
    "%2f in a model": ("/v1/models/..%2f..%2fetc%2fpasswd", UNKNOWN_PATH, "GET /v1/models/../../etc/passwd"),
    "%2e%2e in assets": ("/docs/assets/%2e%2e/%2e%2e/mha.py", UNKNOWN_PATH, "GET /docs/assets/../../mha.py"),
    "%2e%2e for a model": ("/v1/models/%2e%2e", UNKNOWN_MODEL, "model '..'"),
    "a zero byte for a model": ("/v1/models/%00", UNKNOWN_MODEL, r"model '\x00'"),
    "not UTF-8 for a model": ("/v1/models/%ff", UNKNOWN_MODEL, "is not served"),
    "unknown model": ("/v1/models/nope", UNKNOWN_MODEL, "model 'nope' is not served", "additive, attention, odd"),
    "9999 letters": ("/" + "x" * 9999, UNKNOWN_PATH, "GET /xxx"),
}  # fmt: skip


@table(BAD_PATHS)
def test_path(client: httpx.Client, sent: str, refusal: Refusal, words: list[str]) -> None:
    """A path that is no route, slash for slash, is not found; none leaves the served names."""
    # As the request's target, because the client would resolve `..` itself.
    check_refused(client.get("/", extensions={"target": sent.encode()}), refusal, *words)

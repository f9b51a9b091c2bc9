"""Everything a client can send wrong, as real requests: refused with its code and reason, and the next one is answered.

A table a codec holds the bodies that only this format can get wrong; what any format can say wrong stands in one table of
tensors that every codec carries. The numbers of the statuses are written out here, because they are the contract.
"""

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from model.attention import MultiHeadAttention
from tests.conftest import weights_of
from tests.e2e.test_natural_endpoint import JSON, NPZ, READ, SAFETENSORS, WRITE, Tensors, ask, close, to_json, to_npz
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


def changed(**changes: np.ndarray | None) -> Tensors:
    """The good tensors with some of them replaced, or left out where the change is None."""
    tensors = {**GOOD, **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def poked(name: str, where: tuple[int, int, int], value: float, lens: Any, dtype: Any = np.float32) -> Tensors:
    """The good tensors with other lengths, and one number replaced."""
    tensor = GOOD[name].astype(dtype)
    tensor[where] = value
    return changed(**{name: tensor, "valid_lens": np.array(lens)})


def post(client: httpx.Client, body: bytes, codec: str, query: str = "model=odd", **headers: str) -> httpx.Response:
    """The response to one body."""
    return client.post(f"/v1/attention?{query}", content=body, headers={"Content-Type": codec, **headers})


def check_refused(response: httpx.Response, refusal: Refusal, words: tuple[str, ...] = ()) -> None:
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

WRONG_TENSORS = [
    pytest.param({}, MALFORMED, ("queries: missing", "no tensor"), id="nothing"),
    pytest.param(changed(queries=None), MALFORMED, ("queries: missing", "got keys"), id="no queries"),
    pytest.param(
        changed(keys=None, kyes=GOOD["keys"]), MALFORMED, ("'kyes'", "did you mean keys?"), id="misspelt tensor"
    ),
    pytest.param(
        changed(zzz=GOOD["keys"]), MALFORMED, ("'zzz'", "want queries, keys, values, valid_lens"), id="unknown tensor"
    ),
    pytest.param(changed(queries=np.ones(11, np.float32)), SHAPE, ("queries", "1 axes", "want 3"), id="1-D queries"),
    pytest.param(changed(queries=GOOD["queries"][0]), SHAPE, ("queries", "(3, 11)", "want 3"), id="2-D queries"),
    pytest.param(changed(keys=GOOD["keys"][None]), SHAPE, ("keys", "(1, 2, 5, 13)", "want 3"), id="4-D keys"),
    pytest.param(
        changed(queries=GOOD["queries"][..., :10]),
        SHAPE, ("queries: last axis is 10, the model expects 11",), id="size of queries",
    ),
    pytest.param(
        changed(keys=GOOD["keys"][..., :12]),
        SHAPE, ("keys: last axis is 12, the model expects 13",), id="size of keys",
    ),
    pytest.param(
        changed(values=GOOD["values"][..., :16]),
        SHAPE, ("values: last axis is 16, the model expects 17",), id="size of values",
    ),
    pytest.param(
        changed(keys=None), SHAPE,
        ("keys (absent, so the queries serve): last axis is 11, the model expects 13",), id="absent keys do not fit",
    ),
    pytest.param(
        changed(values=None), SHAPE,
        ("values (absent, so the keys serve): last axis is 13, the model expects 17",), id="absent values do not fit",
    ),
    pytest.param(
        changed(keys=GOOD["keys"][:1]), SHAPE, ("keys: batch is 1, queries have 2",), id="batch of keys"
    ),
    pytest.param(
        changed(values=GOOD["values"][:1]), SHAPE, ("values: batch is 1, queries have 2",), id="batch of values"
    ),
    pytest.param(
        changed(values=GOOD["values"][:, :4]), SHAPE, ("values: 4 of them, but 5 keys",), id="too few values"
    ),
    pytest.param(changed(keys=GOOD["keys"][:, :4]), SHAPE, ("values: 5 of them, but 4 keys",), id="too many values"),
    *(
        pytest.param(
            changed(**{name: np.delete(GOOD[name], slice(None), axis)}), EMPTY, (name, "at least 1"),
            id=f"{name} without {what}",
        )
        for name in ("queries", "keys", "values")
        for axis, what in enumerate(("batch", "length", "features"))
    ),
    *(
        pytest.param(
            changed(valid_lens=np.zeros(shape, np.int64)), EMPTY, ("valid_lens", "at least 1"),
            id=f"valid_lens of shape {shape}",
        )
        for shape in ((0,), (2, 0))
    ),
    *(
        pytest.param(
            changed(valid_lens=np.ones(shape, np.int64)), SHAPE, ("valid_lens", str(shape), "(2,) or (2, 3)"),
            id=f"valid_lens of shape {shape}",
        )
        for shape in ((3,), (3, 2), (2, 5), (1, 3), (2, 3, 1))
    ),
    *(
        pytest.param(
            changed(valid_lens=np.array([5, length])), LENGTH, ("valid_lens[1]", f"got {length}", "0 to 5"),
            id=f"length {length}",
        )
        for length in (6, -1, 2**63 - 1, -(2**63))
    ),
    pytest.param(
        changed(valid_lens=np.array([[1, 3, 2], [5, 6, 1]])), LENGTH, ("valid_lens[1, 1]", "got 6"), id="one length of many"
    ),
    pytest.param(
        {name: np.full_like(tensor, 3e38) for name, tensor in GOOD.items() if name != "valid_lens"},
        OVERFLOW, ("output", "float32"), id="a result beyond float32",
    ),
]  # fmt: skip


@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
@pytest.mark.parametrize(("tensors", "refusal", "words"), WRONG_TENSORS)
def test_tensors(client: httpx.Client, codec: str, tensors: Tensors, refusal: Refusal, words: tuple[str, ...]) -> None:
    """Tensors that mean nothing to the layer are refused in every codec alike, with what, where, got, want."""
    check_refused(post(client, WRITE[codec](tensors), codec), refusal, words)


# What only binary formats can say wrong: types, and numbers that are none.

B_LENS, BQ_LENS = [3, 5], [[1, 3, 2], [5, 4, 1]]

WRONG_BINARY = [
    pytest.param(
        changed(queries=np.ones((2, 3, 11), np.int64)), DTYPE, ("queries", "int64", "want float16"), id="int64 queries"
    ),
    pytest.param(changed(keys=np.ones((2, 5, 13), np.uint8)), DTYPE, ("keys", "uint8"), id="uint8 keys"),
    pytest.param(changed(values=np.ones((2, 5, 17), bool)), DTYPE, ("values", "bool"), id="boolean values"),
    pytest.param(
        changed(valid_lens=np.ones(2, np.float32)), DTYPE, ("valid_lens", "float32", "want integers"), id="float lengths"
    ),
    pytest.param(changed(valid_lens=np.ones(2, bool)), DTYPE, ("valid_lens", "bool"), id="boolean lengths"),
    pytest.param(changed(valid_lens=np.array(3)), SHAPE, ("valid_lens", "()"), id="one length for all"),
    pytest.param(
        changed(valid_lens=np.array([1, 2**63], np.uint64)), LENGTH, ("valid_lens[1]", "9223372036854775808"),
        id="length 2**63",
    ),
    *(
        pytest.param(poked(name, where, value, lens), NON_FINITE, (place, f"{value}"), id=f"{value} in {place}, {kind}")
        for name, where, place in (
            ("queries", (1, 2, 10), "queries[1][2][10]"),
            ("keys", (0, 2, 12), "keys[0][2][12]"),
            ("values", (1, 4, 0), "values[1][4][0]"),
        )
        for value in (np.nan, np.inf, -np.inf)
        for lens, kind in ((B_LENS, "(B,) lengths"), (BQ_LENS, "(B, Q) lengths"))
    ),
    *(
        pytest.param(poked(name, (0, 4, 0), np.nan, lens), NON_FINITE, (f"{name}[0][4][0]", "nan"), id=f"{name}, {kind}")
        for name in ("keys", "values")
        for lens, kind in (
            ([0, 5], "last key of a row of length 0"),
            ([[1, 0, 2], [5, 4, 1]], "last key where one query has length 0"),
        )
    ),
    *(
        pytest.param(
            poked(name, (0, 0, 0), 1e39, B_LENS, np.float64), NON_FINITE, (f"{name}[0][0][0]", "1e+39", "float32"),
            id=f"float64 {name} beyond float32",
        )
        for name in ("queries", "keys", "values")
    ),
    pytest.param(
        changed(queries=GOOD["queries"].astype(np.float16), values=GOOD["values"] * np.float32(1e6)),
        OVERFLOW, ("output", "does not fit float16", "float32"), id="an answer beyond float16",
    ),
]  # fmt: skip


@pytest.mark.parametrize("codec", [SAFETENSORS, NPZ])
@pytest.mark.parametrize(("tensors", "refusal", "words"), WRONG_BINARY)
def test_binary_tensors(
    client: httpx.Client, codec: str, tensors: Tensors, refusal: Refusal, words: tuple[str, ...]
) -> None:
    """Types without a meaning and numbers that cannot be computed with are refused where they would be used."""
    check_refused(post(client, WRITE[codec](tensors), codec), refusal, words)


# JSON.


def json_fields(**raw: str) -> bytes:
    """The good tensors as a JSON object, some of its values replaced by this text."""
    fields = {name: json.dumps(tensor.tolist()) for name, tensor in GOOD.items()} | raw
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in fields.items()) + "}").encode()


def json_element(text: str) -> bytes:
    """The good tensors, this text in the place of the first number of the queries."""
    numbers = json.dumps(GOOD["queries"].tolist())
    return json_fields(queries="[[[" + text + numbers[numbers.index(",") :])


WHOLE_JSON = to_json(GOOD)

WRONG_JSON = [
    pytest.param(b"", MALFORMED, ("body", "no JSON found"), id="empty body"),
    pytest.param(b" \n", MALFORMED, ("body: not JSON",), id="white space"),
    pytest.param(b'{"queries": [[[', MALFORMED, ("body: not JSON",), id="cut in a list"),
    pytest.param(WHOLE_JSON[:-1], MALFORMED, ("body: not JSON",), id="without its last brace"),
    pytest.param(WHOLE_JSON + b"x", MALFORMED, ("body: not JSON", "left over"), id="trailing garbage"),
    pytest.param(WHOLE_JSON + WHOLE_JSON, MALFORMED, ("body: not JSON",), id="two documents"),
    pytest.param(WHOLE_JSON + b"\0", MALFORMED, ("body: not JSON",), id="a trailing zero byte"),
    pytest.param(json_fields(queries="[[[1,]]]"), MALFORMED, ("body: not JSON",), id="trailing comma"),
    pytest.param(WHOLE_JSON.replace(b'"', b"'"), MALFORMED, ("body: not JSON",), id="single quotes"),
    pytest.param(WHOLE_JSON[:-1] + b"/* */}", MALFORMED, ("body: not JSON",), id="a comment"),
    pytest.param(WHOLE_JSON.decode().encode("utf-16"), MALFORMED, ("body: not JSON",), id="UTF-16"),
    pytest.param(b'{"\xff": 1}', MALFORMED, ("body: not JSON", "UTF-8"), id="not UTF-8"),
    pytest.param(b'{"\\ud800": 1}', MALFORMED, ("body: not JSON",), id="half a surrogate pair"),
    pytest.param(b"[" + WHOLE_JSON + b"]", MALFORMED, ("want a JSON object with queries",), id="an array"),
    pytest.param(b"3", MALFORMED, ("want a JSON object",), id="a number"),
    pytest.param(b"null", MALFORMED, ("want a JSON object",), id="null"),
    pytest.param(b'{"queries": ' + b"[" * 5000, MALFORMED, ("body: not JSON",), id="5000 brackets"),
    pytest.param(b'{"queries": ' + b"[" * 900 + b"]" * 900 + b"}", SHAPE, ("queries", "axes"), id="900 axes"),
    pytest.param(b'{"' + b"k" * 99_999 + b'": 1}', MALFORMED, ("unknown tensor 'kkk",), id="a name of 99,999 letters"),
    *(
        pytest.param(json_element(token), MALFORMED, ("body: not JSON", "NaN and Infinity"), id=f"token {token}")
        for token in ("NaN", "Infinity", "-Infinity", "nan", "None")
    ),
    *(
        pytest.param(json_element(token), MALFORMED, ("body: not JSON", "number"), id=f"token {token}")
        for token in ("1e400", "-1e400", "01", "+1", "0x1p3", ".5", "1.")
    ),
    pytest.param(json_element("1" * 30), MALFORMED, ("body: not JSON", "64 bits"), id="an integer of 30 digits"),
    pytest.param(json_element("1e39"), NON_FINITE, ("queries[0][0][0]", "float32"), id="1e39"),
    pytest.param(
        WHOLE_JSON[:-1] + b', "keys": [[[1]]]}', MALFORMED, ("keys: given twice",), id="a field twice"
    ),
    pytest.param(b'{"queries": null}', MALFORMED, ("queries: missing",), id="null queries"),
    pytest.param(json_element("[1]"), SHAPE, ("queries",), id="a list in the place of the first number"),
    pytest.param(json_element("1, [2]"), SHAPE, ("queries",), id="a list in the place of the second number"),
    pytest.param(
        json_fields(keys="[[[1, 2], 3]]"), SHAPE, ("keys: a number stands where a list should",), id="a number for a list"
    ),
    pytest.param(
        json_fields(keys="[[[1, 2], [3, [4]]]]"), SHAPE, ("keys", "same depth"), id="lists of mixed depth"
    ),
    pytest.param(
        json_fields(keys="[[[1, 2], [3]]]"), SHAPE, ("keys", "differ in length, 2 and 1"), id="ragged features"
    ),
    pytest.param(
        json_fields(keys=json.dumps([GOOD["keys"][0].tolist(), GOOD["keys"][1, :4].tolist()])), SHAPE,
        ("keys", "5 and 4"), id="ragged keys of dense values",
    ),
    pytest.param(json_fields(valid_lens="[[1, 2, 3], [4, 5]]"), SHAPE, ("valid_lens", "3 and 2"), id="ragged lengths"),
    *(
        pytest.param(json_element(token), DTYPE, ("queries", "want numbers"), id=f"{what} among numbers")
        for token, what in (('"1"', "a string"), ("true", "a boolean"), ("null", "null"), ('{"a": 1}', "an object"))
    ),
    *(
        pytest.param(json_fields(values=text), DTYPE, ("values", "want nested lists of numbers"), id=f"values are {what}")
        for text, what in (('"1"', "a string"), ("true", "a boolean"), ("1.5", "a number"), ('{"a": 1}', "an object"))
    ),
    pytest.param(
        json_fields(values='[[[1], "a"]]'), DTYPE, ("values", "got a string"), id="a string for a list"
    ),
    *(
        pytest.param(
            json_fields(valid_lens=f"[3, {text}]"), DTYPE, ("valid_lens", "want integers", got), id=f"length {text}"
        )
        for text, got in (
            ("2.5", "2.5"), ("3.0", "3.0"), ("true", "a boolean"), ('"3"', "a string"), ("null", "null"), ("{}", "an object")
        )
    ),
    pytest.param(json_fields(valid_lens="3"), DTYPE, ("valid_lens", "got 3"), id="one length for all"),
    pytest.param(
        json_fields(valid_lens=f"[3, {2**63}]"), LENGTH, ("valid_lens", "9223372036854775808"), id="length 2**63"
    ),
    pytest.param(
        json_fields(valid_lens=f"[3, {2**64}]"), MALFORMED, ("body: not JSON", "64 bits"), id="length 2**64"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "refusal", "words"), WRONG_JSON)
def test_json(client: httpx.Client, body: bytes, refusal: Refusal, words: tuple[str, ...]) -> None:
    """A body that is no JSON object of nested lists of numbers is refused with the reason."""
    check_refused(post(client, body, JSON), refusal, words)


# Safetensors.


def safetensors_body(header: Any, data: bytes = b"") -> bytes:
    """A file with this header, or these bytes for one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    """The header of 44 bytes of queries, (1, 1, 11), some of it replaced."""
    return {"queries": {"dtype": "F32", "shape": [1, 1, 11], "data_offsets": [0, 44], **changes}}


DATA = bytes(44)
WHOLE_SAFETENSORS = safetensors.numpy.save(GOOD)

WRONG_SAFETENSORS = [
    pytest.param(b"", MALFORMED, ("body: 0 bytes",), id="empty body"),
    pytest.param(b"1234567", MALFORMED, ("body: 7 bytes", "8"), id="shorter than its header's length"),
    pytest.param(WHOLE_SAFETENSORS[:50], MALFORMED, ("header length", "at most 42"), id="cut in the header"),
    pytest.param(WHOLE_SAFETENSORS[:-1], MALFORMED, ("data_offsets",), id="cut in the data"),
    pytest.param(WHOLE_SAFETENSORS + b"\0", MALFORMED, ("1 bytes belong to no tensor",), id="trailing bytes"),
    pytest.param(
        struct.pack("<Q", 2**64 - 1) + b"{}", MALFORMED, ("header length is 18446744073709551615",), id="header of 2**64"
    ),
    pytest.param(
        struct.pack("<Q", 2**63) + b"{}", MALFORMED, ("header length is 9223372036854775808",), id="header of 2**63"
    ),
    pytest.param(safetensors_body(b" " * 65_537), MALFORMED, ("at most 65536",), id="header of 64 KiB and one"),
    pytest.param(safetensors_body(b""), MALFORMED, ("header is not JSON",), id="header of no bytes"),
    pytest.param(safetensors_body(b"{"), MALFORMED, ("header is not JSON",), id="header is broken JSON"),
    pytest.param(safetensors_body(b'{"\xff": 1}'), MALFORMED, ("header is not JSON",), id="header is not UTF-8"),
    pytest.param(safetensors_body(b"[" * 60_000), MALFORMED, ("header is not JSON",), id="header of 60,000 brackets"),
    pytest.param(safetensors_body([]), MALFORMED, ("header is no JSON object",), id="header is a list"),
    pytest.param(safetensors_body({"queries": None}), MALFORMED, ("queries", "dtype, shape"), id="entry is null"),
    pytest.param(safetensors_body({"queries": {}}), MALFORMED, ("queries", "dtype, shape"), id="entry is empty"),
    pytest.param(safetensors_body(entry(x=1), DATA), MALFORMED, ("queries", "exactly"), id="entry has an unknown field"),
    *(
        pytest.param(safetensors_body(entry(dtype=dtype), DATA), DTYPE, ("queries", str(dtype)), id=f"dtype {dtype}")
        for dtype in ("F8_E4M3", "f32", "C64", None, 4, ["F32"])
    ),
    *(
        pytest.param(safetensors_body(entry(shape=shape), DATA), MALFORMED, ("queries", "bytes"), id=f"shape {shape}")
        for shape in ([1, 1, 10], [2, 1, 11], [2**63, 1, 11], [2**31, 2**31, 2**31], [0, 1, 11], [])
    ),
    *(
        pytest.param(
            safetensors_body(entry(shape=shape), DATA), MALFORMED, ("queries", "lists of sizes"), id=f"shape {shape}"
        )
        for shape in ([-1, -1, 11], [True, 1, 11], [1.0, 1, 11], [2**64, 1, 11], "111", None, {}, [1] * 9)
    ),
    *(
        pytest.param(
            safetensors_body(entry(shape=shape, data_offsets=[0, 0])), MALFORMED, ("queries", "larger than any array"),
            id=f"shape {shape} of no bytes",
        )
        for shape in ([0, 2**63], [0, 2**64 - 1], [0, 2**62, 8], [2**32, 2**32, 0])
    ),
    *(
        pytest.param(
            safetensors_body(entry(data_offsets=offsets), DATA), MALFORMED, ("queries", "data_offsets"),
            id=f"offsets {offsets}",
        )
        for offsets in (
            [0, 48], [4, 48], [44, 0], [0, 40], [0, 2**63], [2**63, 2**63 + 44], [-44, 0], [False, 44], [0.0, 44.0],
            [0, 2**64], [0], [0, 44, 44], "044", None,
        )
    ),
    pytest.param(
        safetensors_body(entry(shape=[1, 1, 10], data_offsets=[4, 44]), DATA), MALFORMED, ("queries", "no gap"),
        id="a gap before the data",
    ),
    pytest.param(
        safetensors_body(
            entry() | {"keys": {"dtype": "F32", "shape": [1, 1, 11], "data_offsets": [0, 44]}}, DATA
        ), MALFORMED, ("no overlap",), id="two tensors in the same bytes",
    ),
    pytest.param(
        safetensors_body(
            entry() | {"keys": {"dtype": "F32", "shape": [1, 1, 11], "data_offsets": [40, 84]}}, bytes(84)
        ), MALFORMED, ("keys", "begins at 40, want 44"), id="two tensors overlap",
    ),
    pytest.param(
        safetensors_body(
            entry() | {"keys": {"dtype": "F32", "shape": [1, 1, 11], "data_offsets": [48, 92]}}, bytes(92)
        ), MALFORMED, ("keys", "begins at 48, want 44"), id="a gap between two tensors",
    ),
    pytest.param(
        safetensors_body(
            (json.dumps(entry())[:-1] + ", " + json.dumps(entry(data_offsets=[44, 88]))[1:]).encode(), bytes(88)
        ), MALFORMED, ("queries", "begins at 44, want 0"), id="a name twice",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "refusal", "words"), WRONG_SAFETENSORS)
def test_safetensors(client: httpx.Client, body: bytes, refusal: Refusal, words: tuple[str, ...]) -> None:
    """A file whose header lies about itself or its data is refused with what it says and what it wants."""
    check_refused(post(client, body, SAFETENSORS), refusal, words)


# npz.


def npy_header(descr: Any = "<f4", shape: str = "(1, 1, 11)", fortran_order: Any = False) -> bytes:
    """The text of a .npy header."""
    return f"{{'descr': {descr!r}, 'fortran_order': {fortran_order!r}, 'shape': {shape}, }}\n".encode()


def npy(header: bytes, data: bytes = DATA, version: bytes = b"\1\0") -> bytes:
    """A .npy file with this header, true or not."""
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + data


def npz(*files: tuple[str, bytes], packing: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of these files, which may have the same name."""
    archive = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(archive, "w", packing) as file:
        warnings.simplefilter("ignore")
        for name, data in files:
            file.writestr(name, data)
    return archive.getvalue()


def of_queries(file: bytes) -> bytes:
    """An archive that holds nothing but these queries."""
    return npz(("queries.npy", file))


def patched(body: bytes, field: int, data: bytes) -> bytes:
    """The archive, with other bytes at this place of its first directory entry (PKWARE's APPNOTE, 4.3.12)."""
    start = body.index(b"PK\1\2") + field
    return body[:start] + data + body[start + len(data) :]


FLAGS, CRC, PACKED_SIZE, SIZE, OFFSET = 8, 16, 20, 24, 42
ONE = npy(npy_header())
ONE_NPZ = of_queries(ONE)
PICKLED = io.BytesIO()
np.savez(PICKLED, queries=np.array([{"a": 1}], object))

WRONG_NPZ = [
    pytest.param(b"", MALFORMED, ("not an npz archive",), id="empty body"),
    pytest.param(ONE, MALFORMED, ("not an npz archive", "zip"), id="npy, not npz"),
    pytest.param(ONE_NPZ[:-1], MALFORMED, ("not an npz archive",), id="cut in the end record"),
    pytest.param(ONE_NPZ[:60], MALFORMED, ("not an npz archive",), id="cut in an entry"),
    pytest.param(ONE_NPZ[60:], MALFORMED, ("not an npz archive",), id="without its beginning"),
    pytest.param(ONE_NPZ.replace(DATA, b"\1" * 44), MALFORMED, ("CRC", "queries"), id="data of another checksum"),
    pytest.param(patched(ONE_NPZ, OFFSET, b"\xfe" * 4), MALFORMED, ("not an npz archive",), id="entry beyond the end"),
    pytest.param(patched(ONE_NPZ, SIZE, struct.pack("<I", 99)), MALFORMED, ("CRC",), id="directory says too little"),
    pytest.param(
        patched(ONE_NPZ, PACKED_SIZE, struct.pack("<II", 9999, 9999)), MALFORMED, ("ends too early",),
        id="directory says too much",
    ),
    pytest.param(
        patched(ONE_NPZ, SIZE, b"\xfe" * 4), TOO_LARGE, ("inflates to 4278124286 bytes", "limit"),
        id="directory says 4 GB",
    ),
    pytest.param(patched(ONE_NPZ, FLAGS, b"\1"), MALFORMED, ("queries", "encrypted"), id="encrypted flag"),
    pytest.param(npz(("queries.npy", ONE), packing=zipfile.ZIP_BZIP2), MALFORMED, ("queries", "deflated"), id="bzip2"),
    pytest.param(npz(("queries.npy", ONE), packing=zipfile.ZIP_LZMA), MALFORMED, ("queries", "deflated"), id="lzma"),
    pytest.param(
        npz(("queries.npy", ONE), ("queries.npy", ONE)), MALFORMED, ("queries: given twice",), id="an entry twice"
    ),
    pytest.param(
        npz(("queries.npy", ONE), ("queries", ONE)), MALFORMED, ("queries: given twice",), id="a tensor under two names"
    ),
    pytest.param(
        npz(*((f"t{number}.npy", ONE) for number in range(17))), MALFORMED, ("17 entries", "at most 16"), id="17 entries"
    ),
    pytest.param(
        npz(("queries.npy", ONE), ("readme.txt", b"hello")), MALFORMED, ("readme.txt", "numpy.save"), id="another file"
    ),
    pytest.param(
        npz(("../queries.npy", ONE)), MALFORMED, ("unknown tensor '../queries'",), id="an entry with a path"
    ),
    pytest.param(npz(("queries/", b"")), MALFORMED, ("queries/",), id="a folder"),
    pytest.param(of_queries(b""), MALFORMED, ("queries", "numpy.save"), id="an empty entry"),
    pytest.param(of_queries(npy(b"")), MALFORMED, ("queries", "numpy.save"), id="a header of no bytes"),
    pytest.param(of_queries(npy(bytes(100))), MALFORMED, ("queries", "numpy.save"), id="a header of zeros"),
    pytest.param(of_queries(npy(b"(" * 3000)), MALFORMED, ("queries", "numpy.save"), id="a header of 3000 brackets"),
    pytest.param(of_queries(npy(b"-" * 3000 + b"1")), MALFORMED, ("queries", "numpy.save"), id="a header of 3000 signs"),
    pytest.param(of_queries(npy(b" " * 5000)), MALFORMED, ("queries", "numpy.save"), id="a header of 5000 bytes"),
    pytest.param(
        of_queries(npy(b"__import__('os').getpid()\n")), MALFORMED, ("queries", "numpy.save"), id="a header that calls"
    ),
    pytest.param(of_queries(npy(npy_header(), version=b"\3\0")), MALFORMED, ("queries", "(3, 0)"), id="npy version 3"),
    pytest.param(PICKLED.getvalue(), DTYPE, ("queries", "object", "want numbers"), id="a pickled array"),
    *(
        pytest.param(of_queries(npy(npy_header(descr))), DTYPE, ("queries", "want numbers"), id=f"dtype {descr}")
        for descr in ("|O", "<c8", "<U11", "|S4", "|V4", "<M8[s]", "<m8[s]", [("a", "<f4")], "f4,f4", "(2,3)<f4")
    ),
    *(
        pytest.param(of_queries(npy(npy_header(descr))), MALFORMED, ("queries", "numpy.save"), id=f"dtype {descr}")
        for descr in ("zzz", None, 5, "<f999", {"a": ("f4", 0)})
    ),
    pytest.param(of_queries(npy(npy_header("<f16"), bytes(176))), DTYPE, ("queries", "want float16"), id="float128"),
    *(
        pytest.param(
            of_queries(npy(npy_header(shape=shape))), MALFORMED, ("queries", "holds 44 bytes"), id=f"shape {shape}"
        )
        for shape in (
            "(1, 1, 10)", "(1, 1, 12)", "(1000000000, 1000000000, 100)", "(9223372036854775808, 1, 11)", "(0, 1, 11)", "()"
        )
    ),
    pytest.param(
        of_queries(npy(npy_header(shape="(-1, -1, 11)"))), MALFORMED, ("queries", "negative"), id="a negative shape"
    ),
    *(
        pytest.param(
            of_queries(npy(npy_header(shape=shape), b"")), MALFORMED, ("queries", "shape"), id=f"shape {shape} of no bytes"
        )
        for shape in ("(0, 9223372036854775808)", "(0, 4294967296, 4294967296)", "(0,) * 3")
    ),
    *(
        pytest.param(of_queries(npy(npy_header(shape=shape))), MALFORMED, ("queries", "numpy.save"), id=f"shape {shape}")
        for shape in ("(True, 1, 11)", "(1.0, 1, 11)", "None", "'1'", "(" + "1, " * 65 + "11)")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "refusal", "words"), WRONG_NPZ)
def test_npz(client: httpx.Client, body: bytes, refusal: Refusal, words: tuple[str, ...]) -> None:
    """An archive that is broken, lies, or holds anything but arrays of numbers is refused, and nothing is unpickled."""
    check_refused(post(client, body, NPZ), refusal, words)


@pytest.mark.parametrize("body", [npy(b"__import__('os')\n"), npy(b" " * 5000), npy(b"[lambda: 0]\n")])
def test_npz_says_nothing_of_the_server(client: httpx.Client, body: bytes) -> None:
    """A refused header is answered in our words: numpy's would quote memory addresses and advise allow_pickle."""
    message = post(client, of_queries(body), NPZ).json()["error"]
    assert not [word for word in (" at 0x", "pickle", "ast.", "numpy.lib") if word in message], message


# What is unusual and right.


def big_endian(tensors: Tensors) -> Tensors:
    return {name: tensor.astype(tensor.dtype.newbyteorder(">")) for name, tensor in tensors.items()}


def fortran(tensors: Tensors) -> Tensors:
    return {name: np.asfortranarray(tensor) for name, tensor in tensors.items()}


def deflated(tensors: Tensors) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **tensors)
    return file.getvalue()


UNUSUAL = [
    pytest.param(JSON, b"\xef\xbb\xbf" + WHOLE_JSON, id="JSON with a byte order mark"),
    pytest.param(JSON, b"\n\t " + WHOLE_JSON + b"\r\n", id="JSON in white space"),
    pytest.param(JSON, WHOLE_JSON.replace(b'"keys"', b'"\\u006beys"'), id="JSON with an escaped name"),
    pytest.param(JSON, json.dumps(json.loads(WHOLE_JSON), indent=1).encode(), id="JSON of one number a line"),
    pytest.param("Application/JSON; charset=utf-8", WHOLE_JSON, id="a media type with a parameter, in other case"),
    pytest.param(SAFETENSORS, safetensors.numpy.save(GOOD, {"made_by": "a test"}), id="safetensors with metadata"),
    pytest.param(
        SAFETENSORS, safetensors.numpy.save(changed(valid_lens=np.array(BQ_LENS, np.uint8))), id="uint8 lengths",
    ),
    pytest.param(NPZ, to_npz(big_endian(GOOD)), id="big-endian npz"),
    pytest.param(NPZ, to_npz(fortran(GOOD)), id="npz in Fortran order"),
    pytest.param(NPZ, to_npz(big_endian(fortran(GOOD))), id="big-endian npz in Fortran order"),
    pytest.param(NPZ, deflated(GOOD), id="deflated npz"),
    pytest.param(NPZ, b"#!/bin/sh\n" + to_npz(GOOD), id="npz behind other bytes"),
    pytest.param(NPZ, to_npz({name: GOOD[name] for name in reversed(GOOD)}), id="npz in another order"),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "body"), UNUSUAL)
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


@pytest.mark.parametrize("codec", [JSON, SAFETENSORS, NPZ])
@pytest.mark.parametrize("lens", [B_LENS, BQ_LENS], ids=["(B,)", "(B, Q)"])
@pytest.mark.parametrize(
    ("garbage", "dtype"),
    [
        pytest.param(np.nan, np.float32, id="nan"),
        pytest.param(np.inf, np.float32, id="inf"),
        pytest.param(-np.inf, np.float64, id="-inf"),
        pytest.param(1e300, np.float64, id="beyond float32"),
        pytest.param(3e38, np.float32, id="largest float32"),
    ],
)
def test_padding_changes_nothing(client: httpx.Client, codec: str, lens: Any, garbage: float, dtype: Any) -> None:
    """Whatever stands beyond the valid length, the answer is that of zeros there, to the last bit."""
    if codec == JSON and not np.isfinite(garbage):
        pytest.skip("JSON has no such number")
    clean = changed(valid_lens=np.array(lens), keys=GOOD["keys"].astype(dtype), values=GOOD["values"].astype(dtype))
    dirty = {name: tensor.copy() for name, tensor in clean.items()}
    for name in ("keys", "values"):
        clean[name][0, 3:] = 0
        dirty[name][0, 3:] = garbage
    want = ask(client, clean, codec, model="odd", need_weights="true")
    got = ask(client, dirty, codec, model="odd", need_weights="true")
    np.testing.assert_array_equal(got["output"], want["output"])
    np.testing.assert_array_equal(got["weights"], want["weights"])


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        pytest.param(SAFETENSORS, np.dtype(np.float16), id="safetensors F16"),
        pytest.param(SAFETENSORS, np.dtype(ml_dtypes.bfloat16), id="safetensors BF16"),
        pytest.param(SAFETENSORS, np.dtype(np.float64), id="safetensors F64"),
        pytest.param(NPZ, np.dtype(np.float16), id="npz float16"),
        pytest.param(NPZ, np.dtype(np.float64), id="npz float64"),
        pytest.param(NPZ, np.dtype(">f8"), id="npz big-endian float64"),
    ],
)
def test_answered_in_the_dtype_of_the_queries(
    client: httpx.Client, odd_layer: MultiHeadAttention, codec: str, dtype: np.dtype[Any]
) -> None:
    """The queries' type is the answer's, whatever the others are; it is rounded to once, at the end."""
    tensors = changed(queries=GOOD["queries"].astype(dtype))
    got = ask(client, tensors, codec, model="odd")["output"]
    output, _ = multi_head_attention(weights_of(odd_layer), odd_layer.num_heads, **tensors)
    assert got.dtype == dtype.newbyteorder("=")
    # One rounding to the answer's type, and float32's error over a sum of 21 products.
    assert close(got.astype(np.float64), output, float(ml_dtypes.finfo(got.dtype).eps) / 2 + 1e-5)


def test_npz_cannot_hold_bfloat16(client: httpx.Client) -> None:
    """An answer in bfloat16 is refused in npz, with what to do instead."""
    body = safetensors.numpy.save(changed(queries=GOOD["queries"].astype(ml_dtypes.bfloat16)))
    check_refused(post(client, body, SAFETENSORS, Accept=NPZ), DTYPE, ("output", "bfloat16", "accept safetensors"))


# What stands around a body.


@pytest.mark.parametrize(
    ("query", "refusal", "words"),
    [
        pytest.param("", UNKNOWN_MODEL, ("no model named", "additive, attention, odd"), id="no model named"),
        pytest.param("model=nope", UNKNOWN_MODEL, ("'nope'", "additive, attention, odd"), id="unknown model"),
        pytest.param("model=", UNKNOWN_MODEL, ("''",), id="model without a name"),
        pytest.param("model=ODD", UNKNOWN_MODEL, ("'ODD'",), id="model in other case"),
        pytest.param("model=../odd", UNKNOWN_MODEL, ("'../odd'",), id="model with a path"),
        pytest.param("model=/etc/passwd", UNKNOWN_MODEL, ("'/etc/passwd'",), id="model with an absolute path"),
        pytest.param("model=odd%00", UNKNOWN_MODEL, (r"'odd\x00'",), id="model with a zero byte"),
        pytest.param("model=odd/1", UNKNOWN_MODEL, ("'odd/1'",), id="model with its version"),
        pytest.param("model=" + "o" * 9999, UNKNOWN_MODEL, ("'ooo",), id="model of 9999 letters"),
        pytest.param("model=odd&version=2", UNKNOWN_MODEL, ("'odd'", "'2'", "want one of: 1"), id="unknown version"),
        pytest.param("model=odd&version=", UNKNOWN_MODEL, ("''", "want one of: 1"), id="version without a number"),
        pytest.param("model=odd&version=01", UNKNOWN_MODEL, ("'01'",), id="version 01"),
        pytest.param("model=odd&version=-1", UNKNOWN_MODEL, ("'-1'",), id="version -1"),
        pytest.param("model=odd&version=../1", UNKNOWN_MODEL, ("'../1'",), id="version with a path"),
        pytest.param("model=odd&modle=odd", PARAMETER, ("'modle'", "want model"), id="unknown parameter"),
        pytest.param("MODEL=odd", PARAMETER, ("'MODEL'",), id="parameter in other case"),
        pytest.param("model=odd&model=odd", PARAMETER, ("twice",), id="model twice"),
        pytest.param("model=odd&need_weights=maybe", PARAMETER, ("need_weights", "'maybe'"), id="need_weights maybe"),
        pytest.param("model=odd&need_weights=", PARAMETER, ("need_weights", "''"), id="need_weights without a value"),
        pytest.param("model=odd&need_weights=2", PARAMETER, ("need_weights", "'2'"), id="need_weights 2"),
        *(
            pytest.param(
                f"model=odd&timeout_ms={text}", PARAMETER, ("timeout_ms", f"'{text}'", "positive number"),
                id=f"timeout_ms {text}",
            )
            for text in ("0", "-1", "1.5", "abc", "1e3", "9999999999", "")
        ),
    ],
)  # fmt: skip
def test_query(client: httpx.Client, query: str, refusal: Refusal, words: tuple[str, ...]) -> None:
    """A query that names nothing served, or says what means nothing, is refused with what could be said."""
    check_refused(post(client, WHOLE_SAFETENSORS, SAFETENSORS, query), refusal, words)


@pytest.mark.parametrize(
    ("headers", "refusal", "words"),
    [
        *(
            pytest.param({"Content-Type": text}, UNSUPPORTED, (f"'{text[:64]}'", SAFETENSORS), id=f"type {text[:20]!r}")
            for text in (
                "text/plain", "application/octet-stream", "application/x-www-form-urlencoded", "json", "",
                "application/json+x", "application/ json", "*/*", "application/json, text/plain", ";" * 999,
                "multipart/form-data; boundary=x",
            )
        ),
        *(
            pytest.param(
                {"Content-Type": SAFETENSORS, "Content-Encoding": text}, UNSUPPORTED,
                ("Content-Encoding", f"'{text}'", "want none"), id=f"encoding {text}",
            )
            for text in ("gzip", "deflate", "br", "zstd", "gzip, gzip")
        ),
        *(
            pytest.param(
                {"Content-Type": SAFETENSORS, "Accept": text}, UNACCEPTABLE,
                ("Accept", f"'{text[:64]}'", JSON), id=f"accept {text[:20]}",
            )
            for text in (
                "text/html", "image/*", "application/json;q=0", "*/*;q=0", "application", "a/b/c", ",", ";", "/", '"',
                "x" * 9999,
            )
        ),
    ],
)  # fmt: skip
def test_headers(client: httpx.Client, headers: dict[str, str], refusal: Refusal, words: tuple[str, ...]) -> None:
    """A body no codec reads, or an answer none can write, is refused with the types that there are."""
    response = client.post("/v1/attention?model=odd", content=WHOLE_SAFETENSORS, headers=headers)
    check_refused(response, refusal, words)


METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ROUTES = {
    "/v1/attention": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/health/live": "GET",
    "/health/ready": "GET",
    "/health/startup": "GET",
    "/metrics": "GET",
}
PAGES = ("/docs", "/openapi.json", "/docs/assets/swagger-ui.css")


def test_routes_are_all_here(server: ServerProcess) -> None:
    """No documented route is missing from the table of methods below."""
    assert set(server.client.get("/openapi.json").json()["paths"]) == set(ROUTES)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        pytest.param(method, path.format(name="odd"), allowed, id=f"{method} {path}")
        for path, allowed in (ROUTES | dict.fromkeys(PAGES, "GET")).items()
        for method in METHODS
        if method != allowed
    ],
)
def test_method(client: httpx.Client, method: str, path: str, allowed: str) -> None:
    """A route asked with another method says which one it wants."""
    check_refused(client.request(method, path), WRONG_METHOD, (f"{method} {path}: want {allowed}",))


@pytest.mark.parametrize(
    ("target", "refusal", "words"),
    [
        *(
            pytest.param(path, UNKNOWN_PATH, (f"GET {path}", "GET /docs"), id=path)
            for path in (
                "/nope", "/v1", "/v1/", "/v1/attentions", "/V1/models", "/v1/attention/", "/v1/models/", "/health/live/",
                "//v1/models", "/v1/models/../models", "/v1/models/odd/1", "/docs/assets/../../service/errors.py",
                "/health", "/redoc",
            )
        ),
        pytest.param("/v1/models/..%2f..%2fetc%2fpasswd", UNKNOWN_PATH, ("/v1/models/../../etc/passwd",), id="%2f"),
        pytest.param("/docs/assets/%2e%2e/%2e%2e/x", UNKNOWN_PATH, ("/docs/assets/../../x",), id="%2e%2e in assets"),
        pytest.param("/v1/models/%2e%2e", UNKNOWN_MODEL, ("'..'",), id="%2e%2e for a model"),
        pytest.param("/v1/models/%00", UNKNOWN_MODEL, (r"'\x00'",), id="a zero byte for a model"),
        pytest.param("/v1/models/%ff", UNKNOWN_MODEL, ("is not served",), id="a model's name that is not UTF-8"),
        pytest.param("/v1/models/nope", UNKNOWN_MODEL, ("'nope'", "additive, attention, odd"), id="unknown model"),
        pytest.param("/" + "x" * 9999, UNKNOWN_PATH, ("GET /xxx",), id="a path of 9999 letters"),
    ],
)  # fmt: skip
def test_path(client: httpx.Client, target: str, refusal: Refusal, words: tuple[str, ...]) -> None:
    """A path that is no route, slash for slash, is not found; none leaves the served names."""
    check_refused(client.get("/", extensions={"target": target.encode()}), refusal, words)

"""safetensors bodies, against the library."""

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from service.codec.safetensors import SafetensorsCodec
from service.errors import InvalidDtype, MalformedBody, ServiceError
from service.tensors import AttentionOutput
from tests.strategies import INTEGER_DTYPES, Array, any_bits, examples, float_dtypes

CODEC = SafetensorsCodec()

drawn = examples(100)

WIRE_NAMES = {
    np.dtype(dtype): name
    for name, dtype in {
        "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "BOOL": np.bool_,
        "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16, "I32": np.int32, "U32": np.uint32,
        "I64": np.int64, "U64": np.uint64,
    }.items()
}  # fmt: skip
every_dtype = st.one_of(float_dtypes, st.sampled_from([np.dtype(dtype) for dtype in INTEGER_DTYPES.values()]))


def encoded(output: Array, weights: Array | None = None) -> bytes:
    """The body of an answer."""
    return b"".join(CODEC.encode(AttentionOutput(output, weights)))


def written(tensors: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """A body that the library wrote."""
    return save(tensors, metadata)


def body(header: Any, data: bytes = b"") -> bytes:
    """A body of this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (1, 1, 2), offsets: Any = (0, 8)) -> dict[str, Any]:
    """A tensor's entry in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class TestEncode:
    @given(output=any_bits(float_dtypes), weights=any_bits(float_dtypes, rank=4))
    @drawn
    def test_the_library_reads_the_same_bits(self, output: Array, weights: Array) -> None:
        """The library finds names, dtypes, shapes and every bit, nan payloads included."""
        read = dict(safetensors.deserialize(encoded(output, weights)))
        assert read.keys() == {"output", "weights"}
        for name, want in (("output", output), ("weights", weights)):
            assert read[name]["dtype"] == WIRE_NAMES[want.dtype]
            assert tuple(read[name]["shape"]) == want.shape
            assert bytes(read[name]["data"]) == want.tobytes()

    def test_tensors_are_not_copied(self) -> None:
        """Each tensor's own memory is a chunk of the body."""
        output, weights = np.ones((1, 2, 3), np.float32), np.ones((1, 5, 2, 7), np.float32)
        _, *chunks = CODEC.encode(AttentionOutput(output, weights))
        assert [np.shares_memory(np.frombuffer(chunk, np.uint8), tensor) for chunk, tensor in
                zip(chunks, (output, weights), strict=True)] == [True, True]  # fmt: skip

    def test_of_an_array_with_gaps(self) -> None:
        """An array that is not contiguous is written in C order."""
        output = np.arange(24, dtype=np.float32).reshape(2, 3, 4)[:, ::2, ::-1]
        ((_, read),) = safetensors.deserialize(encoded(output))
        assert bytes(read["data"]) == output.tobytes()

    def test_data_begins_at_a_multiple_of_8(self) -> None:
        """The header is padded, so that readers can map any dtype in place."""
        for width in range(1, 12):
            header, *_ = CODEC.encode(AttentionOutput(np.ones((1, 1, width), np.float32), None))
            assert len(header) % 8 == 0


class TestDecode:
    @given(queries=any_bits(every_dtype), keys=any_bits(every_dtype), lens=any_bits(every_dtype, rank=2))
    @drawn
    def test_what_the_library_wrote_is_read_bit_for_bit(self, queries: Array, keys: Array, lens: Array) -> None:
        """Every dtype the library writes is read with its shape and every bit."""
        sent = {"queries": queries, "keys": keys, "valid_lens": lens}
        tensors = CODEC.decode(written(sent)).tensors
        assert tensors.keys() == sent.keys()
        for name, want in sent.items():
            assert tensors[name].dtype == want.dtype
            assert tensors[name].shape == want.shape
            assert tensors[name].tobytes() == want.tobytes()

    @pytest.mark.parametrize("kind", [bytes, bytearray], ids=["bytes", "bytearray"])
    def test_tensors_are_views_of_the_body(self, kind: Any) -> None:
        """Reading copies nothing, whatever the alignment."""
        sent = {"queries": np.ones((1, 2, 3), np.float32), "valid_lens": np.ones((1, 1), np.int8)}
        whole = kind(written(sent))
        memory = np.frombuffer(whole, np.uint8)
        for name, tensor in CODEC.decode(whole).tensors.items():
            assert np.shares_memory(tensor, memory), name

    def test_metadata_is_ignored(self) -> None:
        """`__metadata__` is no tensor."""
        sent = written({"queries": np.ones((1, 1, 2), np.float32)}, {"format": "pt"})
        assert list(CODEC.decode(sent).tensors) == ["queries"]

    def test_order_of_the_header_means_nothing(self) -> None:
        """Tensors are where their offsets say, in whatever order the header names them."""
        data = struct.pack("<4f", 1, 2, 3, 4)
        tensors = CODEC.decode(body({"keys": entry(offsets=(8, 16)), "queries": entry()}, data)).tensors
        assert tensors["queries"].tolist() == [[[1, 2]]]
        assert tensors["keys"].tolist() == [[[3, 4]]]

    def test_an_empty_header_is_no_tensor(self) -> None:
        """A file of nothing is read as nothing; that queries are missing is not the format's business."""
        assert CODEC.decode(body({})).tensors == {}

    @pytest.mark.parametrize(
        ("sent", "error", "message"),
        [
            pytest.param(b"", MalformedBody, "body: 0 bytes are no safetensors file", id="empty"),
            pytest.param(b"\2\0\0\0\0\0\0", MalformedBody, "body: 7 bytes", id="cut_in_the_length"),
            pytest.param(body({"queries": entry()})[:20], MalformedBody, "header length", id="cut_in_the_header"),
            pytest.param(
                struct.pack("<Q", 2**64 - 1), MalformedBody, "header length is 18446744073709551615", id="huge"
            ),
            pytest.param(body(b" " * 70_000), MalformedBody, "header length is 70000, want at most 65536", id="long"),
            pytest.param(body(b"{"), MalformedBody, "the safetensors header is not JSON", id="no_json"),
            pytest.param(body(b'{"a":"\xff"}'), MalformedBody, "is not JSON", id="no_utf8"),
            pytest.param(body(b"[" * 5000), MalformedBody, "is not JSON", id="bottomless"),
            pytest.param(body([]), MalformedBody, "header is no JSON object", id="list"),
            pytest.param(body({"keys": []}), MalformedBody, "keys: header entry wants", id="entry_of_another_kind"),
            pytest.param(body({"keys": {"dtype": "F32"}}), MalformedBody, "keys: header entry", id="entry_cut"),
            pytest.param(
                body({"keys": {**entry(), "x": 1}}, bytes(8)), MalformedBody, "keys: header entry", id="entry_longer"
            ),
            pytest.param(body({"keys": entry("F8")}, bytes(8)), InvalidDtype, "keys: dtype is 'F8'", id="dtype"),
            pytest.param(body({"keys": entry(7)}, bytes(8)), InvalidDtype, "keys: dtype is '7'", id="dtype_number"),
            pytest.param(body({"keys": entry(["F32"])}, bytes(8)), InvalidDtype, "keys: dtype", id="dtype_list"),
            pytest.param(body({"keys": entry(shape=[2.0])}, bytes(8)), MalformedBody, "keys: shape", id="float_shape"),
            pytest.param(body({"keys": entry(shape=[-2])}, bytes(8)), MalformedBody, "keys: shape", id="negative"),
            pytest.param(
                body({"keys": entry(shape=[True, 2])}, bytes(8)), MalformedBody, "keys: shape", id="bool_shape"
            ),
            pytest.param(body({"keys": entry(shape=[1] * 9)}, bytes(8)), MalformedBody, "keys: shape", id="nine_axes"),
            pytest.param(body({"keys": entry(shape=None)}, bytes(8)), MalformedBody, "keys: shape", id="no_shape"),
            pytest.param(
                body({"keys": entry(offsets=[0, 4, 8])}, bytes(8)),
                MalformedBody,
                "keys: shape and data_off",
                id="three",
            ),
            pytest.param(
                body({"keys": entry(offsets=(8, 0))}, bytes(8)), MalformedBody, "keys: data_off", id="backward"
            ),
            pytest.param(body({"keys": entry()}, bytes(7)), MalformedBody, "keys: .* of 7 bytes", id="data_cut"),
            pytest.param(body({"keys": entry(shape=[3])}, bytes(8)), MalformedBody, "want 12 bytes", id="shape_larger"),
            pytest.param(
                body({"keys": entry()}, bytes(9)), MalformedBody, "1 bytes belong to no tensor", id="left_over"
            ),
            pytest.param(
                body({"keys": entry(offsets=(1, 9))}, bytes(9)),
                MalformedBody,
                "keys: data begins at 1, want 0",
                id="gap",
            ),
            pytest.param(
                body({"keys": entry(), "values": entry()}, bytes(8)),
                MalformedBody,
                "no gap and no overlap",
                id="overlap",
            ),
            pytest.param(
                body({"keys": entry(shape=[0, 2**62], offsets=(0, 0))}),
                MalformedBody,
                "keys: shape",
                id="larger_than_any",
            ),
            pytest.param(
                body({"keys": entry(shape=[0, 2**64 - 1], offsets=(0, 0))}),
                MalformedBody,
                "keys: shape",
                id="beyond_int64",
            ),
        ],
    )
    def test_refuses(self, sent: bytes, error: type[ServiceError], message: str) -> None:
        """A header that does not describe its data exactly is refused, naming the tensor."""
        with pytest.raises(error, match=message):
            CODEC.decode(sent)

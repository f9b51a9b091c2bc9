"""JSON bodies, against Python's own reader and writer."""

import json
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from service.codec.json import JsonCodec
from service.errors import InvalidDtype, InvalidShape, InvalidValidLens, MalformedBody, ServiceError
from service.sequences import Sequences
from service.tensors import INPUT_NAMES, AttentionOutput
from tests.strategies import FLOAT_DTYPES, Array, examples, json_text, json_values

CODEC = JsonCodec()

drawn = examples(100)
shapes = array_shapes(min_dims=3, max_dims=3, max_side=5)


def finite(dtype: type[np.floating[Any]], shape: st.SearchStrategy[tuple[int, ...]] = shapes) -> Any:
    """Arrays of finite numbers, subnormals and both zeros included."""
    bits = np.finfo(dtype).bits
    return arrays(dtype, shape, elements=st.floats(allow_nan=False, allow_infinity=False, width=bits))


def bits(tensor: Array) -> Array:
    """The tensor's bytes, so that -0.0 and 0.0 are two things."""
    return np.ascontiguousarray(tensor).view(np.uint8)


def encoded(output: Array, weights: Array | None = None) -> bytes:
    """The body of an answer."""
    return b"".join(CODEC.encode(AttentionOutput(output, weights)))


class TestEncode:
    @given(output=finite(np.float32), weights=finite(np.float32, array_shapes(min_dims=4, max_dims=4, max_side=3)))
    @drawn
    def test_python_reads_the_same_bits(self, output: Array, weights: Array) -> None:
        """What `json.loads` reads is, rounded to float32, the answer bit for bit."""
        read = json.loads(encoded(output, weights))
        assert list(read) == ["output", "weights"]
        for name, want in (("output", output), ("weights", weights)):
            got = np.array(read[name], np.float32)
            assert got.shape == want.shape
            np.testing.assert_array_equal(bits(got), bits(want))

    @given(value=st.floats(allow_nan=False, allow_infinity=False, width=32))
    @examples(300)
    def test_numbers_are_as_short_as_can_be(self, value: float) -> None:
        """Each number is the shortest decimal that gives the same float32, which is numpy's, too."""
        single = np.float32(value)
        ((((text,),),),) = json.loads(encoded(np.array([[[single]]])), parse_float=str).values()
        assert Decimal(text) == Decimal(str(single))

    @pytest.mark.parametrize("dtype", FLOAT_DTYPES.values(), ids=FLOAT_DTYPES.keys())
    def test_answer_of_any_dtype(self, dtype: Any) -> None:
        """An answer in another dtype is written as the float32 numbers that it was cast from, or to."""
        output = np.array([[[1 / 3, -0.0, 65504, 1e-7]]], np.float32).astype(dtype)
        (got,) = json.loads(encoded(output)).values()
        np.testing.assert_array_equal(np.array(got, np.float32).astype(dtype), output, strict=True)

    def test_packed_answer_is_written_entry_by_entry(self) -> None:
        """The rows of a packed output stand in the lists of their entries, as the queries did."""
        output = AttentionOutput(np.array([[1, 2], [3, 4], [5, 6]], np.float32), None, np.array([1, 2]))
        assert b"".join(CODEC.encode(output)) == b'{"output":[[[1.0,2.0]],[[3.0,4.0],[5.0,6.0]]]}'

    def test_weights_are_left_out_unless_asked_for(self) -> None:
        """No weights, no field."""
        assert encoded(np.ones((1, 1, 2), np.float32)) == b'{"output":[[[1.0,1.0]]]}'


class TestDecode:
    @given(queries=st.one_of(finite(np.float32), finite(np.float64)), keys=finite(np.float32))
    @drawn
    def test_what_python_wrote_is_read_bit_for_bit(self, queries: Array, keys: Array) -> None:
        """Numbers that `json.dumps` wrote are read as numpy casts them to float32, in their shape."""
        tensors = CODEC.decode(json_text({"queries": queries.tolist(), "keys": keys.tolist()})).tensors
        with np.errstate(over="ignore"):
            wanted = {"queries": queries.astype(np.float32), "keys": keys}
        assert tensors.keys() == wanted.keys()
        for name, want in wanted.items():
            assert tensors[name].dtype == np.float32
            assert tensors[name].shape == want.shape
            np.testing.assert_array_equal(bits(tensors[name]), bits(want))

    @given(
        lens=arrays(np.int64, array_shapes(max_dims=2, max_side=5), elements=st.integers(-(2**63), 2**63 - 1)),
        indent=st.sampled_from([None, 0, 3]),
    )
    @drawn
    def test_lengths_are_exact(self, lens: Array, indent: int | None) -> None:
        """valid_lens are int64, exact beyond 2**53, whatever white space stands between."""
        body = json.dumps({"valid_lens": lens.tolist()}, indent=indent).encode()
        np.testing.assert_array_equal(CODEC.decode(body).tensors["valid_lens"], lens, strict=True)

    @given(data=st.data())
    @examples(400)
    def test_any_value_is_read_as_python_reads_it_or_refused(self, data: st.DataObject) -> None:
        """An even nest of numbers is exactly that array, entries of unequal length are; everything else is refused."""
        names = st.sampled_from(INPUT_NAMES)
        document = data.draw(st.dictionaries(names, json_values(), max_size=3))
        wanted = {name: array_of(name, value) for name, value in document.items() if value is not None}
        if any(want is None for want in wanted.values()):
            with pytest.raises(ServiceError):
                CODEC.decode(json_text(document))
            return
        tensors = CODEC.decode(json_text(document)).tensors
        assert tensors.keys() == wanted.keys()
        for name, want in wanted.items():
            got = tensors[name]
            if isinstance(want, Sequences):
                assert isinstance(got, Sequences)
                assert got.lengths.tolist() == want.lengths.tolist()
                np.testing.assert_array_equal(got.data, want.data, strict=True)
            else:
                np.testing.assert_array_equal(got, want, strict=True)

    def test_entries_may_differ_in_length(self) -> None:
        """Lists of the second axis may be of different lengths: they are the entries, one after the other."""
        body = b'{"queries":[[[1,2]],[[3,4],[5,6]]],"query_lens":[1],"valid_lens":[1,2]}'
        queries = CODEC.decode(body).tensors["queries"]
        assert isinstance(queries, Sequences)
        assert queries.lengths.tolist() == [1, 2]
        assert queries.entry(1).tolist() == [[3, 4], [5, 6]]

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b'{"queries":[[[1,2.0,3e0]]]}', id="integers_and_exponents"),
            pytest.param(b' {\n"queries" :\t[ [ [ 1, 2, 3 ] ] ] }\r\n', id="white_space"),
            pytest.param(b'{"\\u0071ueries":[[[1,2,3]]]}', id="escaped_name"),
            pytest.param(b'{"keys":null,"queries":[[[1,2,3]]],"values":null}', id="null_is_absent"),
            pytest.param(bytearray(b'{"queries":[[[1,2,3]]]}'), id="bytearray"),
        ],
    )
    def test_ways_to_write_one_thing(self, body: bytes) -> None:
        """JSON's freedoms are the client's."""
        tensors = CODEC.decode(body).tensors
        assert list(tensors) == ["queries"]
        np.testing.assert_array_equal(tensors["queries"], np.array([[[1, 2, 3]]], np.float32), strict=True)

    def test_number_beyond_float32_is_infinite(self) -> None:
        """What float32 cannot hold becomes infinite, for the parser to refuse where it counts."""
        assert CODEC.decode(b'{"queries":[[[1e39,-1e39]]]}').tensors["queries"].tolist() == [[[np.inf, -np.inf]]]

    @pytest.mark.parametrize(
        ("body", "error", "message"),
        [
            pytest.param(b"", MalformedBody, "body: not JSON", id="empty"),
            pytest.param(b'{"queries":[[[1]]]', MalformedBody, "body: not JSON: ", id="cut_off"),
            pytest.param(b'{"queries":[[[NaN]]]}', MalformedBody, "NaN and Infinity are none", id="nan"),
            pytest.param(b'{"queries":[[[1,]]]}', MalformedBody, "body: not JSON", id="comma"),
            pytest.param(b'{"queries":[[[1e999]]]}', MalformedBody, "range of float64", id="beyond_float64"),
            pytest.param(b'{"queries":[[["\xff"]]]}', MalformedBody, "body: not JSON", id="not_utf8"),
            pytest.param(b'{"queries":[[[1]]]} {}', MalformedBody, "body: not JSON", id="two_documents"),
            pytest.param(b'{"queries":' + b"[" * 9999, MalformedBody, "body: not JSON", id="bottomless"),
            pytest.param(b"[[[1]]]", MalformedBody, "want a JSON object with queries", id="list"),
            pytest.param(b'"queries"', MalformedBody, "want a JSON object", id="string"),
            pytest.param(b'{"query":1}', MalformedBody, "'query'.*did you mean queries", id="unknown_name"),
            pytest.param(b'{"queries":[[[1]]],"queries":[[[1]]]}', MalformedBody, "twice", id="name_twice"),
            pytest.param(b'{"queries":1}', InvalidDtype, "queries: want nested lists of numbers, got 1", id="number"),
            pytest.param(b'{"queries":"[[[1]]]"}', InvalidDtype, "queries: .*got a string", id="text"),
            pytest.param(b'{"queries":{"a":1}}', InvalidDtype, "queries: .*got an object", id="object"),
            pytest.param(b'{"queries":[[["1"]]]}', InvalidDtype, "queries: holds a string", id="string_within"),
            pytest.param(b'{"queries":[[[true]]]}', InvalidDtype, "queries: holds a string, boolean", id="bool_within"),
            pytest.param(b'{"queries":[[[null]]]}', InvalidDtype, "queries: holds", id="null_within"),
            pytest.param(b'{"queries":[[[1,2],[3]]]}', InvalidShape, "queries: .*differ in length", id="uneven"),
            pytest.param(b'{"queries":[[[1],[2,3]],[[3]]]}', InvalidShape, "queries: .*differ", id="ragged_and_uneven"),
            pytest.param(b'{"queries":[[1,2],[3]]}', InvalidShape, "queries: .*differ", id="uneven_matrix"),
            pytest.param(b'{"queries":[[[[1]]],[[[2]],[[3]]]]}', InvalidShape, "queries: ", id="ragged_and_deep"),
            pytest.param(b'{"queries":[[[1,2]],[["[",2],[3,4]]]}', InvalidDtype, "queries: ", id="ragged_text"),
            pytest.param(b'{"queries":[[[1]],[[2],[[3]]]]}', InvalidShape, "depth", id="ragged_and_hidden"),
            pytest.param(b'{"queries":[[[1]],2]}', InvalidShape, "queries: a number stands where", id="shallow"),
            pytest.param(b'{"queries":[[[1,[2]]]]}', InvalidShape, "depth", id="deep"),
            pytest.param(b'{"queries":[[[1,[]]]]}', InvalidShape, "depth|fill", id="deep_and_empty"),
            pytest.param(b'{"queries":[[[[[[[[[1]]]]]]]]]}', InvalidShape, "more than 8 axes", id="nine_axes"),
            pytest.param(b'{"valid_lens":3}', InvalidDtype, "valid_lens: .*got 3", id="one_length"),
            pytest.param(
                b'{"valid_lens":[1.0]}', InvalidDtype, "valid_lens: want integers, got 1.0", id="float_length"
            ),
            pytest.param(b'{"valid_lens":[true]}', InvalidDtype, "valid_lens: .*got a boolean", id="boolean_length"),
            pytest.param(b'{"valid_lens":["1"]}', InvalidDtype, "valid_lens: .*got a string", id="text_length"),
            pytest.param(b'{"valid_lens":[1,[2]]}', InvalidShape, "valid_lens: ", id="uneven_lengths"),
            pytest.param(b'{"valid_lens":[[1],[2,3]]}', InvalidShape, "valid_lens: ", id="ragged_lengths"),
            pytest.param(
                b'{"valid_lens":[9223372036854775808]}',
                InvalidValidLens,
                "valid_lens: 9223372036854775808 is beyond",
                id="beyond_int64",
            ),
        ],
    )
    def test_refuses(self, body: bytes, error: type[ServiceError], message: str) -> None:
        """What is no object of even nests of numbers is refused, naming the tensor."""
        with pytest.raises(error, match=message):
            CODEC.decode(body)


def array_of(name: str, value: Any) -> Array | Sequences | None:
    """The array that a JSON value is, as Python reads it, or its entries where they differ; None if it is neither."""
    shape = shape_of(value)
    if shape is None and not name.endswith("_lens") and isinstance(value, list):
        return entries_of(value)
    if shape is None or not 1 <= len(shape) <= 8:
        return None
    if not name.endswith("_lens"):
        with np.errstate(over="ignore"):
            return np.array(value, np.float64).astype(np.float32).reshape(shape)
    flat = np.array(value, object).reshape(-1)
    if any(type(entry) is not int or not -(2**63) <= entry < 2**63 for entry in flat):
        return None
    return np.array(value, np.int64).reshape(shape)


def entries_of(value: list[Any]) -> Sequences | None:
    """Entries of unequal length, each a list of lists of as many numbers; None if it is none of that."""
    shapes = [shape_of(entry) for entry in value]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or any(len(shape) != 2 and shape != (0,) for shape in known):
        return None
    if len({shape[1] for shape in known if len(shape) == 2}) != 1:
        return None
    rows = [row for entry in value for row in entry]
    with np.errstate(over="ignore"):
        return Sequences.ragged(
            np.array(rows, np.float64).astype(np.float32), np.array([len(entry) for entry in value])
        )


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of an even nest of numbers; None if it is none."""
    if not isinstance(value, list):
        return () if type(value) in (int, float) else None
    shapes = {shape_of(entry) for entry in value} or {()}
    (inner, *others) = shapes
    return None if others or inner is None else (len(value), *inner)

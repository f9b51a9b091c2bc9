"""Judging a request's tensors, and casting an answer's. B 2, Q 3, K 5; inputs of 11, 13 and 17 (`LAYER`)."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.artifact import Layer
from service.errors import (
    EmptyAxis,
    InvalidDtype,
    InvalidShape,
    InvalidValidLens,
    MalformedBody,
    NonFinite,
    Overflow,
    ServiceError,
)
from service.sequences import Sequences
from service.tensors import AttentionInputs, AttentionOutput, WireTensors
from tests.strategies import FLOAT_DTYPES, INTEGER_DTYPES, LAYER, Array, Request, examples, float_dtypes, requests

B, Q, K = 2, 3, 5
SELF_LAYER = LAYER.model_copy(update={"key_size": 11, "value_size": 11})

drawn = examples(60)


def tensors(**changed: Any) -> dict[str, Array]:
    """A valid request's tensors, some of them changed; None leaves one out."""
    valid = {
        "queries": np.ones((B, Q, LAYER.query_size), np.float32),
        "keys": np.ones((B, K, LAYER.key_size), np.float32),
        "values": np.ones((B, K, LAYER.value_size), np.float32),
        "valid_lens": np.array([2, 5]),
    }
    return {name: tensor for name, tensor in {**valid, **changed}.items() if tensor is not None}


def parse(layer: Layer = LAYER, **changed: Any) -> AttentionInputs:
    """The inputs of a request with some tensors changed."""
    return AttentionInputs.parse(WireTensors(tensors(**changed)), layer)


def spoiled(shape: tuple[int, ...], where: tuple[int, ...], value: float, dtype: Any = np.float32) -> Array:
    """Ones, and one other value."""
    tensor = np.ones(shape, dtype)
    tensor[where] = value
    return tensor


class TestParse:
    @given(request=requests(LAYER, dtypes=float_dtypes))
    @drawn
    def test_keeps_what_was_sent(self, request: Request) -> None:
        """Tensors are the sent ones in float32, contiguous; lengths are one a query; the dtype is the queries'."""
        inputs = AttentionInputs.parse(request.wire(), LAYER)
        for name in ("queries", "keys", "values"):
            parsed, sent = getattr(inputs, name), getattr(request, name)
            assert parsed.data.dtype == np.float32
            assert parsed.data.flags.c_contiguous
            np.testing.assert_array_equal(parsed.padded(), sent.astype(np.float32))
        assert inputs.dtype == request.queries.dtype
        assert not inputs.packed
        assert inputs.valid_lens.dtype == np.int64
        np.testing.assert_array_equal(inputs.valid_lens, request.lengths.reshape(-1))

    @given(request=requests(LAYER))
    @drawn
    def test_extents_are_how_many_keys_an_entry_reads(self, request: Request) -> None:
        """The extent of an entry is its largest length, or all K where some query of it has length 0."""
        inputs = AttentionInputs.parse(request.wire(), LAYER)
        want = [request.num_kv if 0 in lengths else max(lengths) for lengths in request.lengths.tolist()]
        assert inputs.extents.dtype == np.int64
        assert inputs.extents.tolist() == want
        assert inputs.shortest.tolist() == request.lengths.min(1).tolist()

    def test_copies_no_float32(self) -> None:
        """Float32 arrays in C order are taken as they are."""
        sent = tensors()
        inputs = parse(**sent)
        assert all(np.shares_memory(getattr(inputs, name).data, sent[name]) for name in ("queries", "keys", "values"))

    def test_absent_keys_are_the_queries(self) -> None:
        """Without keys and values all three are one array, so nothing is converted or checked twice."""
        inputs = parse(SELF_LAYER, keys=None, values=None, valid_lens=None)
        assert inputs.keys is inputs.queries
        assert inputs.values is inputs.keys
        np.testing.assert_array_equal(inputs.valid_lens, np.full(B * Q, Q))

    def test_absent_values_are_the_keys(self) -> None:
        """Without values the keys serve as them."""
        layer = LAYER.model_copy(update={"value_size": LAYER.key_size})
        inputs = parse(layer, values=None)
        assert inputs.values is inputs.keys
        assert inputs.keys is not inputs.queries

    def test_absent_keys_with_values(self) -> None:
        """Values may be sent without keys; there is then one a query."""
        layer = LAYER.model_copy(update={"key_size": LAYER.query_size})
        inputs = parse(layer, keys=None, values=np.ones((B, Q, LAYER.value_size), np.float32), valid_lens=None)
        assert inputs.keys is inputs.queries
        assert inputs.values.shape == (B, Q, LAYER.value_size)

    @pytest.mark.parametrize("dtype", INTEGER_DTYPES.values(), ids=INTEGER_DTYPES.keys())
    def test_lengths_of_any_integer_dtype(self, dtype: Any) -> None:
        """valid_lens may have any integer dtype."""
        inputs = parse(valid_lens=np.array([0, 5], dtype))
        np.testing.assert_array_equal(inputs.valid_lens, [0, 0, 0, 5, 5, 5])

    @pytest.mark.parametrize("dtype", FLOAT_DTYPES.values(), ids=FLOAT_DTYPES.keys())
    def test_foreign_byte_order_is_read(self, dtype: Any) -> None:
        """The byte order is the wire's business: values and dtype of the answer are native."""
        queries = np.full((B, Q, LAYER.query_size), 1.5).astype(np.dtype(dtype).newbyteorder(">"))
        inputs = parse(queries=queries)
        assert inputs.dtype == np.dtype(dtype)
        assert (inputs.queries.data == 1.5).all()

    def test_huge_sums_of_finite_values_are_finite(self) -> None:
        """Values whose sum overflows are finite all the same."""
        values = parse(values=np.full((B, K, LAYER.value_size), 3e38, np.float32)).values
        assert (values.data == np.float32(3e38)).all()

    @pytest.mark.parametrize("name", ["keys", "values"])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300], ids=["nan", "inf", "minus_inf", "too_large"])
    def test_padding_may_hold_anything(self, name: str, value: float) -> None:
        """Beyond the valid length nothing is judged, a float64 beyond float32 included."""
        size = {"keys": LAYER.key_size, "values": LAYER.value_size}[name]
        assert parse(**{name: spoiled((B, K, size), (0, slice(2, None)), value, np.float64)}).extents.tolist() == [2, 5]


REFUSALS = [
    pytest.param(
        {"query": np.ones(3)},
        MalformedBody,
        "unknown tensor 'query'.*did you mean queries or query_lens.$",
        id="unknown",
    ),
    pytest.param({"x" * 99: np.ones(3)}, MalformedBody, f"unknown tensor '{'x' * 64}': want", id="unknown_and_long"),
    pytest.param({"queries": None}, MalformedBody, "queries: missing; got keys, values, valid_lens", id="no_queries"),
    pytest.param(
        {"queries": np.ones((B, Q, 11), np.int32)},
        InvalidDtype,
        "queries: dtype is int32, want float16, bfloat16, float32 or float64",
        id="integer_queries",
    ),
    pytest.param({"keys": np.ones((B, K, 13), bool)}, InvalidDtype, "keys: dtype is bool", id="boolean_keys"),
    pytest.param(
        {"values": np.ones((B, K, 17), np.complex64)}, InvalidDtype, "values: dtype is complex64", id="complex_values"
    ),
    pytest.param(
        {"keys": np.ones((B, K, 13), np.longdouble)}, InvalidDtype, "keys: dtype is float128", id="long_double_keys"
    ),
    pytest.param(
        {"keys": np.ones((B, K, 13), ml_dtypes.float8_e5m2)}, InvalidDtype, "keys: dtype is float8", id="float8_keys"
    ),
    pytest.param(
        {"queries": np.ones((0, Q, 11), np.float32)}, EmptyAxis, r"queries: shape is \(0, 3, 11\)", id="no_batch"
    ),
    pytest.param({"keys": np.ones((B, 0, 13), np.float32)}, EmptyAxis, r"keys: shape is \(2, 0, 13\)", id="no_keys"),
    pytest.param({"values": np.ones((B, K, 0), np.float32)}, EmptyAxis, "values: shape", id="no_features"),
    pytest.param(
        {"queries": np.ones((Q, 11), np.float32)},
        InvalidShape,
        r"queries: shape \(3, 11\) has 2 axes, want 3: batch, length, features",
        id="two_axes",
    ),
    pytest.param({"keys": np.ones((1, B, K, 13), np.float32)}, InvalidShape, "keys: .* has 4 axes", id="four_axes"),
    pytest.param({"values": np.array(1, np.float32)}, InvalidShape, r"values: .* has 0 axes", id="no_axes"),
    pytest.param(
        {"queries": np.ones((B, Q, 7), np.float32)},
        InvalidShape,
        "queries: last axis is 7, the model expects 11",
        id="query_size",
    ),
    pytest.param({"keys": np.ones((B, K, 17), np.float32)}, InvalidShape, "keys: last axis is 17.*13", id="key_size"),
    pytest.param(
        {"values": np.ones((B, K, 13), np.float32)}, InvalidShape, "values: last axis is 13.*17", id="value_size"
    ),
    pytest.param(
        {"keys": None, "values": None},
        InvalidShape,
        r"keys \(absent, so the queries serve\): last axis is 11, the model expects 13",
        id="queries_as_keys",
    ),
    pytest.param(
        {"values": None},
        InvalidShape,
        r"values \(absent, so the keys serve\): last axis is 13, the model expects 17",
        id="keys_as_values",
    ),
    pytest.param(
        {"keys": np.ones((7, K, 13), np.float32)}, InvalidShape, "keys: batch is 7, queries have 2", id="key_batch"
    ),
    pytest.param(
        {"values": np.ones((7, K, 17), np.float32)}, InvalidShape, "values: batch is 7, queries", id="value_batch"
    ),
    pytest.param(
        {"values": np.ones((B, 7, 17), np.float32)},
        InvalidShape,
        "values: 7 of them, but 5 keys; want one value a key",
        id="values_without_keys",
    ),
    pytest.param(
        {"valid_lens": np.array([2.0, 5.0])},
        InvalidDtype,
        "valid_lens: dtype is float64, want integers",
        id="float_lens",
    ),
    pytest.param({"valid_lens": np.array([True, False])}, InvalidDtype, "valid_lens: dtype is bool", id="bool_lens"),
    pytest.param({"valid_lens": np.ones((B, 0), int)}, EmptyAxis, r"valid_lens: shape is \(2, 0\)", id="empty_lens"),
    pytest.param(
        {"valid_lens": np.array([1, 2, 3])},
        InvalidShape,
        r"valid_lens: shape is \(3,\), want \(2,\) or \(2, 3\)",
        id="lens_of_another_batch",
    ),
    pytest.param({"valid_lens": np.ones((B, K), int)}, InvalidShape, r"valid_lens: shape is \(2, 5\)", id="lens_a_key"),
    pytest.param({"valid_lens": np.array(2)}, InvalidShape, r"valid_lens: shape is \(\)", id="scalar_lens"),
    pytest.param({"valid_lens": np.ones((B, Q, 1), int)}, InvalidShape, "valid_lens: shape", id="lens_of_three_axes"),
    pytest.param(
        {"valid_lens": np.array([2, K + 1])},
        InvalidValidLens,
        r"valid_lens\[1\]: got 6, want 0 to 5, the number of keys",
        id="beyond_the_keys",
    ),
    pytest.param(
        {"valid_lens": np.array([[0, 1, 2], [3, -1, 5]], np.int8)},
        InvalidValidLens,
        r"valid_lens\[1, 1\]: got -1, want 0 to 5",
        id="negative",
    ),
    pytest.param(
        {"valid_lens": np.array([2**64 - 1, 0], np.uint64)},
        InvalidValidLens,
        rf"valid_lens\[0\]: got {2**64 - 1}",
        id="beyond_int64",
    ),
    pytest.param(
        {"queries": spoiled((B, Q, 11), (1, 2, 7), np.nan)},
        NonFinite,
        r"queries\[1\]\[2\]\[7\]: nan is not finite in float32",
        id="nan_query",
    ),
    pytest.param(
        {"keys": spoiled((B, K, 13), (0, 1, 11), -np.inf)}, NonFinite, r"keys\[0\]\[1\]\[11\]: -inf", id="inf_key"
    ),
    pytest.param(
        {"values": spoiled((B, K, 17), (1, 4, 0), 1e39, np.float64)},
        NonFinite,
        r"values\[1\]\[4\]\[0\]: 1e\+39 is not finite in float32",
        id="value_beyond_float32",
    ),
    pytest.param(
        {"values": spoiled((B, K, 17), (0, 4, 3), np.inf), "valid_lens": np.array([[1, 0, 1], [1, 1, 1]])},
        NonFinite,
        r"values\[0\]\[4\]\[3\]: inf",
        id="value_that_length_0_averages",
    ),
]


class TestRefusals:
    @pytest.mark.parametrize(("changed", "error", "message"), REFUSALS)
    def test_says_what_where_got_want(self, changed: dict[str, Any], error: type[ServiceError], message: str) -> None:
        """A request that means nothing is refused by the error of that name, with what, where, got and want."""
        with pytest.raises(error, match=f"^{message}"):
            parse(**changed)

    def test_nothing_at_all(self) -> None:
        """No tensor is no request."""
        with pytest.raises(MalformedBody, match="queries: missing; got no tensor"):
            AttentionInputs.parse(WireTensors({}), LAYER)

    @given(
        data=st.dictionaries(
            st.sampled_from(["queries", "keys", "values", "valid_lens", "query_lens"]),
            st.tuples(
                st.lists(st.sampled_from([0, 1, 2, 3, 11, 13, 17]), max_size=4),
                st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.uint64, bool, np.complex64, "S3"]),
            ),
        )
    )
    @examples(300)
    def test_any_shapes_and_dtypes_are_inputs_or_a_service_error(self, data: dict[str, Any]) -> None:
        """Whatever is sent either parses to what the class promises, or is refused by a ServiceError."""
        wire = WireTensors({name: np.zeros(shape, dtype) for name, (shape, dtype) in data.items()})
        try:
            inputs = AttentionInputs.parse(wire, LAYER)
        except ServiceError:
            return
        batch, num_kv = len(inputs.queries), inputs.keys.shape[1]
        assert inputs.keys.shape == (batch, num_kv, LAYER.key_size)
        assert inputs.values.shape == (batch, num_kv, LAYER.value_size)
        assert inputs.valid_lens.shape == (inputs.queries.lengths.sum(),)


PACKED = {
    "queries": np.ones((5, 11), np.float32),
    "query_lens": np.array([3, 2]),
    "keys": np.ones((11, 13), np.float32),
    "values": np.ones((11, 17), np.float32),
    "valid_lens": np.array([4, 7]),
}


class TestPacked:
    def test_entries_are_one_after_the_other(self) -> None:
        """Queries are cut by query_lens, keys and values by valid_lens, without a copy; the answer is packed."""
        inputs = parse(**PACKED)
        assert inputs.packed
        assert [len(inputs.queries.entry(entry)) for entry in range(B)] == [3, 2]
        assert [len(inputs.keys.entry(entry)) for entry in range(B)] == [4, 7]
        assert inputs.valid_lens.tolist() == [4, 4, 4, 7, 7]
        assert inputs.extents.tolist() == [4, 7]
        for name in ("queries", "keys", "values"):
            assert np.shares_memory(getattr(inputs, name).data, PACKED[name])

    def test_padded_queries_take_packed_keys(self) -> None:
        """Each side may be packed for itself; the answer is as the queries are."""
        inputs = parse(**PACKED | {"queries": np.ones((B, Q, 11), np.float32), "query_lens": None})
        assert not inputs.packed
        assert inputs.valid_lens.tolist() == [4, 4, 4, 7, 7, 7]

    def test_packed_queries_take_padded_keys(self) -> None:
        """Padded keys keep their lengths of 0 to K."""
        padded = {"keys": np.ones((B, K, 13), np.float32), "values": np.ones((B, K, 17), np.float32)}
        inputs = parse(**PACKED | padded | {"valid_lens": np.array([0, 4])})
        assert inputs.packed
        assert inputs.valid_lens.tolist() == [0, 0, 0, 4, 4]
        assert inputs.extents.tolist() == [5, 4]

    @pytest.mark.parametrize(
        ("valid_lens", "lens"),
        [
            pytest.param(None, [3, 3, 3, 2, 2], id="absent"),
            pytest.param(np.array([1, 0]), [1, 1, 1, 0, 0], id="shorter"),
        ],
    )
    def test_self_attention(self, valid_lens: Array | None, lens: list[int]) -> None:
        """Without keys each entry attends to its own queries; lengths may be shorter, and 0."""
        packed = {"queries": PACKED["queries"], "query_lens": PACKED["query_lens"]}
        inputs = parse(SELF_LAYER, **packed, keys=None, values=None, valid_lens=valid_lens)
        assert inputs.values is inputs.keys is inputs.queries
        assert inputs.valid_lens.tolist() == lens

    def test_entries_of_unequal_lists_are_sequences(self) -> None:
        """What a codec hands over as lists of different length is taken as it is; valid_lens may be shorter."""
        keys = Sequences.ragged(PACKED["keys"], np.array([4, 7]))
        values = Sequences.ragged(PACKED["values"], np.array([4, 7]))
        inputs = parse(keys=keys, values=values, valid_lens=np.array([0, 5]))
        assert inputs.valid_lens.tolist() == [0, 0, 0, 5, 5, 5]
        assert inputs.extents.tolist() == [4, 5]
        assert parse(keys=keys, values=values, valid_lens=None).extents.tolist() == [4, 7]

    def test_nan_is_found_in_its_entry(self) -> None:
        """A value that is not finite is named by entry and position."""
        with pytest.raises(NonFinite, match=r"^keys\[1\]\[2\]\[7\]: nan is not finite in float32"):
            parse(**PACKED | {"keys": spoiled((11, 13), (6, 7), np.nan)})

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            pytest.param(
                {"query_lens": None},
                InvalidShape,
                r"queries: shape \(5, 11\) has 2 axes, want 3.* \(or 2 where they are packed, with query_lens",
                id="no_query_lens",
            ),
            pytest.param(
                {"query_lens": np.array([3, 3])},
                InvalidShape,
                "query_lens: sum to 6, but queries have 5 rows",
                id="query_lens_beyond",
            ),
            pytest.param(
                {"query_lens": np.array([5, 0])}, InvalidShape, r"query_lens\[1\]: got 0, want 1 to 5", id="no_query"
            ),
            pytest.param(
                {"query_lens": np.array([2.0, 3.0])}, InvalidDtype, "query_lens: dtype is float64", id="float_lens"
            ),
            pytest.param(
                {"query_lens": np.array([-(2**63), 5 - 2**63])}, InvalidShape, r"query_lens\[0\]: got -9", id="wrapping"
            ),
            pytest.param(
                {"queries": np.ones((B, Q, 11), np.float32)},
                InvalidShape,
                "query_lens: only packed queries",
                id="query_lens_of_padded",
            ),
            pytest.param(
                {"valid_lens": None},
                InvalidShape,
                r"keys: shape \(11, 13\) has 2 axes, want 3.* \(or 2 where they are packed, with valid_lens",
                id="no_valid_lens",
            ),
            pytest.param(
                {"valid_lens": np.array([4, 6])},
                InvalidValidLens,
                "valid_lens: sum to 10, but keys have 11 rows; want one length an entry",
                id="valid_lens_short",
            ),
            pytest.param(
                {"valid_lens": np.array([11, 0])},
                InvalidValidLens,
                r"valid_lens\[1\]: got 0, want 1 to 11: keys are packed, so every entry has at least one row",
                id="entry_without_keys",
            ),
            pytest.param(
                {"valid_lens": np.array([4, 3, 4])}, InvalidShape, "keys: batch is 3, queries have 2", id="batch"
            ),
            pytest.param(
                {"valid_lens": np.array([[4, 4], [7, 7]])},
                InvalidShape,
                r"keys: shape \(11, 13\) has 2 axes",
                id="lens_a_query",
            ),
            pytest.param(
                {"values": np.ones((10, 17), np.float32)},
                InvalidValidLens,
                "valid_lens: sum to 11, but values have 10 rows",
                id="values_missing",
            ),
            pytest.param(
                {"values": np.ones((B, 4, 17), np.float32)},
                InvalidShape,
                "values: 4 of entry 1, but 7 keys; want one value a key",
                id="padded_values",
            ),
            pytest.param(
                {"valid_lens": Sequences.ragged(np.ones((3, 1)), np.array([1, 2]))},
                InvalidShape,
                "valid_lens: its lists differ in length",
                id="ragged_lens",
            ),
            pytest.param(
                {"queries": Sequences.ragged(np.ones((3, 11), np.float32), np.array([3, 0])), "query_lens": None},
                EmptyAxis,
                "queries: shape",
                id="empty_entry",
            ),
            pytest.param(
                {"keys": np.ones((B, K, 13), np.float32), "values": np.ones((B, K, 17), np.float32),
                 "valid_lens": np.array([[1, 2, 3], [1, 2, 3]])},
                InvalidShape,
                r"valid_lens: shape is \(2, 3\), want \(2,\) beside queries of unequal length",
                id="lens_a_query_of_packed",
            ),
        ],
    )  # fmt: skip
    def test_refusals(self, changed: dict[str, Any], error: type[ServiceError], message: str) -> None:
        """What does not fit is refused with what, where, got and want."""
        with pytest.raises(error, match=f"^{message}"):
            parse(**PACKED | changed)


class TestCast:
    @pytest.mark.parametrize(
        ("largest", "dtype"),
        [
            pytest.param(65504, np.float16, id="float16"),
            pytest.param(65519, np.float16, id="float16_rounded_down"),
            pytest.param(3.3895314e38, ml_dtypes.bfloat16, id="bfloat16"),
            pytest.param(3.4028235e38, np.float32, id="float32"),
            pytest.param(3.4028235e38, np.float64, id="float64"),
        ],
    )
    def test_largest_that_fits(self, largest: float, dtype: Any) -> None:
        """What a dtype can hold is answered, rounded to the nearest."""
        result = np.full((1, 2, 3), largest, np.float32)
        output = AttentionOutput.cast(result, None, np.dtype(dtype)).output
        assert output.dtype == dtype
        np.testing.assert_array_equal(output, result.astype(dtype))
        assert np.isfinite(output.astype(np.float64)).all()

    @pytest.mark.parametrize(
        ("value", "dtype", "message"),
        [
            pytest.param(65520, np.float16, "65520 does not fit float16, the dtype of the queries", id="float16"),
            pytest.param(-1e30, np.float16, r"1e\+30 does not fit float16", id="float16_negative"),
            pytest.param(3.4e38, ml_dtypes.bfloat16, r"3.4e\+38 does not fit bfloat16", id="bfloat16"),
            pytest.param(np.inf, np.float32, "the result overflows float32", id="float32"),
            pytest.param(np.nan, np.float32, "the result overflows float32", id="float32_nan"),
            pytest.param(-np.inf, np.float64, "the result overflows float32", id="float64"),
            pytest.param(np.nan, np.float16, "the result overflows float32", id="float16_nan"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, value: float, dtype: Any, message: str) -> None:
        """One value that does not fit refuses the answer and says which dtype it was."""
        result = spoiled((1, 2, 3), (0, 1, 2), value)
        with pytest.raises(Overflow, match=f"output: {message}"):
            AttentionOutput.cast(result, None, np.dtype(dtype))

    def test_float32_is_not_copied(self) -> None:
        """A float32 answer is the engine's own memory."""
        result, weights = np.ones((1, 2, 3), np.float32), np.ones((1, 5, 2, 7), np.float32)
        answer = AttentionOutput.cast(result, weights, np.dtype(np.float32))
        assert answer.output is result
        assert answer.weights is weights

    def test_weights_have_the_dtype_of_the_output(self) -> None:
        """Weights are cast as the output is."""
        weights = np.full((1, 5, 2, 7), 1 / 7, np.float32)
        answer = AttentionOutput.cast(np.ones((1, 2, 3), np.float32), weights, np.dtype(np.float16))
        assert answer.weights is not None
        np.testing.assert_array_equal(answer.weights, weights.astype(np.float16), strict=True)

    def test_public_names(self) -> None:
        """The answer's names are output, and weights where they were asked for."""
        result, weights = np.ones((1, 2, 3), np.float32), np.ones((1, 5, 2, 7), np.float32)
        assert list(AttentionOutput(result, None).named()) == ["output"]
        assert list(AttentionOutput(result, weights).named()) == ["output", "weights"]

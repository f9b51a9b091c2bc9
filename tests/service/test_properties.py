"""The contract of the tensors, on real artefacts in process: parse, plan, run, assemble.

Every property is drawn by Hypothesis and held by three exported layers: the seeds', one with a bias in which no two
sizes are equal, and one with additive scoring. What a property allows is one of two things:

- *bit for bit*: both requests become the very same engine call, or calls that differ in nothing a kernel reads;
- *to rounding*: the sums are the same, but a matrix product of another size may add them up in another order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.attention import MultiHeadAttention
from service.artifact import Artifact
from service.assembly import Assembly, Projections, Share, gather, gather_keys, gather_tile
from service.cost import CostModel
from service.engine.cpu import CpuEngine
from service.errors import NonFinite, Overflow
from service.planner import Limits, Load, join, plan
from service.repository import Repository
from service.tensors import AttentionInputs, AttentionOutput, WireTensors
from service.wanted import WantedWeights
from tests.conftest import weights_of
from tests.oracle import multi_head_attention
from tests.strategies import (
    DEAR_CALLS,
    FLOAT_DTYPES,
    UNBOUNDED,
    Array,
    PackedRequest,
    Request,
    costs,
    examples,
    float_dtypes,
    limits,
    packed_request,
    requests,
)

# A float32 sum of n terms of one size is off by about sqrt(n) roundings of 2**-24 each. Four sums follow one another
# (a projection, a score, the weighted values, W_o), the longest of 100 terms: 4 * 10 * 2**-24 = 2.4e-6 of the largest
# value, and four times that for the unlucky draw. The export's own gate has the same limit, 1e-5.
RELATIVE = 16 * 10 * 2.0**-24
# Two answers that are both that close to the truth.
BETWEEN_TWO = 2 * RELATIVE

drawn = examples(40)


@dataclass(frozen=True)
class Served:
    """One model as the service holds it, and its parameters for the oracle."""

    artifact: Artifact
    engine: CpuEngine
    weights: Mapping[str, Array]

    def answer(
        self,
        request: Request | PackedRequest | WireTensors,
        *,
        need_weights: bool = True,
        cost: CostModel = DEAR_CALLS,
        limits: Limits = UNBOUNDED,
    ) -> AttentionOutput:
        """What the service computes for a request, in one call unless cost and limits say otherwise."""
        layer = self.artifact.layer
        wire = request if isinstance(request, WireTensors) else request.wire()
        inputs = AttentionInputs.parse(wire, layer)
        calls = plan(inputs, layer, cost, limits, need_weights=need_weights)
        projections = Projections(layer, inputs, calls.projections)
        for piece in calls.projections:
            projections.place(piece, self.engine.project(*gather_keys(inputs, piece)))
        assembly = Assembly(inputs, layer, len(calls.parts), WantedWeights() if need_weights else None)
        for part in calls.parts:
            share = Share(inputs, part)
            if part.projected:
                queries, lens = gather_tile(share)
                assembly.place(part, self.engine.attend(queries, projections.of(part), lens), None)
            else:
                result = self.engine.run(gather([share], Load.of(part), need_weights=need_weights))
                assembly.place(part, result.output, result.weights)
        return assembly.answer()

    def requests(self, **how: Any) -> st.SearchStrategy[Request]:
        """Valid requests of this model."""
        return requests(self.artifact.layer, **how)


@pytest.fixture(scope="module", params=["attention", "odd", "additive"])
def served(
    request: pytest.FixtureRequest,
    repository: Path,
    seeds_layer: MultiHeadAttention,
    odd_layer: MultiHeadAttention,
    additive_layer: MultiHeadAttention,
) -> Served:
    """Each of the three models."""
    layer = {"attention": seeds_layer, "odd": odd_layer, "additive": additive_layer}[request.param]
    artifact = Repository(repository).read(request.param, 1)
    return Served(artifact, CpuEngine(artifact, 1, 1), weights_of(layer))


def assert_close(got: Array, want: Array, relative: float) -> None:
    """Every element within `relative` of the largest value wanted."""
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=relative * float(np.abs(want).max()))


def assert_same_bits(got: AttentionOutput, want: AttentionOutput) -> None:
    """Output and weights are equal, and so are their dtypes."""
    for ours, theirs in zip(got.named().values(), want.named().values(), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


class TestAgainstTheOracle:
    @given(data=st.data())
    @examples(40)
    def test_agrees_with_the_equations(self, served: Served, data: st.DataObject) -> None:
        """Output and weights are those of the equations in float64, but for float32 rounding."""
        request = data.draw(served.requests())
        answer = served.answer(request)
        output, weights = multi_head_attention(
            served.weights, served.artifact.layer.num_heads, request.queries, request.keys, request.values,
            request.valid_lens,
        )  # fmt: skip
        assert_close(answer.output, output, RELATIVE)
        assert answer.weights is not None
        assert_close(answer.weights, weights, RELATIVE)

    @given(data=st.data())
    @drawn
    def test_output_is_the_same_without_weights(self, served: Served, data: st.DataObject) -> None:
        """Asking for the weights changes nothing but that they are there; the graph is another, so to rounding."""
        request = data.draw(served.requests())
        alone = served.answer(request, need_weights=False)
        assert alone.weights is None
        assert_close(alone.output, served.answer(request).output, BETWEEN_TWO)


class TestParts:
    @given(data=st.data(), cost=costs, limits=limits)
    @drawn
    def test_any_partition_gives_the_same_answer(
        self, served: Served, data: st.DataObject, cost: CostModel, limits: Limits
    ) -> None:
        """However rows are grouped and queries tiled, output and weights are the equations'."""
        request = data.draw(served.requests())
        answer = served.answer(request, cost=cost, limits=limits)
        output, weights = multi_head_attention(
            served.weights, served.artifact.layer.num_heads, request.queries, request.keys, request.values,
            request.valid_lens,
        )  # fmt: skip
        assert_close(answer.output, output, RELATIVE)
        assert answer.weights is not None
        assert_close(answer.weights, weights, RELATIVE)

    @given(data=st.data(), cost=costs, limits=limits)
    @drawn
    def test_any_tiling_gives_the_same_output(
        self, served: Served, data: st.DataObject, cost: CostModel, limits: Limits
    ) -> None:
        """Without weights keys may be projected apart and attended to tile by tile: the output is the equations'."""
        request = data.draw(served.requests())
        answer = served.answer(request, need_weights=False, cost=cost, limits=limits)
        output, _ = multi_head_attention(
            served.weights, served.artifact.layer.num_heads, request.queries, request.keys, request.values,
            request.valid_lens,
        )  # fmt: skip
        assert_close(answer.output, output, RELATIVE)


class TestPacked:
    @given(seed=st.integers(0, 2**32 - 1), cost=costs, limits=limits, need_weights=st.booleans())
    @drawn
    def test_entry_is_what_it_is_alone(
        self, served: Served, seed: int, cost: CostModel, limits: Limits, need_weights: bool
    ) -> None:
        """Entries of unequal length, however they are put together, are each what the equations say of it alone."""
        request = packed_request(served.artifact.layer, seed)
        answer = served.answer(request, need_weights=need_weights, cost=cost, limits=limits)
        assert len(answer.output) == sum(map(len, request.queries))
        for index, got in enumerate(answer.entries()):
            entry = request.entry(index)
            output, weights = multi_head_attention(
                served.weights, served.artifact.layer.num_heads, entry.queries, entry.keys, entry.values,
                entry.valid_lens,
            )  # fmt: skip
            assert_close(got[None], output, RELATIVE)
            if answer.weights is not None:
                own = answer.weights[index, :, : entry.queries.shape[1], : entry.num_kv]
                assert_close(own[None], weights, RELATIVE)
                assert answer.weights[index].sum() == pytest.approx(weights.sum(), rel=1e-5)


class TestJoined:
    @given(data=st.data())
    @drawn
    def test_requests_in_one_call_are_what_they_are_alone(self, served: Served, data: st.DataObject) -> None:
        """Requests of any shapes that share a call get the equations' answers, rows that average their keys as well."""
        layer = served.artifact.layer
        requests = data.draw(st.lists(served.requests(), min_size=2, max_size=4))
        judged = [AttentionInputs.parse(request.wire(), layer) for request in requests]
        shares = [Share(inputs, plan(inputs, layer, DEAR_CALLS, UNBOUNDED).parts[0]) for inputs in judged]
        load, chosen = join(
            Load.of(shares[0].part), [Load.of(share.part) for share in shares[1:]], layer, DEAR_CALLS, UNBOUNDED
        )
        taken = [0, *(index + 1 for index in chosen)]
        result = served.engine.run(gather([shares[index] for index in taken], load))
        first = 0
        for index in taken:
            request, rows = requests[index], slice(first, first + requests[index].batch)
            assembly = Assembly(judged[index], layer, 1)
            assembly.place(shares[index].part, result.output[rows], None)
            output, _ = multi_head_attention(
                served.weights, layer.num_heads, request.queries, request.keys, request.values, request.valid_lens
            )
            assert_close(assembly.answer().output, output, RELATIVE)
            first = rows.stop


class TestPadding:
    @pytest.mark.parametrize(
        "garbage",
        [
            pytest.param(-7.25, id="finite"),
            pytest.param(1e38, id="overflows_in_the_projections"),
            pytest.param(np.nan, id="nan"),
            pytest.param(np.inf, id="inf"),
            pytest.param(-np.inf, id="minus_inf"),
        ],
    )
    @given(data=st.data())
    @examples(15)
    def test_garbage_beyond_every_length_changes_no_bit(
        self, served: Served, garbage: float, data: st.DataObject
    ) -> None:
        """What no query of an entry reads is cut off or zeroed before the engine sees it: the answer is bit for bit."""
        request = data.draw(served.requests())
        keys, values = request.keys.copy(), request.values.copy()
        keys[request.beyond], values[request.beyond] = garbage, garbage
        assert_same_bits(served.answer(request.changed(keys=keys, values=values)), served.answer(request))

    @given(data=st.data(), extra=st.integers(1, 3))
    @drawn
    def test_longer_padding_changes_no_bit(self, served: Served, data: st.DataObject, extra: int) -> None:
        """More padding, with every length above 0, only adds weights of 0: the rest is bit for bit."""
        request = data.draw(served.requests(least_length=1))
        keys, values = (
            np.concatenate([x, np.full((len(x), extra, x.shape[2]), np.nan, x.dtype)], axis=1)
            for x in (request.keys, request.values)
        )
        longer = served.answer(request.changed(keys=keys, values=values, valid_lens=request.lengths))
        want = served.answer(request)
        np.testing.assert_array_equal(longer.output, want.output)
        assert longer.weights is not None
        assert want.weights is not None
        np.testing.assert_array_equal(longer.weights[..., : request.num_kv], want.weights)
        assert not longer.weights[..., request.num_kv :].any()

    @given(data=st.data(), garbage=st.floats(-1e6, 1e6, width=32))
    @drawn
    def test_what_only_another_query_reads_changes_no_bit(
        self, served: Served, data: st.DataObject, garbage: float
    ) -> None:
        """A key beyond one query's length, but within another's, reaches only the other: its weight is exactly 0."""
        request = data.draw(served.requests())
        position = data.draw(st.integers(0, request.num_kv - 1))
        keys, values = request.keys.copy(), request.values.copy()
        keys[:, position], values[:, position] = garbage, garbage
        changed, want = served.answer(request.changed(keys=keys, values=values)), served.answer(request)
        unread = (request.lengths > 0) & (request.lengths <= position)  # (B, Q)
        np.testing.assert_array_equal(changed.output[unread], want.output[unread])

    @given(data=st.data(), garbage=st.sampled_from([np.nan, np.inf, -np.inf]), name=st.sampled_from(["keys", "values"]))
    @drawn
    def test_is_no_padding_to_a_query_of_length_0(
        self, served: Served, data: st.DataObject, garbage: float, name: str
    ) -> None:
        """A query of length 0 averages all K keys, so what is not finite among them is refused."""
        request = data.draw(served.requests(least_length=1))
        lengths = request.lengths
        lengths[-1, -1] = 0
        spoiled = getattr(request, name).copy()
        spoiled[-1, -1, -1] = garbage
        with pytest.raises(NonFinite, match=rf"{name}\[{request.batch - 1}\]\[{request.num_kv - 1}\]"):
            served.answer(request.changed(**{name: spoiled, "valid_lens": lengths}))


class TestBatch:
    @given(data=st.data())
    @drawn
    def test_entry_is_what_it_is_alone(self, served: Served, data: st.DataObject) -> None:
        """An entry's answer does not depend on the others of its batch, though it may be padded for them."""
        request = data.draw(served.requests())
        together = served.answer(request)
        for index in range(request.batch):
            alone = served.answer(request.row(index))
            for ours, theirs in zip(together.named().values(), alone.named().values(), strict=True):
                assert_close(ours[index : index + 1], theirs, BETWEEN_TWO)

    @given(data=st.data())
    @drawn
    def test_query_is_what_it_is_alone(self, served: Served, data: st.DataObject) -> None:
        """A query's answer does not depend on the other queries, nor on how far their lengths go."""
        request = data.draw(served.requests())
        index = data.draw(st.integers(0, request.queries.shape[1] - 1))
        one = slice(index, index + 1)
        alone = served.answer(request.changed(queries=request.queries[:, one], valid_lens=request.lengths[:, one]))
        assert_close(served.answer(request).output[:, one], alone.output, BETWEEN_TWO)

    @pytest.mark.parametrize("served", ["attention"], indirect=True)
    def test_overflowing_score_is_refused_as_it_is_alone(self, served: Served) -> None:
        """A query whose every score is -inf is refused, also where another entry's length adds masked keys to it."""
        target = np.random.default_rng(0).standard_normal(served.artifact.layer.num_hiddens)
        query, key = (np.linalg.solve(served.weights[f"W_{letter}.weight"], target) for letter in "qk")
        size = served.artifact.layer.query_size
        queries, keys = np.ones((2, 1, size), np.float32), np.ones((2, 3, size), np.float32)
        queries[0, 0], keys[0, 0] = -1e20 * query, 1e20 * key
        request = Request(queries, keys, np.ones((2, 3, size), np.float32), np.array([1, 3]))
        with pytest.raises(Overflow):
            served.answer(request.row(0))
        with pytest.raises(Overflow):
            served.answer(request)


class TestPermutation:
    @given(data=st.data())
    @drawn
    def test_of_valid_keys_moves_their_weights_alone(self, served: Served, data: st.DataObject) -> None:
        """Keys and values have no order: shuffling those that are read keeps the output, to rounding."""
        request = data.draw(served.requests().filter(lambda request: request.num_kv > 1))
        length = data.draw(st.integers(1, request.num_kv))
        order = [*data.draw(st.permutations(range(length))), *range(length, request.num_kv)]
        request = request.changed(valid_lens=np.full(request.batch, length))
        want = served.answer(request)
        got = served.answer(request.changed(keys=request.keys[:, order], values=request.values[:, order]))
        assert_close(got.output, want.output, BETWEEN_TWO)
        assert got.weights is not None
        assert want.weights is not None
        assert_close(got.weights, want.weights[..., order], BETWEEN_TWO)


class TestLengthZero:
    @given(data=st.data())
    @drawn
    def test_is_the_mean_of_all_values(self, served: Served, data: st.DataObject) -> None:
        """A query of length 0 gets the mean of all K projected values through W_o, and weights of 1 / K."""
        request = data.draw(served.requests())
        lengths = request.lengths
        lengths[0, 0] = 0
        answer = served.answer(request.changed(valid_lens=lengths))
        mean = _affine(served.weights, "W_v", request.values[0]).mean(0)
        assert_close(answer.output[0, 0], _affine(served.weights, "W_o", mean), RELATIVE)
        assert answer.weights is not None
        uniform = np.full(answer.weights[0, :, 0].shape, 1 / request.num_kv)
        assert_close(answer.weights[0, :, 0], uniform, RELATIVE)


class TestWeights:
    @given(data=st.data())
    @drawn
    def test_sum_to_1_and_are_0_beyond_the_length(self, served: Served, data: st.DataObject) -> None:
        """Every row sums to 1 and, its length above 0, is exactly 0 beyond it, for all K keys of the request."""
        request = data.draw(served.requests())
        weights = served.answer(request).weights
        assert weights is not None
        num_heads, num_queries = served.artifact.layer.num_heads, request.queries.shape[1]
        assert weights.shape == (request.batch, num_heads, num_queries, request.num_kv)
        # 7 weights of at most 1, each within 1e-5 of itself at the very most.
        np.testing.assert_allclose(weights.sum(-1, dtype=np.float64), 1, rtol=0, atol=RELATIVE)
        lengths = np.broadcast_to(request.lengths[:, None], weights.shape[:3])[..., None]
        beyond = (np.arange(request.num_kv) >= lengths) & (lengths > 0)
        assert not weights[beyond].any()
        assert (weights >= 0).all()


class TestForms:
    """The ways to say one thing."""

    @given(data=st.data())
    @drawn
    def test_one_length_an_entry_is_that_length_for_every_query(self, served: Served, data: st.DataObject) -> None:
        """valid_lens (B,) is (B, Q) repeated, of whatever integer dtype: bit for bit."""
        request = data.draw(served.requests())
        lengths = request.lengths[:, 0]
        repeated = np.repeat(lengths[:, None], request.queries.shape[1], axis=1)
        got = served.answer(request.changed(valid_lens=lengths.astype(np.uint8)))
        assert_same_bits(got, served.answer(request.changed(valid_lens=repeated)))

    @given(data=st.data())
    @drawn
    def test_absent_lengths_are_all_keys(self, served: Served, data: st.DataObject) -> None:
        """No valid_lens is K for every query: bit for bit."""
        request = data.draw(served.requests())
        full = np.full(request.batch, request.num_kv)
        got = served.answer(request.changed(valid_lens=None))
        assert_same_bits(got, served.answer(request.changed(valid_lens=full)))

    @pytest.mark.parametrize("served", ["attention", "additive"], indirect=True)
    @given(data=st.data())
    @drawn
    def test_absent_keys_and_values_are_the_queries(self, served: Served, data: st.DataObject) -> None:
        """Queries alone attend to themselves, queries and keys read the keys as values: bit for bit."""
        request = data.draw(served.requests())
        queries, keys = request.queries, request.keys
        self_attention = served.answer(WireTensors({"queries": queries}))
        assert_same_bits(self_attention, served.answer(Request(queries, queries.copy(), queries.copy(), None)))
        no_values = served.answer(WireTensors({"queries": queries, "keys": keys}))
        assert_same_bits(no_values, served.answer(Request(queries, keys, keys.copy(), None)))

    @given(data=st.data())
    @drawn
    def test_memory_layout_means_nothing(self, served: Served, data: st.DataObject) -> None:
        """Fortran order, foreign byte order and odd addresses hold the same numbers: bit for bit."""
        request = data.draw(served.requests())
        swapped = request.queries.astype(request.queries.dtype.newbyteorder())
        got = served.answer(
            request.changed(queries=swapped, keys=np.asfortranarray(request.keys), values=_unaligned(request.values))
        )
        assert_same_bits(got, served.answer(request))


class TestDtypes:
    @pytest.mark.parametrize("dtype", FLOAT_DTYPES.values(), ids=FLOAT_DTYPES.keys())
    @given(data=st.data())
    @examples(15)
    def test_answer_is_the_float32_answer_in_the_queries_dtype(
        self, served: Served, dtype: Any, data: st.DataObject
    ) -> None:
        """Every dtype is computed in float32, and the answer is cast to the queries' dtype: bit for bit."""
        request = data.draw(served.requests(dtypes=st.just(np.dtype(dtype))))
        single = request.changed(**{name: getattr(request, name).astype(np.float32) for name in TENSORS})
        got, want = served.answer(request), served.answer(single)
        assert got.output.dtype == dtype
        for ours, theirs in zip(got.named().values(), want.named().values(), strict=True):
            assert ours.dtype == dtype
            np.testing.assert_array_equal(ours, theirs.astype(dtype))

    @given(data=st.data(), key_dtype=float_dtypes, value_dtype=float_dtypes)
    @drawn
    def test_each_tensor_may_have_its_own(
        self, served: Served, data: st.DataObject, key_dtype: np.dtype[Any], value_dtype: np.dtype[Any]
    ) -> None:
        """Only the queries' dtype decides on the answer's; keys and values may have others."""
        request = data.draw(served.requests())
        keys, values = request.keys.astype(key_dtype), request.values.astype(value_dtype)
        got = served.answer(request.changed(keys=keys, values=values))
        want = served.answer(request.changed(keys=keys.astype(np.float32), values=values.astype(np.float32)))
        assert_same_bits(got, want)

    @pytest.mark.parametrize(
        ("dtype", "scale"),
        [
            pytest.param(np.float16, 6e4, id="float16"),
            pytest.param(ml_dtypes.bfloat16, 3e38, id="bfloat16"),
            pytest.param(np.float32, 3e38, id="float32"),
            pytest.param(np.float64, 3e38, id="float64"),
        ],
    )
    @given(data=st.data())
    @examples(10)
    def test_answer_that_does_not_fit_is_refused(
        self, served: Served, dtype: Any, scale: float, data: st.DataObject
    ) -> None:
        """Values at the end of a dtype's range give the answer of the equations, or are refused; never inf or nan."""
        request = data.draw(served.requests(dtypes=st.just(np.dtype(dtype))))
        values = np.full(request.values.shape, scale, dtype) * np.sign(request.values)
        request = request.changed(values=values)
        output, _ = multi_head_attention(
            served.weights, served.artifact.layer.num_heads, request.queries, request.keys, values, request.valid_lens
        )
        largest = float(np.abs(output).max())
        limit = min(float(ml_dtypes.finfo(dtype).max), float(np.finfo(np.float32).max))
        try:
            answer = served.answer(request).output
        except Overflow:
            # A sum inside may overflow before the last does, but hardly for less than a hundredth of the result.
            assert largest > limit / 100
        else:
            assert largest <= limit * (1 + RELATIVE)
            assert np.isfinite(answer.astype(np.float64)).all()


TENSORS = ("queries", "keys", "values")


def _affine(weights: Mapping[str, Array], projection: str, x: Array) -> Array:
    y = x.astype(np.float64) @ weights[f"{projection}.weight"].T.astype(np.float64)
    return y + weights.get(f"{projection}.bias", 0)


def _unaligned(tensor: Array) -> Array:
    memory = np.empty(tensor.nbytes + 1, np.uint8)
    view = memory[1:].view(tensor.dtype).reshape(tensor.shape)
    view[...] = tensor
    return view

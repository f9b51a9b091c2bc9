"""The arrays of an engine call, and the answers' places. Pure: the engine is a function here."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.assembly import Assembly, Projections, Share, gather, gather_keys, gather_tile
from service.cost import CostModel
from service.engine import EngineCall, Projected
from service.planner import Limits, Load, Part, Projecting, plan
from service.tensors import AttentionInputs, AttentionOutput, WireTensors
from service.wanted import WantedWeights
from tests.strategies import (
    LAYER,
    Array,
    PackedRequest,
    Request,
    costs,
    examples,
    float_dtypes,
    limits,
    packed_requests,
    requests,
)

B, Q, K = 3, 5, 7
ALL = Part(slice(0, B), slice(0, Q), K)

AnyRequest = Request | PackedRequest
anything = st.one_of(requests(LAYER), packed_requests(LAYER))
drawn = examples(120)


def inputs_of(request: AnyRequest) -> AttentionInputs:
    """A request, judged."""
    return AttentionInputs.parse(request.wire(), LAYER)


def request_of(valid_lens: list[int] | list[list[int]]) -> Request:
    """Ones in float32, so that every zero is ours."""
    return Request(
        np.ones((B, Q, LAYER.query_size), np.float32),
        np.ones((B, K, LAYER.key_size), np.float32),
        np.ones((B, K, LAYER.value_size), np.float32),
        np.array(valid_lens),
    )


def call_of(inputs: AttentionInputs, part: Part, *, need_weights: bool = False) -> EngineCall:
    """The call of one part alone."""
    return gather([Share(inputs, part)], Load.of(part), need_weights=need_weights)


def rows_of(part: Part, batch: int) -> list[int]:
    """The batch entries of a part."""
    return np.arange(batch)[part.rows].tolist()


class TestGather:
    @given(requests=st.lists(anything, min_size=1, max_size=3), cost=costs, limits=limits)
    @drawn
    def test_takes_the_shares_own(self, requests: list[AnyRequest], cost: CostModel, limits: Limits) -> None:
        """A call has, row after row, the queries, lengths and keys of its shares, and zeros behind each."""
        shares = [
            Share(inputs, part)
            for inputs in map(inputs_of, requests)
            for part in plan(inputs, LAYER, cost, limits, need_weights=True).parts[:1]
        ]
        load = Load.of(shares[0].part)
        for share in shares[1:]:
            load = load.joined(Load.of(share.part))
        call = gather(shares, load)
        for tensor in (call.queries, call.keys, call.values):
            assert tensor.flags.c_contiguous
            assert tensor.dtype == np.float32
        places = [(share, row) for share in shares for row in rows_of(share.part, len(share.inputs.queries))]
        assert len(places) == load.num_rows == len(call.queries)
        for place, (share, row) in enumerate(places):
            inputs, queries = share.inputs, share.inputs.queries.entry(row)[share.part.queries]
            _assert_followed_by_zeros(call.queries[place], queries)
            extent = inputs.extents[row]
            _assert_followed_by_zeros(call.keys[place], inputs.keys.entry(row)[:extent])
            _assert_followed_by_zeros(call.values[place], inputs.values.entry(row)[:extent])
            start = inputs.queries.starts[row]
            lens = inputs.valid_lens[start : start + inputs.queries.lengths[row]][share.part.queries]
            if call.valid_lens is None:
                assert (lens == load.num_kv).all()
            else:
                np.testing.assert_array_equal(call.valid_lens[place, : len(lens)], lens)
                assert (call.valid_lens[place] <= load.num_kv).all()

    @given(request=requests(LAYER), cost=costs, limits=limits)
    @drawn
    def test_writes_to_no_array_of_the_request(self, request: Request, cost: CostModel, limits: Limits) -> None:
        """The request's arrays, perhaps views of its body, are never written to, whatever they hold as padding."""
        request.keys[request.beyond] = np.nan
        sent = (request.queries, request.keys, request.values)
        copies = [tensor.copy() for tensor in sent]
        for tensor in sent:
            tensor.flags.writeable = False
        inputs = inputs_of(request)
        for part in plan(inputs, LAYER, cost, limits, need_weights=True).parts:
            call_of(inputs, part, need_weights=True)
        for tensor, copy in zip(sent, copies, strict=True):
            np.testing.assert_array_equal(tensor, copy)

    def test_copies_nothing_that_is_wanted_as_it_is(self) -> None:
        """Queries, and keys that are all read, go to the engine as they came."""
        inputs = inputs_of(request_of([[7, 1, 2, 3, 4], [3, 7, 0, 1, 1], [7, 7, 7, 7, 7]]))
        call = call_of(inputs, ALL)
        assert np.shares_memory(call.queries, inputs.queries.data)
        assert np.shares_memory(call.keys, inputs.keys.data)
        assert np.shares_memory(call.values, inputs.values.data)
        assert call.valid_lens is not None
        assert np.shares_memory(call.valid_lens, inputs.valid_lens)

    def test_keys_that_are_the_values_stay_one_array(self) -> None:
        """In self-attention keys are trimmed once: keys and values of the call are one array, too."""
        layer = LAYER.model_copy(update={"key_size": 11, "value_size": 11})
        wire = WireTensors({"queries": np.ones((B, Q, 11), np.float32), "valid_lens": np.array([1, 2, 2])})
        inputs = AttentionInputs.parse(wire, layer)
        call = call_of(inputs, Part(slice(0, B), slice(0, Q), 2))
        assert call.keys.shape == (B, 2, 11)
        assert call.values is call.keys
        assert (call.queries == 1).all()

    @pytest.mark.parametrize(
        ("valid_lens", "masked"),
        [
            pytest.param([7, 7, 7], False, id="all"),
            pytest.param([7, 6, 7], True, id="one_shorter"),
            pytest.param([7, 0, 7], True, id="zero"),
            pytest.param([[7] * Q, [7] * Q, [7, 7, 7, 7, 6]], True, id="one_query_shorter"),
        ],
    )
    def test_lengths_are_left_out_where_every_key_counts(self, valid_lens: list[int], masked: bool) -> None:
        """A call without padding says so, so that no mask is computed; one row or query that reads less needs it."""
        assert (call_of(inputs_of(request_of(valid_lens)), ALL).valid_lens is not None) == masked

    def test_weights_come_with_lengths(self) -> None:
        """The graph that answers weights takes lengths, so a call for weights always has them."""
        call = call_of(inputs_of(request_of([7, 7, 7])), ALL, need_weights=True)
        assert call.need_weights
        assert call.valid_lens is not None
        assert not call_of(inputs_of(request_of([7, 7, 7])), ALL).need_weights


class TestAssembly:
    @given(request=requests(LAYER, dtypes=float_dtypes), cost=costs, limits=limits)
    @drawn
    def test_inverts_gather(self, request: Request, cost: CostModel, limits: Limits) -> None:
        """Results that tell where they come from arrive there; weights beyond the computed keys are 0."""
        inputs = inputs_of(request)
        computed = np.zeros((request.batch, request.queries.shape[1]), int)
        answer, marks = assembled(inputs, cost, limits, computed)
        assert answer.weights is not None
        assert answer.output.dtype == answer.weights.dtype == request.queries.dtype
        assert answer.weights.shape == (request.batch, LAYER.num_heads, request.queries.shape[1], request.num_kv)
        wanted = np.repeat(marks.reshape(request.queries.shape[:2])[..., None], LAYER.num_hiddens, axis=-1)
        np.testing.assert_array_equal(answer.output.astype(np.float32), wanted)
        expected = np.arange(request.num_kv) < computed[:, None, :, None]
        np.testing.assert_array_equal(answer.weights != 0, np.broadcast_to(expected, answer.weights.shape))

    @given(request=packed_requests(LAYER), cost=costs, limits=limits)
    @drawn
    def test_of_packed_queries_is_packed(self, request: PackedRequest, cost: CostModel, limits: Limits) -> None:
        """The output is one row a query, without padding, and knows how many each entry has; weights are padded."""
        inputs = inputs_of(request)
        num_queries = [len(entry) for entry in request.queries]
        computed = np.zeros((len(num_queries), max(num_queries)), int)
        answer, marks = assembled(inputs, cost, limits, computed)
        np.testing.assert_array_equal(answer.output, np.repeat(marks[:, None], LAYER.num_hiddens, axis=-1))
        assert answer.query_lens is not None
        assert answer.query_lens.tolist() == num_queries
        assert [len(entry) for entry in answer.entries()] == num_queries
        assert answer.weights is not None
        assert answer.weights.shape[2:] == (max(num_queries), max(len(entry) for entry in request.keys))
        for entry, length in enumerate(num_queries):
            assert (answer.weights[entry, :, length:] == 0).all()
            assert (answer.weights[entry, :, :length, 0] == 1).all()

    def test_one_part_is_the_answer(self) -> None:
        """The result of an only part is not copied."""
        inputs = inputs_of(request_of([7, 7, 7]))
        assembly = Assembly(inputs, LAYER, 1)
        output = np.ones((B, Q, LAYER.num_hiddens), np.float32)
        assembly.place(ALL, output, None)
        answer = assembly.answer()
        assert np.shares_memory(answer.output, output)
        assert answer.weights is None

    def test_takes_its_own_of_a_longer_call(self) -> None:
        """What a shared call computed for the sake of longer queries is left out."""
        inputs = inputs_of(request_of([7, 7, 7]))
        assembly = Assembly(inputs, LAYER, 1)
        output = np.ones((B, Q + 2, LAYER.num_hiddens), np.float32)
        output[:, Q:] = np.nan
        assembly.place(ALL, output, None)
        answer = assembly.answer()
        assert answer.output.shape == (B, Q, LAYER.num_hiddens)
        assert (answer.output == 1).all()

    def test_answer_before_any_part(self) -> None:
        """There is no answer before a part was placed."""
        assembly = Assembly(inputs_of(request_of([7, 7, 7])), LAYER, 1)
        with pytest.raises(RuntimeError, match="no part was placed"):
            assembly.answer()


class TestTiles:
    def test_take_queries_and_lengths_as_they_are(self) -> None:
        """A tile has some queries of one row, and lengths unless they read every projected key. Nothing is copied."""
        inputs = inputs_of(request_of([[7, 1, 2, 3, 4], [3, 7, 0, 1, 1], [7, 7, 7, 7, 7]]))
        queries, lens = gather_tile(Share(inputs, Part(slice(0, 1), slice(2, 5), 7, projected=True)))
        assert queries.shape == (1, 3, LAYER.query_size)
        assert np.shares_memory(queries, inputs.queries.data)
        assert lens is not None
        assert lens.tolist() == [[2, 3, 4]]
        assert gather_tile(Share(inputs, Part(slice(2, 3), slice(0, 4), 7, projected=True)))[1] is None

    def test_attend_to_what_was_projected_piece_by_piece(self) -> None:
        """Projections arrive in the places of their keys, whatever their order."""
        inputs = inputs_of(request_of([5, 7, 7]))
        pieces = [Projecting(0, slice(3, 5)), Projecting(0, slice(0, 3))]
        projections = Projections(LAYER, inputs, pieces)
        for piece in pieces:
            keys, values = gather_keys(inputs, piece)
            assert keys.shape == (1, piece.keys.stop - piece.keys.start, LAYER.key_size)
            assert values.shape[2] == LAYER.value_size
            marks = np.arange(piece.keys.start, piece.keys.stop, dtype=np.float32)[None, None, :, None]
            marks = np.broadcast_to(marks, (1, LAYER.num_heads, marks.size, LAYER.head_size))
            projections.place(piece, Projected(marks, -marks))
        projected = projections.of(Part(slice(0, 1), slice(0, 2), 5, projected=True))
        assert projected.keys.shape == (1, LAYER.num_heads, 5, LAYER.head_size)
        assert projected.keys[0, 1, :, 2].tolist() == [0, 1, 2, 3, 4]
        assert projected.values[0, 2, :, 6].tolist() == [0, -1, -2, -3, -4]


def assembled(
    inputs: AttentionInputs, cost: CostModel, limits: Limits, computed: Array
) -> tuple[AttentionOutput, Array]:
    """The answer where each query's result is a mark of its own, the marks, and how many keys each was given."""
    marks = np.arange(len(inputs.valid_lens), dtype=np.float32) % 97
    parts = plan(inputs, LAYER, cost, limits, need_weights=True).parts
    assembly = Assembly(inputs, LAYER, len(parts), WantedWeights())
    for part in reversed(parts):
        output = np.full((part.num_rows, part.num_queries, LAYER.num_hiddens), np.nan, np.float32)
        for place, row in enumerate(rows_of(part, len(inputs.queries))):
            start, length = inputs.queries.starts[row], inputs.queries.lengths[row]
            own = marks[start : start + length][part.queries]
            output[place, : len(own)] = own[:, None]
        assembly.place(part, output, np.ones((*output.shape[:1], LAYER.num_heads, output.shape[1], part.num_kv), "f4"))
        computed[part.rows, part.queries] = part.num_kv
    return assembly.answer(), marks


def _assert_followed_by_zeros(row: Array, own: Array) -> None:
    np.testing.assert_array_equal(row[: len(own)], own[: len(row)])
    assert (row[len(own) :] == 0).all()

"""The arrays of a part's call, and its place in the answer. Pure: the engine is a function here."""

import numpy as np
import pytest
from hypothesis import given

from service.assembly import Assembly, gather
from service.cost import CostModel
from service.engine import EngineResult
from service.planner import Limits, Part, plan
from service.tensors import AttentionInputs, WireTensors
from tests.strategies import LAYER, Request, costs, examples, float_dtypes, limits, requests

B, Q, K = 3, 5, 7
ALL = Part(slice(0, B), slice(0, Q), K)

drawn = examples(120)


def inputs_of(request: Request) -> AttentionInputs:
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


class TestGather:
    @given(request=requests(LAYER, dtypes=float_dtypes), cost=costs, limits=limits)
    @drawn
    def test_takes_the_parts_own(self, request: Request, cost: CostModel, limits: Limits) -> None:
        """A call has the part's queries, lengths and keys as they came, and zeros where a row reads no key."""
        inputs = inputs_of(request)
        for part in plan(inputs, LAYER, cost, limits):
            call = gather(inputs, part, need_weights=False)
            np.testing.assert_array_equal(call.queries, inputs.queries[part.rows, part.queries], strict=True)
            np.testing.assert_array_equal(call.valid_lens, inputs.valid_lens[part.rows, part.queries], strict=True)
            for got, sent in ((call.keys, request.keys), (call.values, request.values)):
                want = sent.astype(np.float32)
                want[request.beyond] = 0
                np.testing.assert_array_equal(got, want[part.rows, : part.num_kv], strict=True)
            for tensor in (call.queries, call.keys, call.values, call.valid_lens):
                assert tensor.flags.c_contiguous

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
        for part in plan(inputs, LAYER, cost, limits):
            gather(inputs, part, need_weights=True)
        for tensor, copy in zip(sent, copies, strict=True):
            np.testing.assert_array_equal(tensor, copy)

    def test_copies_nothing_that_is_wanted_as_it_is(self) -> None:
        """Queries, and keys that are all read, go to the engine as they came."""
        inputs = inputs_of(request_of([[7, 1, 2, 3, 4], [3, 7, 0, 1, 1], [7, 7, 7, 7, 7]]))
        call = gather(inputs, ALL, need_weights=False)
        for got, sent in (
            (call.queries, inputs.queries),
            (call.keys, inputs.keys),
            (call.values, inputs.values),
            (call.valid_lens, inputs.valid_lens),
        ):
            assert np.shares_memory(got, sent)

    def test_keys_that_are_the_values_stay_one_array(self) -> None:
        """In self-attention keys are trimmed once: keys and values of the call are one array, too."""
        layer = LAYER.model_copy(update={"key_size": 11, "value_size": 11})
        wire = WireTensors({"queries": np.ones((B, Q, 11), np.float32), "valid_lens": np.array([1, 2, 2])})
        inputs = AttentionInputs.parse(wire, layer)
        call = gather(inputs, Part(slice(0, B), slice(0, Q), 2), need_weights=False)
        assert call.keys.shape == (B, 2, 11)
        assert call.values is call.keys
        assert (call.queries == 1).all()

    def test_need_weights_is_passed_on(self) -> None:
        """The call asks for what the request asked for."""
        inputs = inputs_of(request_of([1, 2, 3]))
        assert gather(inputs, ALL, need_weights=True).need_weights
        assert not gather(inputs, ALL, need_weights=False).need_weights


class TestAssembly:
    @given(request=requests(LAYER, dtypes=float_dtypes), cost=costs, limits=limits)
    @drawn
    def test_inverts_gather(self, request: Request, cost: CostModel, limits: Limits) -> None:
        """Results that tell where they come from arrive there; weights beyond the computed keys are 0."""
        inputs = inputs_of(request)
        batch, num_queries = inputs.valid_lens.shape
        marks = np.arange(batch * num_queries, dtype=np.float32).reshape(batch, num_queries) % 97
        parts = plan(inputs, LAYER, cost, limits)
        assembly = Assembly(inputs, LAYER, len(parts), need_weights=True)
        computed = np.zeros((batch, num_queries), int)
        for part in reversed(parts):
            mark = marks[part.rows, part.queries]
            output = np.repeat(mark[..., None], LAYER.num_hiddens, axis=-1)
            weights = np.ones((len(mark), LAYER.num_heads, mark.shape[1], part.num_kv), np.float32)
            assembly.place(part, EngineResult(output, weights))
            computed[part.rows, part.queries] = part.num_kv
        answer = assembly.answer()
        assert answer.weights is not None
        assert answer.output.dtype == answer.weights.dtype == request.queries.dtype
        assert answer.weights.shape == (batch, LAYER.num_heads, num_queries, request.num_kv)
        np.testing.assert_array_equal(
            answer.output.astype(np.float32), np.repeat(marks[..., None], LAYER.num_hiddens, axis=-1)
        )
        expected = np.arange(request.num_kv) < computed[:, None, :, None]
        np.testing.assert_array_equal(answer.weights != 0, np.broadcast_to(expected, answer.weights.shape))

    def test_one_part_is_the_answer(self) -> None:
        """The result of an only part is not copied."""
        inputs = inputs_of(request_of([7, 7, 7]))
        assembly = Assembly(inputs, LAYER, 1, need_weights=False)
        output = np.ones((B, Q, LAYER.num_hiddens), np.float32)
        assembly.place(ALL, EngineResult(output, None))
        answer = assembly.answer()
        assert answer.output is output
        assert answer.weights is None

    def test_answer_before_any_part(self) -> None:
        """There is no answer before a part was placed."""
        assembly = Assembly(inputs_of(request_of([7, 7, 7])), LAYER, 1, need_weights=False)
        with pytest.raises(RuntimeError, match="no part was placed"):
            assembly.answer()

"""What is computed for a request, and how the answer is put together. Pure: no engine is needed."""

import numpy as np
from hypothesis import given

from service.engine import EngineResult
from service.planner import assemble, plan
from service.tensors import AttentionInputs, WireTensors
from tests.strategies import LAYER, Request, examples, float_dtypes, requests

B, Q, K = 2, 3, 7

drawn = examples(80)


def inputs_of(request: Request) -> AttentionInputs:
    """A request, judged."""
    return AttentionInputs.parse(request.wire(), LAYER)


def request_of(valid_lens: list[int] | list[list[int]]) -> Request:
    """Ones in float32, so that every zero is the planner's."""
    return Request(
        np.ones((B, Q, LAYER.query_size), np.float32),
        np.ones((B, K, LAYER.key_size), np.float32),
        np.ones((B, K, LAYER.value_size), np.float32),
        np.array(valid_lens),
    )


class TestPlan:
    @given(request=requests(LAYER, dtypes=float_dtypes))
    @drawn
    def test_keys_end_at_the_longest_length_and_padding_is_zero(self, request: Request) -> None:
        """The call's keys are the request's, cut after the last that is read, and 0 where an entry reads none."""
        inputs = inputs_of(request)
        call = plan(inputs, need_weights=False)
        extent = int(request.num_kv - request.beyond.all(0).sum())
        for got, sent in ((call.keys, request.keys), (call.values, request.values)):
            want = sent.astype(np.float32)
            want[request.beyond] = 0
            np.testing.assert_array_equal(got, want[:, :extent], strict=True)
            assert got.flags.c_contiguous
        assert call.queries is inputs.queries
        assert call.valid_lens is inputs.valid_lens

    @given(request=requests(LAYER))
    @drawn
    def test_writes_to_no_array_of_the_request(self, request: Request) -> None:
        """The request's arrays, perhaps views of its body, are never written to, whatever they hold as padding."""
        request.keys[request.beyond] = np.nan
        sent = (request.queries, request.keys, request.values)
        copies = [tensor.copy() for tensor in sent]
        for tensor in sent:
            tensor.flags.writeable = False
        plan(inputs_of(request), need_weights=True)
        for tensor, copy in zip(sent, copies, strict=True):
            np.testing.assert_array_equal(tensor, copy)

    def test_nothing_is_copied_where_nothing_is_padding(self) -> None:
        """Keys that are all read go to the engine as they came."""
        inputs = inputs_of(request_of([[7, 1, 2], [3, 7, 0]]))
        call = plan(inputs, need_weights=False)
        assert call.keys is inputs.keys
        assert call.values is inputs.values

    def test_a_query_of_length_0_keeps_every_key(self) -> None:
        """An entry with a query of length 0 reads all K keys; another entry is zeroed beyond its own length."""
        call = plan(inputs_of(request_of([[1, 0, 1], [2, 1, 2]])), need_weights=False)
        assert call.keys.shape[1] == K
        assert (call.keys[0] == 1).all()
        assert (call.keys[1, :2] == 1).all()
        assert (call.keys[1, 2:] == 0).all()

    def test_keys_that_are_the_values_stay_one_array(self) -> None:
        """Self-attention is trimmed once: keys and values of the call are one array, too."""
        layer = LAYER.model_copy(update={"key_size": 11, "value_size": 11})
        wire = WireTensors({"queries": np.ones((B, Q, 11), np.float32), "valid_lens": np.array([1, 2])})
        call = plan(AttentionInputs.parse(wire, layer), need_weights=False)
        assert call.keys.shape == (B, 2, 11)
        assert call.values is call.keys
        assert call.queries.shape == (B, Q, 11)
        assert (call.queries == 1).all()

    def test_need_weights_is_passed_on(self) -> None:
        """The call asks for what the request asked for."""
        inputs = inputs_of(request_of([1, 2]))
        assert plan(inputs, need_weights=True).need_weights
        assert not plan(inputs, need_weights=False).need_weights


class TestAssemble:
    @given(request=requests(LAYER, dtypes=float_dtypes))
    @drawn
    def test_weights_of_trimmed_keys_are_0(self, request: Request) -> None:
        """Weights come back for all K keys of the request: the engine's, then zeros; all in the queries' dtype."""
        inputs = inputs_of(request)
        extent = plan(inputs, need_weights=True).keys.shape[1]
        shape = (*request.queries.shape[:2], LAYER.num_hiddens)
        weights = np.ones((request.batch, LAYER.num_heads, shape[1], extent), np.float32)
        answer = assemble(inputs, EngineResult(np.full(shape, 0.5, np.float32), weights))
        assert answer.weights is not None
        assert answer.weights.shape == (*weights.shape[:3], request.num_kv)
        assert (answer.weights[..., :extent] == 1).all()
        assert (answer.weights[..., extent:] == 0).all()
        assert answer.output.dtype == answer.weights.dtype == request.queries.dtype
        assert (answer.output == 0.5).all()

    def test_no_weights_without_asking(self) -> None:
        """A result without weights is an answer without."""
        output = np.ones((B, Q, LAYER.num_hiddens), np.float32)
        answer = assemble(inputs_of(request_of([1, 2])), EngineResult(output, None))
        assert answer.weights is None
        assert answer.output is output

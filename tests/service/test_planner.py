"""Which rows and queries of a request are computed together. Pure: no engine is needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.cost import CALL_OVERHEAD_S, CostModel, row_flops, score_bytes
from service.planner import Limits, Load, Part, join, plan
from service.tensors import AttentionInputs, WireTensors
from tests.strategies import (
    DEAR_CALLS,
    DEAR_WORK,
    LAYER,
    UNBOUNDED,
    PackedRequest,
    Request,
    costs,
    examples,
    limits,
    packed_requests,
    requests,
)

drawn = examples(150)

AnyRequest = Request | PackedRequest
anything = st.one_of(requests(LAYER), packed_requests(LAYER))


def inputs_of(request: AnyRequest) -> AttentionInputs:
    """A request, judged."""
    return AttentionInputs.parse(request.wire(), LAYER)


def of_lengths(valid_lens: list[int], num_queries: int = 3, num_kv: int = 97) -> AttentionInputs:
    """A request of ones with these lengths."""
    batch = len(valid_lens)
    tensors = {
        "queries": np.ones((batch, num_queries, LAYER.query_size), np.float32),
        "keys": np.ones((batch, num_kv, LAYER.key_size), np.float32),
        "values": np.ones((batch, num_kv, LAYER.value_size), np.float32),
        "valid_lens": np.array(valid_lens),
    }
    return AttentionInputs.parse(WireTensors(tensors), LAYER)


def rows_of(part: Part, batch: int) -> list[int]:
    """The batch entries of a part."""
    return np.arange(batch)[part.rows].tolist()


def seconds_of(parts: list[Part], cost: CostModel) -> float:
    """What the plan costs, by the model."""
    return sum(part.seconds(LAYER, cost) for part in parts)


@given(request=anything, cost=costs, limits=limits)
@drawn
def test_everything_once(request: AnyRequest, cost: CostModel, limits: Limits) -> None:
    """Every query of every row is in exactly one part, whatever calls cost and may take."""
    inputs = inputs_of(request)
    batch, longest, _ = inputs.queries.shape
    seen = np.zeros((batch, longest), int)
    for part in plan(inputs, LAYER, cost, limits).parts:
        seen[part.rows, part.queries] += 1
        assert part.num_rows == len(rows_of(part, batch))
    sent = np.arange(longest) < inputs.queries.lengths[:, None]
    assert (seen[sent] == 1).all()


@given(request=anything, cost=costs, limits=limits)
@drawn
def test_no_key_that_counts_is_left_out(request: AnyRequest, cost: CostModel, limits: Limits) -> None:
    """A part computes as many keys as its longest row has, and no part more than some row of the request has."""
    inputs = inputs_of(request)
    for part in plan(inputs, LAYER, cost, limits).parts:
        assert inputs.extents[part.rows].max() <= part.num_kv
        assert part.num_kv in inputs.extents


@given(request=anything, cost=costs, limits=limits)
@drawn
def test_no_row_that_averages_all_keys_gets_more(request: AnyRequest, cost: CostModel, limits: Limits) -> None:
    """A row with a length of 0 averages its keys, so its part has exactly as many as it has, and says so."""
    inputs = inputs_of(request)
    for part in plan(inputs, LAYER, cost, limits).parts:
        averaging = inputs.shortest[part.rows] == 0
        assert (inputs.keys.lengths[part.rows][averaging] == part.num_kv).all()
        assert part.exact or not averaging.any()


@given(request=anything, cost=costs, limits=limits)
@drawn
def test_tiles_have_their_keys_projected_once(request: AnyRequest, cost: CostModel, limits: Limits) -> None:
    """Every key that a tile reads is projected by exactly one call before it, and no other key is."""
    inputs = inputs_of(request)
    calls = plan(inputs, LAYER, cost, limits)
    tiled = {row: part.num_kv for part in calls.parts if part.projected for row in rows_of(part, len(inputs.queries))}
    seen = {row: np.zeros(num_kv, int) for row, num_kv in tiled.items()}
    for piece in calls.projections:
        seen[piece.row][piece.keys] += 1
        assert piece.keys.stop <= tiled[piece.row]
    assert all((projected == 1).all() for projected in seen.values())


@given(request=anything, cost=costs, limits=limits)
@drawn
def test_scores_fit_the_workspace(request: AnyRequest, cost: CostModel, limits: Limits) -> None:
    """The scores of a part fit the workspace, unless it is a single query's."""
    for part in plan(inputs_of(request), LAYER, cost, limits).parts:
        size = part.num_rows * score_bytes(LAYER, part.num_queries, part.num_kv)
        assert size <= limits.workspace_bytes or (part.num_rows, part.num_queries) == (1, 1)


@given(request=anything, cost=costs, limits=limits)
@drawn
def test_calls_are_short(request: AnyRequest, cost: CostModel, limits: Limits) -> None:
    """A part of several rows takes no longer than a call may, by the model."""
    for part in plan(inputs_of(request), LAYER, cost, limits).parts:
        assert part.num_rows == 1 or part.seconds(LAYER, cost) <= limits.call_s * (1 + 1e-9)


class TestGrouping:
    def test_equal_lengths_are_one_call(self) -> None:
        """Rows without different padding are one call, trimmed to their length."""
        (part,) = plan(of_lengths([53, 53, 53]), LAYER, DEAR_WORK, UNBOUNDED).parts
        assert (part.rows, part.queries, part.num_kv) == (slice(0, 3), slice(0, 3), 53)

    def test_dear_calls_are_few(self) -> None:
        """Where a call costs more than any padding, there is one."""
        (part,) = plan(of_lengths([1, 97, 13]), LAYER, DEAR_CALLS, UNBOUNDED).parts
        assert part.num_kv == 97

    def test_dear_work_is_not_padded(self) -> None:
        """Where a call costs next to nothing beside its work, every length has its own, and no padding is computed."""
        inputs = of_lengths([13, 97, 1, 13])
        parts = plan(inputs, LAYER, DEAR_WORK, UNBOUNDED).parts
        assert {part.num_kv: rows_of(part, 4) for part in parts} == {1: [2], 13: [0, 3], 97: [1]}

    def test_a_length_of_0_is_all_keys(self) -> None:
        """A row of length 0 averages every key, so it stands with the longest."""
        parts = plan(of_lengths([0, 5]), LAYER, DEAR_WORK, UNBOUNDED).parts
        assert {part.num_kv: rows_of(part, 2) for part in parts} == {97: [0], 5: [1]}

    @pytest.mark.parametrize("seed", range(5), ids=str)
    @pytest.mark.parametrize("call_s", [0.0, 1e-5, 1e-4, 1e-3], ids=str)
    def test_no_partition_of_sorted_rows_is_cheaper(self, seed: int, call_s: float) -> None:
        """The plan costs as little as the best of all partitions, found by trying each."""
        lengths = sorted(np.random.default_rng(seed).integers(1, 97, 7).tolist())
        cost = CostModel.linear(call_s, 1e-9)
        parts = plan(of_lengths(lengths), LAYER, cost, UNBOUNDED).parts

        def by_cuts(cuts: int) -> float:
            ends = [index for index in range(1, 7) if cuts >> (index - 1) & 1] + [7]
            starts = [0, *ends[:-1]]
            return sum(
                CALL_OVERHEAD_S + call_s + (end - start) * row_flops(LAYER, 3, lengths[end - 1]) * 1e-9
                for start, end in zip(starts, ends, strict=True)
            )

        planned = seconds_of(list(parts), cost) + len(parts) * CALL_OVERHEAD_S
        assert planned == pytest.approx(min(by_cuts(cuts) for cuts in range(2**6)), rel=1e-9)

    def test_many_lengths_are_few_groups(self) -> None:
        """Hundreds of different lengths make at most as many calls as are looked for, and waste little."""
        lengths = np.random.default_rng(0).permutation(np.arange(1, 499))
        inputs = of_lengths(lengths.tolist(), num_queries=1, num_kv=499)
        parts = plan(inputs, LAYER, DEAR_WORK, UNBOUNDED).parts
        assert 8 <= len(parts) <= 32
        # Rounded up in equal steps, a thirty-second of the range is wasted on average half: under 5 % here.
        computed = sum(part.num_rows * part.num_kv for part in parts)
        assert computed <= 1.05 * lengths.sum()


class TestTiling:
    def test_queries_are_split_evenly(self) -> None:
        """One row whose scores outgrow the workspace is computed some queries at a time, in even tiles."""
        inputs = of_lengths([97], num_queries=11)
        limits = Limits(workspace_bytes=4 * score_bytes(LAYER, 1, 97), call_s=float("inf"))
        parts = plan(inputs, LAYER, DEAR_CALLS, limits).parts
        assert [(part.queries.start, part.queries.stop) for part in parts] == [(0, 4), (4, 8), (8, 11)]

    def test_rows_are_split_before_queries(self) -> None:
        """Rows that fit one by one are computed whole."""
        inputs = of_lengths([97] * 5, num_queries=3)
        limits = Limits(workspace_bytes=2 * score_bytes(LAYER, 3, 97), call_s=float("inf"))
        parts = plan(inputs, LAYER, DEAR_CALLS, limits).parts
        assert [part.num_rows for part in parts] == [2, 2, 1]
        assert all(part.queries == slice(0, 3) for part in parts)

    def test_with_weights_no_keys_are_projected_apart(self) -> None:
        """Weights take as much memory as the scores, so tiles that answer them are whole calls of the layer."""
        limits = Limits(workspace_bytes=4 * score_bytes(LAYER, 1, 97), call_s=1e-9)
        calls = plan(of_lengths([97], num_queries=11), LAYER, DEAR_WORK, limits, need_weights=True)
        assert calls.projections == ()
        assert [part.num_queries for part in calls.parts] == [4, 4, 3]

    def test_a_row_that_takes_long_is_tiled(self) -> None:
        """A row of many times what a call may take becomes tiles of about that, after its keys were projected."""
        inputs = of_lengths([997], num_queries=499, num_kv=997)
        limits = Limits(workspace_bytes=2**62, call_s=DEAR_WORK.seconds(row_flops(LAYER, 499, 997)) / 7)
        calls = plan(inputs, LAYER, DEAR_WORK, limits)
        assert len(calls.projections) >= 1
        assert 5 <= len(calls.parts) <= 7
        assert all(part.seconds(LAYER, DEAR_WORK) <= limits.call_s for part in calls.parts)


class TestJoining:
    TINY = Load(1, 2, 3, exact=False)

    def test_tiny_calls_become_one(self) -> None:
        """Where calls are dear, all that wait go into one, as long as the longest."""
        call, chosen = join(self.TINY, [Load(1, 3, 5, exact=False), self.TINY], LAYER, DEAR_CALLS, UNBOUNDED)
        assert (call, chosen) == (Load(3, 3, 5, exact=False), [0, 1])

    def test_work_is_not_padded_to_save_a_hand_over(self) -> None:
        """Where calls cost only their hand-over, what has the same shape joins, and what is longer does not."""
        assert join(self.TINY, [Load(1, 2, 499, exact=False), self.TINY], LAYER, DEAR_WORK, UNBOUNDED)[1] == [1]

    def test_what_is_dear_to_copy_stays_out(self) -> None:
        """Rows that take longer to copy than a hand-over takes are computed where they are."""
        large = Load(1, 19_999, 19_999, exact=False)
        assert join(large, [large], LAYER, DEAR_WORK, UNBOUNDED)[1] == []

    def test_what_is_much_longer_stays_out(self) -> None:
        """A part joins only where the padding costs less than the call saves."""
        cost = CostModel.linear(call_s=row_flops(LAYER, 2, 5) * 1e-9, flop_s=1e-9)
        waiting = [Load(1, 2, 499, exact=False), Load(1, 2, 4, exact=False)]
        assert join(self.TINY, waiting, LAYER, cost, UNBOUNDED)[1] == [1]

    def test_rows_that_average_their_keys_join_their_like(self) -> None:
        """A row of length 0 shares a call only where nobody has another number of keys."""
        exact = Load(1, 2, 3, exact=True)
        assert join(exact, [Load(1, 2, 4, exact=False), self.TINY], LAYER, DEAR_CALLS, UNBOUNDED)[1] == [1]
        assert join(Load(1, 2, 4, exact=False), [exact], LAYER, DEAR_CALLS, UNBOUNDED)[1] == []

    def test_limits_hold_for_the_whole_call(self) -> None:
        """What joins fits the workspace together, and the time of one call."""
        three = Limits(3 * score_bytes(LAYER, 2, 3), float("inf"))
        assert join(self.TINY, [self.TINY] * 5, LAYER, DEAR_CALLS, three)[1] == [0, 1]
        cost = CostModel.linear(1.0, 1.0 / row_flops(LAYER, 2, 3))
        assert join(self.TINY, [self.TINY] * 5, LAYER, cost, Limits(2**62, 4.5))[1] == [0, 1]

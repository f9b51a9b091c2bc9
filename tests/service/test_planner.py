"""Which rows and queries of a request are computed together. Pure: no engine is needed."""

import numpy as np
import pytest
from hypothesis import given

from service.cost import CostModel, row_flops, score_bytes
from service.planner import Limits, Part, plan
from service.tensors import AttentionInputs, WireTensors
from tests.strategies import DEAR_CALLS, DEAR_WORK, LAYER, UNBOUNDED, Request, costs, examples, limits, requests

drawn = examples(150)


def inputs_of(request: Request) -> AttentionInputs:
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
    return sum(
        cost.call_s + part.num_rows * cost.row_s(LAYER, part.queries.stop - part.queries.start, part.num_kv)
        for part in parts
    )


@given(request=requests(LAYER), cost=costs, limits=limits)
@drawn
def test_everything_once(request: Request, cost: CostModel, limits: Limits) -> None:
    """Every query of every row is in exactly one part, whatever calls cost and may take."""
    inputs = inputs_of(request)
    seen = np.zeros(inputs.valid_lens.shape, int)
    for part in plan(inputs, LAYER, cost, limits):
        seen[part.rows, part.queries] += 1
        assert part.num_rows == len(rows_of(part, len(seen)))
    assert (seen == 1).all()


@given(request=requests(LAYER), cost=costs, limits=limits)
@drawn
def test_no_key_that_counts_is_left_out(request: Request, cost: CostModel, limits: Limits) -> None:
    """A part computes as many keys as its longest row has, and no part more than some row of the request has."""
    inputs = inputs_of(request)
    for part in plan(inputs, LAYER, cost, limits):
        assert inputs.extents[part.rows].max() <= part.num_kv
        assert part.num_kv in inputs.extents


@given(request=requests(LAYER), cost=costs, limits=limits)
@drawn
def test_scores_fit_the_workspace(request: Request, cost: CostModel, limits: Limits) -> None:
    """The scores of a part fit the workspace, unless it is a single query's."""
    for part in plan(inputs_of(request), LAYER, cost, limits):
        num_queries = part.queries.stop - part.queries.start
        size = part.num_rows * score_bytes(LAYER, num_queries, part.num_kv)
        assert size <= limits.workspace_bytes or (part.num_rows, num_queries) == (1, 1)


@given(request=requests(LAYER), cost=costs, limits=limits)
@drawn
def test_calls_are_short(request: Request, cost: CostModel, limits: Limits) -> None:
    """A part of several rows takes no longer than a call may, by the model."""
    for part in plan(inputs_of(request), LAYER, cost, limits):
        row_s = cost.row_s(LAYER, part.queries.stop - part.queries.start, part.num_kv)
        assert part.num_rows == 1 or part.num_rows * row_s <= limits.call_s * (1 + 1e-9)


class TestGrouping:
    def test_equal_lengths_are_one_call(self) -> None:
        """Rows without different padding are one call, trimmed to their length."""
        (part,) = plan(of_lengths([53, 53, 53]), LAYER, DEAR_WORK, UNBOUNDED)
        assert (part.rows, part.queries, part.num_kv) == (slice(0, 3), slice(0, 3), 53)

    def test_dear_calls_are_few(self) -> None:
        """Where a call costs more than any padding, there is one."""
        (part,) = plan(of_lengths([1, 97, 13]), LAYER, DEAR_CALLS, UNBOUNDED)
        assert part.num_kv == 97

    def test_dear_work_is_not_padded(self) -> None:
        """Where a call costs nothing, every length has its own, and no padding is computed."""
        inputs = of_lengths([13, 97, 1, 13])
        parts = plan(inputs, LAYER, DEAR_WORK, UNBOUNDED)
        assert {part.num_kv: rows_of(part, 4) for part in parts} == {1: [2], 13: [0, 3], 97: [1]}

    def test_a_length_of_0_is_all_keys(self) -> None:
        """A row of length 0 averages every key, so it stands with the longest."""
        parts = plan(of_lengths([0, 5]), LAYER, DEAR_WORK, UNBOUNDED)
        assert {part.num_kv: rows_of(part, 2) for part in parts} == {97: [0], 5: [1]}

    @pytest.mark.parametrize("seed", range(5), ids=str)
    @pytest.mark.parametrize("call_s", [0.0, 1e-7, 1e-6, 1e-5], ids=str)
    def test_no_partition_of_sorted_rows_is_cheaper(self, seed: int, call_s: float) -> None:
        """The plan costs as little as the best of all partitions, found by trying each."""
        lengths = sorted(np.random.default_rng(seed).integers(1, 97, 7).tolist())
        cost = CostModel(call_s, 1e-11)
        parts = plan(of_lengths(lengths), LAYER, cost, UNBOUNDED)

        def by_cuts(cuts: int) -> float:
            ends = [index for index in range(1, 7) if cuts >> (index - 1) & 1] + [7]
            starts = [0, *ends[:-1]]
            return sum(
                cost.call_s + (end - start) * row_flops(LAYER, 3, lengths[end - 1]) * cost.flop_s
                for start, end in zip(starts, ends, strict=True)
            )

        assert seconds_of(parts, cost) == pytest.approx(min(by_cuts(cuts) for cuts in range(2**6)), rel=1e-9)

    def test_many_lengths_are_few_groups(self) -> None:
        """Hundreds of different lengths make at most as many calls as are looked for, and waste little."""
        lengths = np.random.default_rng(0).permutation(np.arange(1, 499))
        inputs = of_lengths(lengths.tolist(), num_queries=1, num_kv=499)
        parts = plan(inputs, LAYER, DEAR_WORK, UNBOUNDED)
        assert 8 <= len(parts) <= 32
        # Rounded up in equal steps, a thirty-second of the range is wasted on average half: under 5 % here.
        computed = sum(part.num_rows * part.num_kv for part in parts)
        assert computed <= 1.05 * lengths.sum()


class TestTiling:
    def test_queries_are_split_evenly(self) -> None:
        """One row whose scores outgrow the workspace is computed some queries at a time, in even tiles."""
        inputs = of_lengths([97], num_queries=11)
        limits = Limits(workspace_bytes=4 * score_bytes(LAYER, 1, 97), call_s=float("inf"))
        parts = plan(inputs, LAYER, DEAR_CALLS, limits)
        assert [(part.queries.start, part.queries.stop) for part in parts] == [(0, 4), (4, 8), (8, 11)]

    def test_rows_are_split_before_queries(self) -> None:
        """Rows that fit one by one are computed whole."""
        inputs = of_lengths([97] * 5, num_queries=3)
        limits = Limits(workspace_bytes=2 * score_bytes(LAYER, 3, 97), call_s=float("inf"))
        parts = plan(inputs, LAYER, DEAR_CALLS, limits)
        assert [part.num_rows for part in parts] == [2, 2, 1]
        assert all(part.queries == slice(0, 3) for part in parts)

"""The gate's own instruments: its oracle, its grid and its measure of error."""

import dataclasses
import math

import numpy as np
import pytest

from export.convert import spec_of
from export.errors import ParityError
from export.oracle import Oracle
from export.parity import CaseResult, _judge, comparisons, relative_error
from export.parity_grid import CASES, LARGE_SCORE, Case, draw
from export.signature import LOWERINGS
from model.attention import MultiHeadAttention, seeded_layer
from tests.conftest import weights_of
from tests.oracle import multi_head_attention


@pytest.fixture(params=["dot_product", "additive"])
def layer(request: pytest.FixtureRequest) -> MultiHeadAttention:
    """A layer of either scoring, 2 heads of 3, with a bias."""
    return seeded_layer(6, 2, seed=7, bias=True, query_size=5, key_size=7, value_size=11, scoring=request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracles_agree(layer: MultiHeadAttention, case: Case) -> None:
    """The gate's vectorised oracle and the tests' loops, written apart, agree to float64 rounding on the whole grid."""
    oracle = Oracle(weights_of(layer), layer.num_heads)
    inputs = draw(case, spec_of(layer), oracle, seed=3)
    got = oracle.attend(inputs.queries, inputs.keys, inputs.values, inputs.full_valid_lens())
    want = multi_head_attention(
        weights_of(layer), layer.num_heads, inputs.queries, inputs.keys, inputs.values, inputs.valid_lens
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_oracle_projects(layer: MultiHeadAttention, which: int) -> None:
    """Head h of the projected keys and values is the h-th block of rows of its weight, applied."""
    rng = np.random.default_rng(13)
    given = (rng.standard_normal((3, 5, 7)), rng.standard_normal((3, 5, 11)))
    got = Oracle(weights_of(layer), layer.num_heads).project(*given)[which]
    weights, name = weights_of(layer), ("W_k", "W_v")[which]
    for b, h, k, d in np.ndindex(3, 2, 5, 3):
        row = h * 3 + d
        want = weights[f"{name}.weight"][row].astype(np.float64) @ given[which][b, k] + weights[f"{name}.bias"][row]
        assert got[b, h, k, d] == pytest.approx(want, rel=1e-12)


def test_oracle_rounds(layer: MultiHeadAttention) -> None:
    """The oracle of int8 projects rows and weights that are whole multiples of a step of their own."""
    oracle = Oracle(weights_of(layer), layer.num_heads, steps=(127, 64))
    keys = np.random.default_rng(17).standard_normal((1, 1, 7))
    got = oracle.project(keys, np.zeros((1, 1, 11)))[0].reshape(-1)
    weights, x = weights_of(layer), keys[0, 0]
    step = np.abs(x).max() / 127
    rounded = [round(one / step) * step for one in x]
    for feature, row in enumerate(weights["W_k.weight"].astype(np.float64)):
        row_step = np.abs(row).max() / 64
        want = sum(round(one / row_step) * row_step * other for one, other in zip(row, rounded, strict=True))
        assert got[feature] == pytest.approx(want + weights["W_k.bias"][feature], rel=1e-9)


class TestGrid:
    def test_lowerings_without_a_mask_are_asked_for_no_mask(self) -> None:
        """They get exactly the cases in which every key counts, at least one of each odd shape; the others get all."""
        asked = {lowering.name: [case for one, case in comparisons() if one == lowering] for lowering in LOWERINGS}
        for name in ("full", "attend_full"):
            assert asked[name] == [case for case in CASES if case.lengths in ("absent", "full")]
            assert any(case.batch > 1 for case in asked[name])
            assert any(case.num_queries == 1 for case in asked[name])
            assert any(case.num_queries > case.num_kv > 1 for case in asked[name])
            assert any(case.num_queries > 128 for case in asked[name])
            assert any(case.num_kv > 2048 for case in asked[name])
            assert any(case.large_scores for case in asked[name])
        for name in ("masked", "weights", "project", "attend"):
            assert asked[name] == list(CASES)

    def test_holds_every_odd_shape(self) -> None:
        """Batch 1, length 1, Q and K in either order, absent, (B,) and (B, Q) lengths, large scores."""
        assert any(case.batch == 1 for case in CASES)
        assert any(case.num_queries == 1 for case in CASES)
        assert any(case.num_kv == 1 for case in CASES)
        assert any(case.num_queries > case.num_kv for case in CASES)
        assert any(case.num_queries < case.num_kv for case in CASES)
        assert {case.lengths for case in CASES} == {"absent", "zero", "one", "full", "mixed", "per_query"}
        assert any(case.large_scores for case in CASES)

    @pytest.mark.parametrize("case", [case for case in CASES if case.lengths == "per_query"], ids=lambda c: c.name)
    def test_drawn_lengths_hold_the_edges(self, layer: MultiHeadAttention, case: Case) -> None:
        """Lengths 0, 1 and K are in every drawn set."""
        inputs = draw(case, spec_of(layer), Oracle(weights_of(layer), layer.num_heads), seed=0)
        assert inputs.valid_lens is not None
        assert {0, 1, case.num_kv} <= set(inputs.valid_lens.reshape(-1).tolist())

    @pytest.mark.parametrize("case", [case for case in CASES if case.large_scores], ids=lambda case: case.name)
    def test_large_scores_are_large(self, layer: MultiHeadAttention, case: Case) -> None:
        """The largest score is 1e4 where scoring can reach it; additive scores are bounded by their own weights."""
        oracle = Oracle(weights_of(layer), layer.num_heads)
        inputs = draw(case, spec_of(layer), oracle, seed=0)
        largest = np.abs(oracle.scores(inputs.queries, inputs.keys)).max()
        if layer.scoring == "dot_product":
            assert largest == pytest.approx(LARGE_SCORE, rel=1e-3)

    def test_same_seed_same_inputs(self, layer: MultiHeadAttention) -> None:
        """A case is the same on every run."""
        oracle = Oracle(weights_of(layer), layer.num_heads)
        one, other = (draw(CASES[-1], spec_of(layer), oracle, seed=11) for _ in range(2))
        np.testing.assert_array_equal(one.queries, other.queries)


def perfect_results() -> list[CaseResult]:
    """What the gate's process would say of graphs without any error."""
    return [CaseResult(lowering.name, case.name, 1, 1, 1, 0.0, 0.0) for lowering, case in comparisons()]


class TestMeasure:
    def test_relative_to_scale(self) -> None:
        """The error is relative to the largest expected value, not to each one."""
        assert relative_error(np.array([100.0, 0.1]), np.array([100.0, 0.0])) == pytest.approx(0.001)

    @pytest.mark.parametrize(
        ("got", "want"),
        [
            pytest.param(np.array([np.nan, 1.0]), np.array([1.0, 1.0]), id="nan in the answer"),
            pytest.param(np.ones((2, 3)), np.ones((3, 2)), id="another shape"),
            pytest.param(np.array([np.inf]), np.array([1.0]), id="infinite answer"),
        ],
    )
    def test_never_passes(self, got: np.ndarray, want: np.ndarray) -> None:
        """What is not a close answer is beyond every limit."""
        assert not relative_error(got, want) <= 1e30

    @pytest.mark.parametrize("field", ["error_torch", "error_oracle"])
    @pytest.mark.parametrize("error", [1.1e-5, math.nan, math.inf], ids=["just beyond", "nan", "inf"])
    def test_one_bad_error_fails(self, field: str, error: float) -> None:
        """One error of one case beyond the limit, or nan, fails the whole report."""
        *results, last = perfect_results()
        with pytest.raises(ParityError, match="1 of 104 comparisons"):
            _judge([*results, dataclasses.replace(last, **{field: error})], 1e-5)

    def test_perfect_results_pass(self) -> None:
        """Every comparison measured and none in error is a report."""
        assert _judge(perfect_results(), 1e-5).max_error == 0

    @pytest.mark.parametrize(
        "results",
        [
            pytest.param([], id="nothing ran"),
            pytest.param(perfect_results()[:-1], id="the last is missing"),
            pytest.param(perfect_results()[:1] + perfect_results()[:-1], id="one ran twice instead of another"),
        ],
    )
    def test_missing_case_fails(self, results: list[CaseResult]) -> None:
        """A grid of which anything is missing has proved nothing."""
        with pytest.raises(ParityError, match=f"{len(results)} comparisons ran, want 104, each once"):
            _judge(results, 1e-5)

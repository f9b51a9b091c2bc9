"""Seconds from measured points, and back."""

import pytest

from service.cost import CostModel, attend_flops, projection_flops, row_flops
from tests.strategies import LAYER

# Flat at first, as reading the weights is; then two different slopes.
MODEL = CostModel(((10.0, 3.0), (20.0, 3.0), (40.0, 7.0), (50.0, 12.0)))


class TestSeconds:
    @pytest.mark.parametrize(
        ("flops", "seconds"),
        [(0, 3), (10, 3), (15, 3), (20, 3), (30, 5), (40, 7), (45, 9.5), (50, 12), (70, 22)],
        ids=str,
    )
    def test_lie_on_the_lines(self, flops: float, seconds: float) -> None:
        """Measured points are themselves, what is between them lies on the line, and the last line goes on."""
        assert MODEL.seconds(flops) == pytest.approx(seconds)

    def test_of_free_work_are_the_calls_alone(self) -> None:
        """Where operations cost nothing, every call costs the same."""
        assert CostModel.linear(0.5, 0.0).seconds(1e15) == 0.5


class TestFlopsWithin:
    @pytest.mark.parametrize(
        ("seconds", "flops"), [(1, 0), (3, 0), (5, 30), (7, 40), (9.5, 45), (12, 50), (22, 70)], ids=str
    )
    def test_are_the_inverse(self, seconds: float, flops: float) -> None:
        """The most work that fits is where the line reaches the time; nothing fits in less than the least call."""
        assert MODEL.flops_within(seconds) == pytest.approx(flops)

    def test_are_endless_where_work_is_free(self) -> None:
        """Any amount fits into a call whose length does not depend on it."""
        assert CostModel.linear(0.5, 0.0).flops_within(1.0) == float("inf")


def test_projections_and_the_rest_are_the_whole() -> None:
    """What a tile leaves out is what projecting its keys takes."""
    assert row_flops(LAYER, 5, 7) == projection_flops(LAYER, 7) + attend_flops(LAYER, 5, 7)
    assert projection_flops(LAYER, 7) == 2 * 7 * 21 * (13 + 17)
    assert attend_flops(LAYER, 5, 7) == 2 * 5 * 21 * (11 + 21) + 2 * (2 * 5 * 7 * 21)


def test_heads_that_are_gone_cost_nothing() -> None:
    """Every operation of a layer is some head's: two of three cost two thirds, though the output is as wide."""
    pruned = LAYER.model_copy(update={"num_heads": 2})
    assert pruned.num_hiddens == LAYER.num_hiddens
    assert 3 * row_flops(pruned, 5, 7) == 2 * row_flops(LAYER, 5, 7)
    assert 3 * attend_flops(pruned, 5, 7) == 2 * attend_flops(LAYER, 5, 7)
    assert 3 * projection_flops(pruned, 7) == 2 * projection_flops(LAYER, 7)

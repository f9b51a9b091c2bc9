"""Which weights are wanted, by two parameters, and what is left of those of all heads."""

import numpy as np
import pytest

from service.errors import InvalidParameter
from service.wanted import WantedWeights
from tests.strategies import LAYER


@pytest.mark.parametrize(
    ("need_weights", "heads", "wanted"),
    [
        (None, None, None),
        ("false", None, None),
        ("0", None, None),
        ("true", None, WantedWeights()),
        ("1", None, WantedWeights()),
        ("True", None, WantedWeights()),
        ("mean", None, WantedWeights(mean=True)),
        (None, "2", WantedWeights((2,))),
        ("true", "2, 0", WantedWeights((2, 0))),
        ("mean", "0,1", WantedWeights((0, 1), mean=True)),
    ],
)
def test_is_read(need_weights: str | None, heads: str | None, wanted: WantedWeights | None) -> None:
    """Whoever names heads wants their weights."""
    assert WantedWeights.parse(need_weights, heads) == wanted


@pytest.mark.parametrize(
    ("need_weights", "heads", "said"),
    [
        ("maybe", None, "need_weights: got 'maybe', want true, false or mean"),
        ("", None, "need_weights: got ''"),
        ("false", "0", "heads: got '0' beside need_weights=false"),
        ("true", "", "heads: got '', want numbers"),
        (None, "0,", "heads: got '0,'"),
        (None, "-1", "heads: got '-1'"),
        (None, "1.0", "heads: got '1.0'"),
        (None, "²", "heads: got '²'"),
        (None, "0,0", "each head at most once"),
        (None, "0," * 5000, "heads: got '0,0,"),
        (None, "99999", "heads: got '99999'"),
    ],
)
def test_what_means_nothing_is_refused(need_weights: str | None, heads: str | None, said: str) -> None:
    """With what was got, and no more of it than fits a message."""
    with pytest.raises(InvalidParameter) as refusal:
        WantedWeights.parse(need_weights, heads)
    assert str(refusal.value).startswith(said) or said in str(refusal.value)
    assert len(str(refusal.value)) < 200


def test_heads_that_the_layer_has_not() -> None:
    """Refused with those it has."""
    WantedWeights((2, 0)).check(LAYER)
    with pytest.raises(InvalidParameter, match="heads: got 3, want 0 to 2"):
        WantedWeights((0, 3)).check(LAYER)


def test_all_of_them_are_not_copied() -> None:
    """Which is what most who want weights want."""
    weights = np.ones((2, 3, 5, 7), np.float32)
    assert WantedWeights().of(weights) is weights

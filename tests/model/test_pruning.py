"""Layers that have lost heads, held against the oracle of the whole layer with those heads' columns of W_o zero."""

import numpy as np
import pytest
import torch

from model.attention import MultiHeadAttention, seeded_layer
from model.pruning import keep_heads
from tests.conftest import weights_of
from tests.oracle import multi_head_attention

INPUTS = {
    "queries": np.random.default_rng(0).standard_normal((2, 3, 11), np.float32),
    "keys": np.random.default_rng(1).standard_normal((2, 5, 13), np.float32),
    "values": np.random.default_rng(2).standard_normal((2, 5, 17), np.float32),
    "valid_lens": np.array([[5, 2, 0], [1, 4, 3]]),
}


def layer_of(scoring: str, *, bias: bool) -> MultiHeadAttention:
    """Four heads of five, no two sizes equal."""
    return seeded_layer(20, 4, seed=3, bias=bias, query_size=11, key_size=13, value_size=17, scoring=scoring)


def answer_of(layer: MultiHeadAttention) -> tuple[np.ndarray, np.ndarray]:
    """Output and weights."""
    with torch.inference_mode():
        output, weights = layer(*map(torch.from_numpy, INPUTS.values()), need_weights=True)
    return output.numpy(), weights.numpy()


@pytest.mark.parametrize("heads", [[0], [3], [1, 2], [0, 2, 3], [0, 1, 2, 3]], ids=str)
@pytest.mark.parametrize("scoring", ["dot_product", "additive"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_equals_the_whole_layer_with_those_heads_zero(heads: list[int], scoring: str, bias: bool) -> None:
    """To 1e-6 of the largest output, and the weights are those of the heads that are left."""
    layer = layer_of(scoring, bias=bias)
    zeroed = weights_of(layer)
    zeroed["W_o.weight"] = zeroed["W_o.weight"].copy()
    for head in set(range(4)) - set(heads):
        zeroed["W_o.weight"][:, 5 * head : 5 * head + 5] = 0
    output, weights = multi_head_attention(zeroed, 4, **INPUTS)
    got, got_weights = answer_of(keep_heads(layer, heads))
    assert got.shape == (2, 3, 20)
    assert np.abs(got - output).max() <= 1e-6 * np.abs(output).max()
    assert np.abs(got_weights - weights[:, heads]).max() <= 1e-6


def test_is_smaller_and_apart() -> None:
    """Heads keep their size, the output keeps its own, and no parameter is shared with the whole layer."""
    layer = layer_of("dot_product", bias=True)
    pruned = keep_heads(layer, [2, 1])
    assert (pruned.num_heads, pruned.head_size, pruned.num_hiddens) == (2, 5, 20)
    assert {name: tuple(tensor.shape) for name, tensor in pruned.state_dict().items()} == {
        "W_q.weight": (10, 11), "W_q.bias": (10,), "W_k.weight": (10, 13), "W_k.bias": (10,),
        "W_v.weight": (10, 17), "W_v.bias": (10,), "W_o.weight": (20, 10), "W_o.bias": (20,),
    }  # fmt: skip
    assert not pruned.training
    before = pruned.W_q.weight.clone()
    with torch.no_grad():
        layer.W_q.weight.zero_()
    assert torch.equal(pruned.W_q.weight, before)


def test_order_says_nothing() -> None:
    """Heads stay in the order in which the layer has them, so that the same heads are the same layer."""
    one, other = (answer_of(keep_heads(layer_of("dot_product", bias=True), heads)) for heads in ([0, 2, 3], [3, 0, 2]))
    for got, wanted in zip(other, one, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_of_a_pruned_layer() -> None:
    """Pruning twice is pruning once."""
    layer = layer_of("dot_product", bias=True)
    twice = keep_heads(keep_heads(layer, [0, 2, 3]), [1, 2])
    np.testing.assert_array_equal(answer_of(twice)[0], answer_of(keep_heads(layer, [2, 3]))[0])


@pytest.mark.parametrize("heads", [[], [0, 0], [4], [-1], [0, 4]], ids=str)
def test_heads_that_are_none(heads: list[int]) -> None:
    """Refused, with those there are."""
    with pytest.raises(ValueError, match="0 to 3, each once"):
        keep_heads(layer_of("dot_product", bias=False), heads)

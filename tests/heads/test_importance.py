"""Three methods, each held against doing it: taking the head away, or asking autograd."""

import numpy as np
import pytest
import torch

from heads.contributions import contributions, look, output_of
from heads.importance import Wanted, scores
from model.attention import MultiHeadAttention
from tests.heads.made import answer, entries_of, layer_of, without


@pytest.fixture(params=[(True, "dot_product"), (False, "dot_product"), (True, "additive")], ids=str)
def layer(request: pytest.FixtureRequest) -> MultiHeadAttention:
    """With a bias and without, of either scoring."""
    bias, scoring = request.param
    return layer_of(bias=bias, scoring=scoring)


def found(layer: MultiHeadAttention, entry: object, wanted: Wanted) -> dict[str, np.ndarray]:
    """The scores of an entry, by method."""
    of_heads = contributions(layer, look(layer, entry).features)
    return {name: np.array(values) for name, values in scores(of_heads, output_of(layer, of_heads), wanted).items()}


def test_heads_add_up_to_the_output(layer: MultiHeadAttention) -> None:
    """With the bias, and with rows of length 0 among them."""
    for entry in entries_of(layer, 5):
        of_heads = contributions(layer, look(layer, entry).features)
        torch.testing.assert_close(output_of(layer, of_heads), answer(layer, entry), rtol=1e-5, atol=1e-6)


def test_leave_one_out(layer: MultiHeadAttention) -> None:
    """Each head taken away in turn, and the change measured."""
    (entry,) = entries_of(layer, 1)
    whole = answer(layer, entry)
    changes = [(answer(without(layer, {head}), entry) - whole).norm() / whole.norm() for head in range(4)]
    np.testing.assert_allclose(found(layer, entry, Wanted())["leave-one-out"], changes, rtol=1e-4)


@pytest.mark.parametrize("kind", ["none", "target", "gradient"])
def test_gradient_is_what_autograd_says(layer: MultiHeadAttention, kind: str) -> None:
    """Of the loss, by a mask of the heads, at all ones; for each of the three losses."""
    (entry,) = entries_of(layer, 1, seed=7)
    rng = torch.Generator().manual_seed(1)
    other = torch.randn(len(entry.queries), 20, generator=rng, dtype=torch.float64)
    wanted = {"none": Wanted(), "target": Wanted(target=other), "gradient": Wanted(gradient=other)}[kind]
    of_heads = contributions(layer, look(layer, entry).features).double().clone()
    bias = 0 if layer.W_o.bias is None else layer.W_o.bias.detach().double()
    mask = torch.ones(4, dtype=torch.float64, requires_grad=True)
    output = (mask[:, None, None] * of_heads).sum(dim=0) + bias
    losses = {
        "none": output.square().sum() / 2,
        "target": (output - other).square().sum() / 2,
        "gradient": (output * other).sum(),
    }
    losses[kind].backward()
    assert mask.grad is not None
    by_output = {"none": output, "target": output - other, "gradient": other}[kind].detach()
    expected = mask.grad.abs() / (output.detach().norm() * by_output.norm())
    np.testing.assert_allclose(found(layer, entry, wanted)["gradient"], expected, rtol=1e-5)


def test_loss_is_how_much_further_the_target_is(layer: MultiHeadAttention) -> None:
    """Some heads may be a hindrance: then it is less than 0."""
    (entry,) = entries_of(layer, 1, seed=9)
    target = answer(without(layer, {2}), entry).double()
    got = found(layer, entry, Wanted(target=target))["loss"]
    distances = [
        (answer(without(layer, gone), entry).double() - target).square().sum() for gone in ({}, {0}, {1}, {2}, {3})
    ]
    expected = [(after - distances[0]) / target.square().sum() for after in distances[1:]]
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-6)
    assert got[2] < 0
    assert got[2] == got.min()


def test_no_loss_without_a_target(layer: MultiHeadAttention) -> None:
    """There is nothing to be near to."""
    (entry,) = entries_of(layer, 1)
    assert set(found(layer, entry, Wanted())) == {"leave-one-out", "gradient"}

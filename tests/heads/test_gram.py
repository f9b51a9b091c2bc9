"""Errors and fits from one matrix, held against layers that are pruned and entries that are answered."""

import itertools

import numpy as np
import pytest
import torch

from heads.contributions import contributions, look
from heads.gram import Gram, Pruning
from heads.inputs import Entry
from model.attention import MultiHeadAttention
from model.pruning import keep_heads
from tests.heads.made import answer, entries_of, layer_of, without

SOME = [tuple(kept) for count in (1, 2, 3) for kept in itertools.combinations(range(4), count)]


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def layer(request: pytest.FixtureRequest) -> MultiHeadAttention:
    """Four heads of five."""
    return layer_of(bias=request.param)


def gram_of(layer: MultiHeadAttention, entries: list[Entry]) -> Gram:
    """Of all of them."""
    gram = Gram.empty(layer)
    for entry in entries:
        gram.add(look(layer, entry).features)
    return gram


def change(whole: MultiHeadAttention, pruned: MultiHeadAttention, entries: list[Entry]) -> float:
    """Of the output, over the output, all entries together."""
    outputs = [(answer(whole, entry).double(), answer(pruned, entry).double()) for entry in entries]
    changed = sum(float((one - other).square().sum()) for one, other in outputs)
    return float(np.sqrt(changed / sum(float(one.square().sum()) for one, _ in outputs)))


@pytest.mark.parametrize("heads", SOME, ids=str)
def test_error_is_that_of_the_pruned_layer(layer: MultiHeadAttention, heads: tuple[int, ...]) -> None:
    """Measured by answering every entry, with the smaller layer and with the whole one zeroed."""
    entries = entries_of(layer, 6)
    gram = gram_of(layer, entries)
    got = Pruning(layer, gram).error(heads, gram)
    assert got == pytest.approx(change(layer, keep_heads(layer, heads), entries), rel=1e-4)
    assert got == pytest.approx(change(layer, without(layer, set(range(4)) - set(heads)), entries), rel=1e-4)


@pytest.mark.parametrize("heads", SOME, ids=str)
def test_refit_is_least_squares(layer: MultiHeadAttention, heads: tuple[int, ...]) -> None:
    """The same W_o as numpy's solver finds from the features themselves, and the error is the refitted layer's."""
    entries, others = entries_of(layer, 30), entries_of(layer, 9, seed=1)
    fitted, held_out = gram_of(layer, entries), gram_of(layer, others)
    pruning = Pruning(layer, fitted)
    weight, bias = pruning.refitted(heads)
    pruned = keep_heads(layer, heads)
    features = (
        torch.cat([look(pruned, entry).features.transpose(0, 1).flatten(1) for entry in entries]).double().numpy()
    )
    outputs = torch.cat([answer(layer, entry) for entry in entries]).double().numpy()
    if bias is not None:
        features = np.hstack([features, np.ones((len(features), 1))])
    solved = np.linalg.lstsq(features, outputs, rcond=None)[0]
    got = weight.numpy().T if bias is None else np.vstack([weight.numpy().T, bias.numpy()])
    np.testing.assert_allclose(got, solved, atol=1e-4)
    with torch.no_grad():
        pruned.W_o.weight.copy_(weight)
        if bias is not None:
            pruned.W_o.bias.copy_(bias)
    for on, measured in ((fitted, entries), (held_out, others)):
        assert pruning.error(heads, on, refit=True) == pytest.approx(change(layer, pruned, measured), rel=1e-3)
    assert pruning.error(heads, fitted, refit=True) <= pruning.error(heads, fitted)


def test_refit_where_entries_say_nothing(layer: MultiHeadAttention) -> None:
    """One query cannot say what ten features should weigh: where it is silent W_o stays finite and small."""
    (entry,) = entries_of(layer, 1)
    alone = Entry(entry.queries[:1], entry.keys, entry.values, entry.valid_lens[:1], is_self=False)
    weight, _ = Pruning(layer, gram_of(layer, [alone])).refitted([0, 1])
    assert weight.isfinite().all()
    assert weight.abs().max() < 20 * layer.W_o.weight.abs().max()


def test_elimination_sees_what_heads_have_in_common() -> None:
    """Two heads that say the same, each a little less than others do: one of them goes first, and never both, since the
    second costs as much again on top. Scores of single heads would take both."""  # noqa: D205, D209  # one sentence
    layer = layer_of(bias=False)
    entries = entries_of(layer, 10)

    def sizes() -> list[float]:
        of_entries = [contributions(layer, look(layer, entry).features).flatten(1) for entry in entries]
        return torch.cat(of_entries, dim=1).norm(dim=1).tolist()

    with torch.no_grad():
        for name in ("W_q", "W_k", "W_v"):
            weight = getattr(layer, name).weight
            weight[5:10] = weight[0:5]
        layer.W_o.weight[:, :5] *= 0.8 * min(sizes()[2:]) / sizes()[0]
        layer.W_o.weight[:, 5:10] = layer.W_o.weight[:, 0:5]
    assert sorted(np.argsort(sizes())[:2]) == [0, 1]
    gram = gram_of(layer, entries)
    order = Pruning(layer, gram).eliminated(gram)
    assert sorted(order) == [0, 1, 2, 3]
    assert order[0] in (0, 1)
    assert order[1] in (2, 3)

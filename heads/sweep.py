"""The price of keeping fewer heads, for every number of them and by every way to choose them. Pure but for a seed.

W_o is fitted on one half of the entries and errors are measured on the other, so that no way looks better than it is.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import numpy as np

from heads.contributions import look
from heads.gram import Gram, Pruning
from heads.inputs import Inputs
from model.attention import MultiHeadAttention

GREEDY: Final = "greedy"
RANDOM: Final = "random"
_RANDOM_ORDERS: Final = 100


@final
@dataclass(frozen=True, slots=True)
class Halves:
    """The entries on which heads are chosen and W_o is fitted, and those on which errors are measured."""

    fitted_on: Gram
    held_out: Gram
    fitted_entries: tuple[int, ...]
    held_out_entries: tuple[int, ...]


def halves(layer: MultiHeadAttention, inputs: Inputs, entries: Sequence[int], seed: int) -> Halves:
    """These entries dealt out by seed; one alone is in both halves."""
    dealt = np.random.default_rng(seed).permutation(list(entries)).tolist()
    middle = (len(dealt) + 1) // 2
    first, second = dealt[:middle], dealt[middle:] or dealt
    fitted_on, held_out = gram_of(layer, inputs, first), gram_of(layer, inputs, second)
    return Halves(fitted_on, held_out, tuple(sorted(first)), tuple(sorted(second)))


def gram_of(layer: MultiHeadAttention, inputs: Inputs, entries: Sequence[int]) -> Gram:
    """That of some entries."""
    gram = Gram.empty(layer)
    for entry in entries:
        gram.add(look(layer, inputs.entries[entry]).features)
    return gram


@final
@dataclass(frozen=True, slots=True)
class Point:
    """Some number of heads kept.

    Attributes:
        kept: how many.
        heads: which; of random choices none is named.
        error: change of the held-out output over that output; of random choices the median.
        refitted: the same where W_o was fitted anew.
        low, high: of random choices, what nine of ten lie between, W_o refitted if that was asked for; else twice that.
    """

    kept: int
    heads: tuple[int, ...]
    error: float
    refitted: float
    low: float
    high: float

    def cost(self, *, refit: bool) -> float:
        """The error, with W_o as it was or fitted anew."""
        return self.refitted if refit else self.error


def curves(
    layer: MultiHeadAttention, split: Halves, orders: Mapping[str, Sequence[int]], seed: int, *, refit: bool
) -> dict[str, list[Point]]:
    """A point for each number of heads, all of them first, by each order and by chance.

    Args:
        layer: the whole one.
        split: the entries.
        orders: heads, the one to be taken away first in front, by name of the method.
        seed: of the random orders.
        refit: whether W_o is fitted anew in what is asked for.
    """
    pruning = Pruning(layer, split.fitted_on)
    found = {name: _curve(pruning, split, order, refit=refit) for name, order in orders.items()}
    rng = np.random.default_rng(seed)
    random_orders = [rng.permutation(layer.num_heads).tolist() for _ in range(_RANDOM_ORDERS)]
    by_chance = [_curve(pruning, split, order, refit=refit) for order in random_orders]
    found[RANDOM] = [_typical(points, refit=refit) for points in zip(*by_chance, strict=True)]
    return found


def fewest(points: Sequence[Point], most_error: float, *, refit: bool) -> Point | None:
    """The fewest heads whose error is no more than that; None if even all but one are too few.

    More heads must not do worse by chance: every number above it keeps the bound, too.
    """
    chosen = None
    for point in points[1:]:
        if point.cost(refit=refit) > most_error:
            break
        chosen = point
    return chosen


def as_json(found: Mapping[str, Sequence[Point]]) -> dict[str, Any]:
    """The curves by name."""
    return {name: [asdict(point) for point in points] for name, points in found.items()}


def _curve(pruning: Pruning, split: Halves, order: Sequence[int], *, refit: bool) -> list[Point]:
    points = []
    for gone in range(len(order)):
        heads = tuple(sorted(order[gone:]))
        error = pruning.error(heads, split.held_out)
        refitted = pruning.error(heads, split.held_out, refit=True)
        asked = refitted if refit else error
        points.append(Point(len(heads), heads, error, refitted, asked, asked))
    return points


def _typical(points: Sequence[Point], *, refit: bool) -> Point:
    low, high = np.quantile([point.cost(refit=refit) for point in points], [0.05, 0.95]).tolist()
    error, refitted = (statistics.median(point.cost(refit=either) for point in points) for either in (False, True))
    return Point(points[0].kept, (), error, refitted, low, high)

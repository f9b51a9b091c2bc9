"""What pruning costs on some entries, for any set of heads, without looking at the entries again.

The output is linear in the heads' features: with F the rows [features, 1] of all queries, output = F A, where A holds
W_o and its bias. So the squared error of any other A' is trace((A' - A)^T F^T F (A' - A)), and the A' that costs least
is a least-squares solution from F^T F. That matrix is all that is kept. Shape letters as in `model.attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import torch
from torch import Tensor

from model.attention import MultiHeadAttention, merge_heads

# Of the largest eigenvalue. Features that hardly vary would else be fitted to rounding.
_RIDGE: Final = 1e-9


@final
@dataclass(slots=True)
class Gram:
    """F^T F of some entries, float64, (H * D + 1, H * D + 1).

    Attributes:
        matrix: the sum so far.
        rows: queries that are in it.
    """

    matrix: Tensor
    rows: int = 0

    @classmethod
    def empty(cls, layer: MultiHeadAttention) -> Self:
        """That of no entry."""
        size = layer.num_heads * layer.head_size + 1
        return cls(torch.zeros(size, size, dtype=torch.float64))

    def add(self, features: Tensor) -> None:
        """Counts an entry with these features, (H, Q, D)."""
        merged = merge_heads(features[None])[0].double()  # (Q, H * D)
        rows = torch.cat([merged, torch.ones(len(merged), 1, dtype=torch.float64)], dim=1)
        self.matrix += rows.T @ rows
        self.rows += len(rows)


@final
class Pruning:
    """The cost of keeping some heads of a layer.

    Args:
        layer: the whole one.
        fitted_on: the entries on which W_o is fitted anew.
    """

    def __init__(self, layer: MultiHeadAttention, fitted_on: Gram) -> None:
        self._layer = layer
        self._fitted_on = fitted_on
        bias = layer.W_o.bias
        weight = layer.W_o.weight.detach().double().T  # (H * D, C)
        last = torch.zeros(1, weight.shape[1], dtype=torch.float64) if bias is None else bias.detach().double()[None]
        self._whole = torch.cat([weight, last])

    def error(self, heads: Sequence[int], on: Gram, *, refit: bool = False) -> float:
        """|output' - output| over |output|, Frobenius, over all queries of those entries."""
        change = self._kept(heads, refit=refit) - self._whole
        return float(torch.sqrt(_energy(change, on).clamp_min(0) / _energy(self._whole, on)))

    def refitted(self, heads: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """W_o (C, kept * D) and its bias (C,), fitted to the whole layer's output by least squares; float32.

        A layer without a bias gets none.
        """
        kept = self._kept(heads, refit=True)
        features = self._features(heads)[:-1]
        bias = None if self._layer.W_o.bias is None else kept[-1].float()
        return kept[features].T.contiguous().float(), bias

    def eliminated(self, on: Gram, *, refit: bool = False) -> list[int]:
        """All heads in the order in which they are best taken away, one at a time, each the one that costs least then.

        What it costs is counted with W_o as it is, or fitted anew.

        Unlike scores of single heads it sees that two heads say the same: the second costs more once the first is gone.
        """
        left = list(range(self._layer.num_heads))
        order = []
        while len(left) > 1:
            costs = [self.error([one for one in left if one != head], on, refit=refit) for head in left]
            order.append(left.pop(costs.index(min(costs))))
        return [*order, *left]

    def _kept(self, heads: Sequence[int], *, refit: bool) -> Tensor:
        # A' with zeros for what is gone.
        features = self._features(heads)
        kept = torch.zeros_like(self._whole)
        if not refit:
            kept[features] = self._whole[features]
            return kept
        fitted = features if self._layer.W_o.bias is not None else features[:-1]
        matrix = self._fitted_on.matrix
        own = matrix[fitted][:, fitted]
        ridge = _RIDGE * torch.linalg.eigvalsh(own)[-1]
        regular = own + ridge * torch.eye(len(own), dtype=torch.float64)
        # Towards what it was: where the entries say nothing, W_o stays.
        kept[fitted] = torch.linalg.solve(regular, matrix[fitted] @ self._whole + ridge * self._whole[fitted])
        return kept

    def _features(self, heads: Sequence[int]) -> Tensor:
        # Rows of A that belong to these heads, and the bias.
        size = self._layer.head_size
        rows = [torch.arange(head * size, (head + 1) * size) for head in sorted(heads)]
        return torch.cat([*rows, torch.tensor([len(self._whole) - 1])])


def _energy(weights: Tensor, on: Gram) -> Tensor:
    return (weights * (on.matrix @ weights)).sum()

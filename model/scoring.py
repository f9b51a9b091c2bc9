"""How well a query matches a key, and how scores become weights.

Pure tensor mathematics: imports torch only, so that it exports to standard ONNX operators.
Shape letters: B batch, H heads, Q queries, K key-value pairs, D head size, S size of the additive scoring layer.
"""

import math
from typing import Final, final

import torch
from torch import Tensor, nn

SCORINGS: Final = ("dot_product", "additive")


def masked_softmax(scores: Tensor, valid_lens: Tensor | None) -> Tensor:
    """Attention weights over the valid keys of each query.

    A score beyond the valid length is replaced by -infinity, and in a row of length 0 all scores by 0. So such a row is
    uniform over all K keys, and in every other row the weights beyond the length are exactly 0. The seeds replace by
    -1e6 everywhere, which is the same unless valid scores fall below about -1e6; there the seeds' padding would draw
    weight (docs/decisions/0001-masked-score.md).

    Args:
        scores: (B, H, Q, K), any finite float.
        valid_lens: (B,) or (B, Q) integers in 0..K; None means K everywhere.

    Returns:
        (B, H, Q, K), rows sum to 1.

    Source: Dive into Deep Learning, section 11.3.2.1, `masked_softmax`.
    """
    if valid_lens is None:
        return torch.softmax(scores, dim=-1)
    lengths = valid_lens[:, None] if valid_lens.dim() == 1 else valid_lens  # (B, 1 or Q)
    lengths = lengths[:, None, :, None]  # (B, 1, 1 or Q, 1)
    positions = torch.arange(scores.shape[-1], device=scores.device)  # (K,)
    masked = torch.where(lengths == 0, 0.0, -torch.inf).to(scores.dtype)  # (B, 1, 1 or Q, 1)
    return torch.softmax(torch.where(positions < lengths, scores, masked), dim=-1)


@final
class DotProductAttention(nn.Module):
    """Scaled dot-product scores, q.k / sqrt(D) (Vaswani et al. 2017, equation 1). Has no parameters."""

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, H, Q, K) of queries (B, H, Q, D) against keys (B, H, K, D)."""
        return queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])


@final
class AdditiveAttention(nn.Module):
    """Additive scores, w_v . tanh(W_q q + W_k k) (Bahdanau et al. 2014), shared by all heads.

    Parameters carry d2l's names: `W_q.weight` (S, D), `W_k.weight` (S, D), `w_v.weight` (1, S); none has a bias.
    It holds (B, H, Q, K, S) values at once, S times the memory of the dot product.
    """

    def __init__(self, head_size: int, scoring_size: int) -> None:
        super().__init__()
        self.W_q = nn.Linear(head_size, scoring_size, bias=False)
        self.W_k = nn.Linear(head_size, scoring_size, bias=False)
        self.w_v = nn.Linear(scoring_size, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Scores (B, H, Q, K) of queries (B, H, Q, D) against keys (B, H, K, D)."""
        features = torch.tanh(self.W_q(queries)[:, :, :, None, :] + self.W_k(keys)[:, :, None, :, :])  # (B, H, Q, K, S)
        scores: Tensor = self.w_v(features).squeeze(-1)
        return scores

"""How a head attends: how widely, and how far. Pure."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Habit:
    """Of one head, averaged over queries.

    Attributes:
        entropy_bits: of the weights; 0 where one key gets all, log2 K where all get the same.
        evenness: entropy over the largest there could be, 0 to 1; 1 where there is one key only.
        reach: positions between a query and the keys that it reads, weighted; in self-attention, else it means little.
        most: the largest weight.
    """

    entropy_bits: float
    evenness: float
    reach: float
    most: float


def habits(weights: Tensor, valid_lens: Tensor) -> list[Habit]:
    """Of each head, from its weights (H, Q, K) and the valid lengths (Q,); a length of 0 means all K."""
    _, num_queries, num_kv = weights.shape
    positions = torch.arange(num_kv, dtype=torch.float64)
    weights = weights.double()
    entropy = -torch.xlogy(weights, weights).sum(dim=-1) / math.log(2)  # (H, Q)
    lengths = torch.where(valid_lens == 0, num_kv, valid_lens).double()  # (Q,)
    largest = torch.log2(lengths)
    evenness = torch.where(largest > 0, entropy / largest.clamp_min(1e-12), 1.0)
    away = (torch.arange(num_queries, dtype=torch.float64)[:, None] - positions).abs()  # (Q, K)
    reach = (weights * away).sum(dim=-1)  # (H, Q)
    columns = (entropy.mean(dim=1), evenness.mean(dim=1), reach.mean(dim=1), weights.amax(dim=(1, 2)))
    return [Habit(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]

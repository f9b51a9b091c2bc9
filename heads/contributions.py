"""What each head does for one entry, apart from the others. Pure.

A layer's output is the sum of what its heads contribute, W_o^i head_i, and of the bias of W_o: so taking a head away
takes its contribution away, and nothing else changes. Shape letters as in `model.attention`; C is num_hiddens.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from heads.inputs import Entry
from model.attention import MultiHeadAttention, attend, split_heads
from model.scoring import masked_softmax


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """The inside of a layer on one entry.

    Attributes:
        weights: (H, Q, K).
        features: (H, Q, D), the heads' outputs before W_o.
    """

    weights: Tensor
    features: Tensor


@torch.inference_mode()
def look(layer: MultiHeadAttention, entry: Entry) -> Seen:
    """What the layer's heads attend to, and what they make of it."""
    queries = split_heads(layer.W_q(entry.queries[None]), layer.num_heads)  # (1, H, Q, D)
    keys = split_heads(layer.W_k(entry.keys[None]), layer.num_heads)  # (1, H, K, D)
    values = split_heads(layer.W_v(entry.values[None]), layer.num_heads)  # (1, H, K, D)
    weights = masked_softmax(layer.attention(queries, keys), entry.valid_lens[None])  # (1, H, Q, K)
    return Seen(weights[0], attend(weights, values)[0])


@torch.inference_mode()
def contributions(layer: MultiHeadAttention, features: Tensor) -> Tensor:
    """What each head adds to the output, (H, Q, C), from the heads' features (H, Q, D)."""
    of_heads = layer.W_o.weight.reshape(layer.num_hiddens, layer.num_heads, layer.head_size)  # (C, H, D)
    return torch.einsum("hqd,chd->hqc", features, of_heads)


@torch.inference_mode()
def output_of(layer: MultiHeadAttention, of_heads: Tensor) -> Tensor:
    """The layer's output (Q, C), from what the heads add to it, (H, Q, C)."""
    total = of_heads.sum(dim=0)
    return total if layer.W_o.bias is None else total + layer.W_o.bias

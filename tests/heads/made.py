"""Layers and entries for tests of heads."""

import numpy as np
import torch

from heads.inputs import Entry
from model.attention import MultiHeadAttention, seeded_layer


def layer_of(*, bias: bool = True, scoring: str = "dot_product") -> MultiHeadAttention:
    """Four heads of five, no two sizes equal."""
    return seeded_layer(20, 4, seed=3, bias=bias, query_size=11, key_size=13, value_size=17, scoring=scoring)


def entries_of(layer: MultiHeadAttention, count: int, seed: int = 0) -> list[Entry]:
    """Cross attention of 2 to 6 queries over 3 to 8 keys, of which not all count."""
    rng = np.random.default_rng(seed)
    entries = []
    for _ in range(count):
        num_queries, num_kv = int(rng.integers(2, 7)), int(rng.integers(3, 9))
        sizes = ((num_queries, layer.W_q.in_features), (num_kv, layer.W_k.in_features), (num_kv, layer.W_v.in_features))
        tensors = [torch.from_numpy(rng.standard_normal(size, np.float32)) for size in sizes]
        lens = torch.from_numpy(rng.integers(0, num_kv + 1, num_queries))
        entries.append(Entry(*tensors, lens, is_self=False))
    return entries


def answer(layer: MultiHeadAttention, entry: Entry) -> torch.Tensor:
    """The layer's own output (Q, C)."""
    with torch.inference_mode():
        output: torch.Tensor = layer(entry.queries[None], entry.keys[None], entry.values[None], entry.valid_lens[None])
    return output[0]


def without(layer: MultiHeadAttention, gone: set[int]) -> MultiHeadAttention:
    """The layer with those heads' columns of W_o zero: what pruning them has to come to, by other means."""
    size = layer.head_size
    other = seeded_layer(
        layer.num_hiddens, layer.num_heads, seed=0, bias=layer.W_o.bias is not None, scoring=layer.scoring,
        query_size=layer.W_q.in_features, key_size=layer.W_k.in_features, value_size=layer.W_v.in_features,
    )  # fmt: skip
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for head in gone:
            other.W_o.weight[:, head * size : (head + 1) * size] = 0
    return other

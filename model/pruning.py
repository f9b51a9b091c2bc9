"""A smaller layer out of a larger one: some heads kept, the others gone.

Imports torch only. Shape letters as in `model.attention`.
"""

from collections.abc import Iterable

import torch

from model.attention import MultiHeadAttention


def keep_heads(layer: MultiHeadAttention, heads: Iterable[int]) -> MultiHeadAttention:
    """The layer with these heads alone, in ascending order: what the whole one answers if the others' outputs are 0.

    Of W_q, W_k and W_v the rows of the other heads are left out, of W_o their columns. A head keeps its size, and the
    output keeps num_hiddens. Parameters are copies.

    Args:
        layer: its lazy sizes settled.
        heads: indices in 0..H-1.

    Raises:
        ValueError: none is given, one twice, or one that the layer has not.

    Source: Michel, Levy, Neubig (2019), "Are Sixteen Heads Really Better than One?", section 2.
    """
    kept = sorted(heads)
    if not kept or len(set(kept)) < len(kept) or kept[0] < 0 or kept[-1] >= layer.num_heads:
        raise ValueError(f"heads: got {kept}, want at least one of 0 to {layer.num_heads - 1}, each once")
    smaller = MultiHeadAttention(
        layer.num_hiddens,
        len(kept),
        dropout=layer.dropout.p,
        bias=layer.W_o.bias is not None,
        query_size=layer.W_q.in_features,
        key_size=layer.W_k.in_features,
        value_size=layer.W_v.in_features,
        scoring=layer.scoring,
        scoring_size=layer.scoring_size,
        head_size=layer.head_size,
    )
    size = layer.head_size
    features = torch.cat([torch.arange(head * size, (head + 1) * size) for head in kept])
    state = dict(layer.state_dict())
    for name in ("W_q", "W_k", "W_v"):
        for parameter in (f"{name}.weight", f"{name}.bias"):
            if parameter in state:
                state[parameter] = state[parameter][features]
    state["W_o.weight"] = state["W_o.weight"][:, features]
    smaller.load_state_dict(state)
    return smaller.train(layer.training)

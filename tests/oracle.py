"""Multi-head attention written from its equations, in float64 loops: the judge of every other implementation here.

Imports numpy only and shares no code with the product. Equations are those of Dive into Deep Learning: 11.3.3 (additive
scoring), 11.3.6 (scaled dot product), 11.5.1 and 11.5.2 (heads). Slow on purpose.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def multi_head_attention(
    weights: Mapping[str, ArrayLike],
    num_heads: int,
    queries: ArrayLike,
    keys: ArrayLike,
    values: ArrayLike,
    valid_lens: ArrayLike | None = None,
) -> tuple[Array, Array]:
    """The output (B, Q, num_hiddens) and the attention weights (B, H, Q, K), both float64.

    A query attends to its first `valid_len` keys alone; what stands beyond is not even read. At length 0 its attention
    is uniform over all K keys.

    Args:
        weights: the layer's state dict: `W_q.weight` (H * D, query_size) and so on, biases where there are any.
            Scoring is additive if `attention.w_v.weight` is among them.
        num_heads: H.
        queries, keys, values: (B, Q, query_size), (B, K, key_size), (B, K, value_size).
        valid_lens: (B,) or (B, Q) integers in 0..K; None means K everywhere.
    """
    params = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    queries, keys, values = (np.asarray(x, np.float64) for x in (queries, keys, values))
    batch_size, num_queries, num_keys = len(queries), queries.shape[1], keys.shape[1]
    num_hiddens, features = params["W_o.weight"].shape
    lengths = np.full(batch_size, num_keys) if valid_lens is None else np.asarray(valid_lens)
    output = np.zeros((batch_size, num_queries, num_hiddens))
    attention = np.zeros((batch_size, num_heads, num_queries, num_keys))
    for b in range(batch_size):
        for i in range(num_queries):
            length = int(lengths[b] if lengths.ndim == 1 else lengths[b, i])
            read = length or num_keys
            q = _affine(params, "W_q", queries[b, i])
            k = [_affine(params, "W_k", keys[b, j]) for j in range(read)]
            v = [_affine(params, "W_v", values[b, j]) for j in range(read)]
            heads = []
            for h in range(num_heads):
                block = slice(h * features // num_heads, (h + 1) * features // num_heads)
                row = _softmax([_score(params, q[block], key[block]) if length else 0.0 for key in k])
                attention[b, h, i, :read] = row
                heads.append(sum(weight * value[block] for weight, value in zip(row, v, strict=True)))
            output[b, i] = _affine(params, "W_o", np.concatenate(heads))
    return output, attention


def _affine(params: Mapping[str, Array], projection: str, x: Array) -> Array:
    y = params[f"{projection}.weight"] @ x
    return y + params[f"{projection}.bias"] if f"{projection}.bias" in params else y


def _score(params: Mapping[str, Array], query: Array, key: Array) -> float:
    if "attention.w_v.weight" not in params:
        return float(query @ key) / math.sqrt(len(query))
    hidden = np.tanh(params["attention.W_q.weight"] @ query + params["attention.W_k.weight"] @ key)
    return float(params["attention.w_v.weight"][0] @ hidden)


def _softmax(scores: list[float]) -> Array:
    highest = max(scores)
    powers = [math.exp(score - highest) for score in scores]
    return np.array(powers) / math.fsum(powers)

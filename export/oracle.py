"""The float64 witness of the export gate: attention from the equations, sharing no code with the layer.

numpy only. Shape letters as in `model.attention`.
"""

from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@final
class Oracle:
    """Attention in float64 from a layer's weights, by name (`W_q.weight`, `W_q.bias`, ..., `attention.w_v.weight`).

    With `steps` it is the oracle of an int8 graph: (steps of an activation, steps of a weight) from 0 to the largest
    value of a row, to which the inputs and the weights of the four projections are rounded. All else stays float64.
    """

    def __init__(
        self, weights: Mapping[str, NDArray[Any]], num_heads: int, steps: tuple[int, int] | None = None
    ) -> None:
        self._weights = {name: np.asarray(tensor, np.float64) for name, tensor in weights.items()}
        self._num_heads = num_heads
        self._steps = steps

    def attend(
        self, queries: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], valid_lens: NDArray[np.int64]
    ) -> tuple[Floats, Floats]:
        """Output (B, Q, num_hiddens) and weights (B, H, Q, K), for valid_lens (B, Q)."""
        scores = self.scores(queries, keys)
        beyond = np.arange(scores.shape[-1]) >= valid_lens[:, None, :, None]
        empty = valid_lens[:, None, :, None] == 0
        scores = np.where(empty, 0.0, np.where(beyond, -np.inf, scores))
        exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
        projected = self._project("W_v", values)
        batch, num_queries = queries.shape[:2]
        heads = np.empty((batch, num_queries, self._num_heads, projected.shape[-1] // self._num_heads))
        for head, features in enumerate(np.split(projected, self._num_heads, axis=-1)):
            heads[:, :, head] = np.einsum("bqk,bkd->bqd", weights[:, head], features)
        return self._project("W_o", heads.reshape(batch, num_queries, -1)), weights

    def project(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[Floats, Floats]:
        """Projected keys and values, both (B, H, K, D)."""
        heads = (np.split(self._project(*one), self._num_heads, axis=-1) for one in (("W_k", keys), ("W_v", values)))
        projected_keys, projected_values = (np.stack(one, axis=1) for one in heads)
        return projected_keys, projected_values

    def scores(self, queries: NDArray[Any], keys: NDArray[Any]) -> Floats:
        """Unmasked scores (B, H, Q, K)."""
        per_head = zip(
            np.split(self._project("W_q", queries), self._num_heads, axis=-1),
            np.split(self._project("W_k", keys), self._num_heads, axis=-1),
            strict=True,
        )
        return np.stack([self._head_scores(q, k) for q, k in per_head], axis=1)

    def _head_scores(self, q: Floats, k: Floats) -> Floats:
        if "attention.w_v.weight" not in self._weights:
            return np.asarray(np.einsum("bqd,bkd->bqk", q, k) / np.sqrt(q.shape[-1]))
        left = np.einsum("bqd,sd->bqs", q, self._weights["attention.W_q.weight"])
        right = np.einsum("bkd,sd->bks", k, self._weights["attention.W_k.weight"])
        features = np.tanh(left[:, :, None] + right[:, None])
        return np.asarray(np.einsum("bqks,s->bqk", features, self._weights["attention.w_v.weight"][0]))

    def _project(self, name: str, x: NDArray[Any]) -> Floats:
        given, weight = np.asarray(x, np.float64), self._weights[f"{name}.weight"]
        if self._steps is not None:
            given, weight = (_rounded(*one) for one in zip((given, weight), self._steps, strict=True))
        projected: Floats = given @ weight.T
        return projected + self._weights.get(f"{name}.bias", np.zeros(1))


def _rounded(rows: Floats, steps: int) -> Floats:
    # Each row to whole multiples of its largest value over `steps`.
    step = np.abs(rows).max(axis=-1, keepdims=True) / steps
    step[step == 0] = 1.0
    rounded: Floats = np.rint(rows / step) * step
    return rounded

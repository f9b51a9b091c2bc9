"""The layer as each graph of an artefact computes it.

Where lengths are masked the decomposed form (MatMul, Where, Softmax, MatMul) is kept on purpose: it is the only one in
standard operators that gives a row of length 0 the seeds' answer; fused attention operators return zeros there
(docs/decisions/0002). Where every key counts there is nothing to mask, and ONNX Runtime's fused operator is faster
(docs/decisions/0008). Imports torch and model only. Shape letters as in `model.attention`.
"""

import math
from collections.abc import Callable
from typing import Final, final

import torch
from torch import Tensor, nn

from model.attention import MultiHeadAttention, attend, merge_heads, split_heads
from model.scoring import masked_softmax


def lowered(layer: MultiHeadAttention, lowering: str) -> nn.Module:
    """The module of one lowering by name. Its `forward` takes the lowering's inputs, by name and in order."""
    return _MODULES[lowering](layer)


class _OfLayer(nn.Module):
    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.layer = layer


@final
class _Masked(_OfLayer):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor) -> Tensor:
        output: Tensor = self.layer(queries, keys, values, valid_lens)
        return output


@final
class _Weights(_OfLayer):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor) -> tuple[Tensor, Tensor]:
        answer: tuple[Tensor, Tensor] = self.layer(queries, keys, values, valid_lens, need_weights=True)
        return answer


@final
class _Full(_OfLayer):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        layer = self.layer
        if layer.scoring == "dot_product":
            heads = _fused(layer.W_q(queries), layer.W_k(keys), layer.W_v(values), layer.num_heads)
            output: Tensor = layer.W_o(heads)
        else:
            output = layer(queries, keys, values)
        return output


@final
class _Project(_OfLayer):
    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        return split_heads(layer.W_k(keys), layer.num_heads), split_heads(layer.W_v(values), layer.num_heads)


@final
class _Attend(_OfLayer):
    def forward(self, queries: Tensor, projected_keys: Tensor, projected_values: Tensor, valid_lens: Tensor) -> Tensor:
        layer = self.layer
        heads = split_heads(layer.W_q(queries), layer.num_heads)  # (B, H, Q, D)
        weights = masked_softmax(layer.attention(heads, projected_keys), valid_lens)  # (B, H, Q, K)
        output: Tensor = layer.W_o(merge_heads(attend(weights, projected_values)))
        return output


@final
class _AttendFull(_OfLayer):
    def forward(self, queries: Tensor, projected_keys: Tensor, projected_values: Tensor) -> Tensor:
        layer = self.layer
        heads = split_heads(layer.W_q(queries), layer.num_heads)  # (B, H, Q, D)
        if layer.scoring == "dot_product":
            # Given as they are, 4-D keys keep the operator off its flash kernel; as B * H rows of one head they do not.
            rows = (heads.flatten(0, 1), projected_keys.flatten(0, 1), projected_values.flatten(0, 1))
            heads = _fused(*rows, num_heads=1).reshape(heads.shape)
        else:
            weights = torch.softmax(layer.attention(heads, projected_keys), dim=-1)  # (B, H, Q, K)
            heads = attend(weights, projected_values)  # (B, H, Q, D)
        output: Tensor = layer.W_o(merge_heads(heads))
        return output


def _fused(queries: Tensor, keys: Tensor, values: Tensor, num_heads: int) -> Tensor:
    """Unmasked attention of projected tensors, (B, Q, H * D) and (B, K, H * D), as (B, Q, H * D). Export only."""
    heads: Tensor = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        (queries, keys, values),
        {"num_heads": num_heads, "scale": 1 / math.sqrt(queries.shape[-1] // num_heads)},
        dtype=queries.dtype,
        shape=queries.shape,
        version=1,
    )
    return heads


_MODULES: Final[dict[str, Callable[[MultiHeadAttention], nn.Module]]] = {
    "masked": _Masked,
    "weights": _Weights,
    "full": _Full,
    "project": _Project,
    "attend": _Attend,
    "attend_full": _AttendFull,
}

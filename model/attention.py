"""The multi-head attention layer of *Dive into Deep Learning*, section 11.5, written to be exported.

Pure functions first, one thin class last. Imports torch only.
Shape letters: B batch, H heads, Q queries, K key-value pairs, D head size (num_hiddens / H, unless heads were pruned).
"""

from typing import Literal, final, overload

import torch
from torch import Tensor, nn

from model.scoring import SCORINGS, AdditiveAttention, DotProductAttention, masked_softmax


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, H * D) to (B, H, N, D): each head gets its own slice of the features."""
    batch, length, features = x.shape
    return x.reshape(batch, length, num_heads, features // num_heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, D) to (B, N, H * D): the inverse of `split_heads`."""
    return x.transpose(1, 2).flatten(-2)


def attend(weights: Tensor, values: Tensor) -> Tensor:
    """Average of the values (B, H, K, D) under the weights (B, H, Q, K), as (B, H, Q, D)."""
    return weights @ values


@final
class MultiHeadAttention(nn.Module):
    r"""Multi-head attention with valid lengths.

    Equations (d2l 11.5.1 and 11.5.2), for head i of H, a query q, keys k_j and values v_j:

        score_ij  = f(W_q^i q, W_k^i k_j)
        weight_ij = softmax over j < valid_len of score_ij, 0 beyond; 1 / K for every j if valid_len is 0
        head_i    = sum over j of weight_ij W_v^i v_j
        output    = W_o [head_1; ...; head_H]

    f is the scaled dot product, or additive scoring. W_q^i is the i-th block of D rows of `W_q`.

    Shapes: queries (B, Q, query_size), keys (B, K, key_size), values (B, K, value_size), valid_lens (B,) or (B, Q)
    integers in 0..K, output (B, Q, num_hiddens), weights (B, H, Q, K).

    FAQ
        *How does it differ from the seeds' code?* The heads stay an axis of their own instead of being folded into the
        batch, so valid_lens need no `repeat_interleave` and the graph has no batch-dependent reshape. Nothing is
        written to the module in `forward`: weights are returned when asked for, not kept in an attribute. The
        masked score is -infinity instead of -1e6, or 0 in rows of length 0 (see `masked_softmax`). Parameters have the
        same names, so state dicts load unchanged.
        *From `torch.nn.MultiheadAttention`?* Batch comes first. Padding is given as lengths, not as a mask. Queries,
        keys and values may each have their own size. There is no bias unless asked for. A fully masked row
        is the mean of the values, not NaN or 0. `model.checkpoint` converts its weights.
        *From the paper?* Vaswani et al. (2017) use one model size and no bias; here three input sizes may differ,
        and num_hiddens is both the sum of the head sizes and the size of the output.
        *After heads were pruned?* Those that are left keep their size, and the output keeps its own: then head_size is
        given, and H * D is less than num_hiddens (`model.pruning`).
        *Is dropout active?* In training mode only, on the weights, as in the seeds. Export and service use eval mode.

    Args:
        num_hiddens: size of the output; without head_size also of all heads together, and a multiple of num_heads.
        num_heads: H.
        dropout: probability that a weight is dropped in training.
        bias: whether the four projections have one.
        query_size, key_size, value_size: last axis of each input; None is settled by the first forward or by
            `load_state_dict`, as in the second seed.
        scoring: "dot_product" or "additive".
        scoring_size: S of the additive scoring; None means D. Only for `scoring="additive"`.
        head_size: D; None means num_hiddens / H.

    Raises:
        ValueError: num_hiddens is not a positive multiple of num_heads though there is no head_size, a size is below 1,
            or scoring has another name.
    """

    def __init__(
        self,
        num_hiddens: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = False,
        *,
        query_size: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        scoring: str = "dot_product",
        scoring_size: int | None = None,
        head_size: int | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_hiddens < 1 or (head_size is None and num_hiddens % num_heads):
            raise ValueError(f"num_hiddens must be a positive multiple of num_heads, got {num_hiddens} and {num_heads}")
        if head_size is not None and head_size < 1:
            raise ValueError(f"head_size: got {head_size}, want 1 or more")
        if scoring not in SCORINGS:
            raise ValueError(f"scoring: got {scoring!r}, want one of {', '.join(SCORINGS)}")
        if scoring_size is not None and scoring != "additive":
            raise ValueError("scoring_size: only additive scoring has one")
        if scoring_size is not None and scoring_size < 1:
            raise ValueError(f"scoring_size: got {scoring_size}, want 1 or more")
        self.num_hiddens = num_hiddens
        self.num_heads = num_heads
        self.head_size = num_hiddens // num_heads if head_size is None else head_size
        self.scoring = scoring
        of_heads = num_heads * self.head_size
        self.W_q = _projection(query_size, of_heads, bias)
        self.W_k = _projection(key_size, of_heads, bias)
        self.W_v = _projection(value_size, of_heads, bias)
        self.W_o = nn.Linear(of_heads, num_hiddens, bias=bias)
        self.scoring_size: int | None = None
        self.attention: nn.Module = DotProductAttention()
        if scoring == "additive":
            self.scoring_size = self.head_size if scoring_size is None else scoring_size
            self.attention = AdditiveAttention(self.head_size, self.scoring_size)
        self.dropout = nn.Dropout(dropout)

    @overload
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = ...,
        need_weights: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = ...,
        *,
        need_weights: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid_lens: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output, or (output, weights) when need_weights is set. Shapes as in the class docstring."""
        queries = split_heads(self.W_q(queries), self.num_heads)  # (B, H, Q, D)
        keys = split_heads(self.W_k(keys), self.num_heads)  # (B, H, K, D)
        values = split_heads(self.W_v(values), self.num_heads)  # (B, H, K, D)
        scores = self.attention(queries, keys)  # (B, H, Q, K)
        weights = masked_softmax(scores, valid_lens)  # (B, H, Q, K)
        heads = attend(self.dropout(weights), values)  # (B, H, Q, D)
        output: Tensor = self.W_o(merge_heads(heads))  # (B, Q, num_hiddens)
        return (output, weights) if need_weights else output


def _projection(in_size: int | None, out_size: int, bias: bool) -> nn.Linear:
    if in_size is None:
        return nn.LazyLinear(out_size, bias=bias)
    if in_size < 1:
        raise ValueError(f"an input size must be positive, got {in_size}")
    return nn.Linear(in_size, out_size, bias=bias)


def seeded_layer(
    num_hiddens: int,
    num_heads: int,
    *,
    seed: int,
    bias: bool = False,
    query_size: int | None = None,
    key_size: int | None = None,
    value_size: int | None = None,
    scoring: str = "dot_product",
) -> MultiHeadAttention:
    """A layer in eval mode with torch's default initialisation drawn from `seed`; sizes left out are num_hiddens.

    The caller's random state is left as it was. Same arguments, same weights, on the same torch version.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = MultiHeadAttention(
            num_hiddens,
            num_heads,
            bias=bias,
            query_size=num_hiddens if query_size is None else query_size,
            key_size=num_hiddens if key_size is None else key_size,
            value_size=num_hiddens if value_size is None else value_size,
            scoring=scoring,
        )
    return layer.eval()

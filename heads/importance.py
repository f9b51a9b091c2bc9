"""How much a head matters on one entry, by three methods that can disagree. Pure.

The output is linear in a mask of the heads: output(m) = sum over heads of m_h contribution_h, and the bias. So all
three have a closed form, and the gradient is exact without a second pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

Scores = dict[str, list[float]]


@final
@dataclass(frozen=True, slots=True)
class Wanted:
    """What an entry's output should be, and the gradient of a loss by it; each (Q, C), or None."""

    target: Tensor | None = None
    gradient: Tensor | None = None


def leave_one_out(of_heads: Tensor, output: Tensor, wanted: Wanted) -> Tensor:  # noqa: ARG001  # one signature
    """Change of the output when one head is taken away, over the output: |contribution_h| / |output|, Frobenius."""
    changes: Tensor = torch.linalg.vector_norm(of_heads, dim=(1, 2)) / torch.linalg.vector_norm(output)
    return changes


def gradient(of_heads: Tensor, output: Tensor, wanted: Wanted) -> Tensor:
    """|dL/dm_h| at m = 1, which is |<contribution_h, dL/d output>|, over the two norms.

    L is the loss whose gradient was given; else half the squared distance from the target; else half the square of the
    output, so that it is the part of the output that lies along what the head adds.

    Source: Michel, Levy, Neubig (2019), "Are Sixteen Heads Really Better than One?", equation 2.
    """
    by_output = wanted.gradient
    if by_output is None:
        by_output = output if wanted.target is None else output - wanted.target
    aligned = (of_heads * by_output).flatten(1).sum(dim=1).abs()
    norms: Tensor = torch.linalg.vector_norm(output) * torch.linalg.vector_norm(by_output)
    return aligned / norms.clamp_min(torch.finfo(torch.float64).tiny)


def loss(of_heads: Tensor, output: Tensor, wanted: Wanted) -> Tensor:
    """How much the squared distance from the target grows when one head is taken away, over the target's square.

    Less than 0 for a head without which the output would be nearer.
    """
    if wanted.target is None:
        raise ValueError("a loss wants a target")
    before = (output - wanted.target).square().sum()
    after = (output - of_heads - wanted.target).flatten(1).square().sum(dim=1)
    return (after - before) / wanted.target.square().sum()


METHODS: Final[Mapping[str, Callable[[Tensor, Tensor, Wanted], Tensor]]] = {
    "leave-one-out": leave_one_out,
    "gradient": gradient,
    "loss": loss,
}
"""By name: scores (H,) from contributions (H, Q, C), the output (Q, C), and what is wanted. Higher matters more."""


def scores(of_heads: Tensor, output: Tensor, wanted: Wanted) -> Scores:
    """Each method's score of each head, in float64; `loss` only with a target."""
    exact, whole = of_heads.double(), output.double()
    names = METHODS if wanted.target is not None else [name for name in METHODS if name != "loss"]
    return {name: METHODS[name](exact, whole, wanted).tolist() for name in names}

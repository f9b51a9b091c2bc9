"""Which attention weights an answer holds: all heads', some heads', or their mean.

An engine computes those of every head, tile by tile; what is not wanted is left out before it is placed in the answer.
"""

from dataclasses import dataclass
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from service.artifact import Layer
from service.errors import InvalidParameter

_MOST_HEADS = 1024


@final
@dataclass(frozen=True, slots=True)
class WantedWeights:
    """Weights (B, heads, Q, K), or (B, Q, K) as their mean.

    Attributes:
        heads: whose, in this order; None for every head's.
        mean: whether they are averaged over these heads, as `torch.nn.MultiheadAttention` averages them.
    """

    heads: tuple[int, ...] | None = None
    mean: bool = False

    @classmethod
    def parse(cls, need_weights: str | None, heads: str | None) -> Self | None:
        """From the texts of two parameters; None where no weights are wanted. Naming heads means wanting theirs.

        Args:
            need_weights: "true", "false" or "mean" (also "1" and "0").
            heads: "0,3".

        Raises:
            InvalidParameter: one of them means nothing, or they contradict each other.
        """
        wanted = _KINDS.get("false" if need_weights is None else need_weights.lower())
        if wanted is None:
            raise InvalidParameter(f"need_weights: got {str(need_weights)[:64]!r}, want true, false or mean")
        if heads is None:
            return cls(mean=wanted == "mean") if wanted != "none" else None
        if need_weights is not None and wanted == "none":
            raise InvalidParameter(f"heads: got {heads[:64]!r} beside need_weights={need_weights}; want true or mean")
        return cls(_indices(heads), wanted == "mean")

    def check(self, layer: Layer) -> None:
        """Refuses heads that the layer has not.

        Raises:
            InvalidParameter: with the first of them.
        """
        for head in self.heads or ():
            if head >= layer.num_heads:
                raise InvalidParameter(f"heads: got {head}, want 0 to {layer.num_heads - 1}")

    def axes(self, layer: Layer) -> tuple[int, ...]:
        """The axes between batch and queries: (heads,), or none for the mean."""
        return () if self.mean else (layer.num_heads if self.heads is None else len(self.heads),)

    def of(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """What is wanted of (B, H, Q, K): the same array where all of it is."""
        chosen = weights if self.heads is None else weights[:, list(self.heads)]
        return chosen.mean(axis=1) if self.mean else chosen


_KINDS = {"true": "each", "1": "each", "mean": "mean", "false": "none", "0": "none"}


def _indices(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",", _MOST_HEADS)]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 4 for part in parts):
        raise InvalidParameter(f"heads: got {text[:64]!r}, want numbers of heads from 0 on, such as 0,3")
    indices = tuple(map(int, parts))
    if len(set(indices)) < len(indices):
        raise InvalidParameter(f"heads: got {text[:64]!r}, want each head at most once")
    return indices

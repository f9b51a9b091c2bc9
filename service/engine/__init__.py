"""What computes: the contract between the scheduler and any runtime.

The only package below which onnxruntime may be imported (`service.engine.onnx` and `service.engine.device`).
"""

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from service.cost import CostModel


@final
@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call of the layer. All arrays C-contiguous and finite.

    Attributes:
        queries: (B, Q, query_size) float32.
        keys: (B, K, key_size) float32.
        values: (B, K, value_size) float32.
        valid_lens: (B, Q) int64, in 0..K.
        need_weights: whether the weights are wanted, too.
    """

    queries: NDArray[np.float32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    valid_lens: NDArray[np.int64]
    need_weights: bool


@final
@dataclass(frozen=True, slots=True)
class EngineResult:
    """output (B, Q, num_hiddens) float32, and weights (B, H, Q, K) float32 if they were wanted."""

    output: NDArray[np.float32]
    weights: NDArray[np.float32] | None


class Engine(Protocol):
    """Computes calls of one layer. `run` is called from several threads at once."""

    @property
    def cost(self) -> CostModel:
        """What calls cost on this machine, measured before the first one."""

    def run(self, call: EngineCall) -> EngineResult:
        """The layer's answer. May raise anything; the scheduler turns it into an engine failure."""

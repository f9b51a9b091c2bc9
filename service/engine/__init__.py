"""What computes: the contract between the scheduler and any runtime.

The only package below which onnxruntime may be imported.
Shape letters: B batch, Q queries, K key-value pairs, H heads, D head size.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from service.cost import CostModel

# Since 1.29 the wheels tell Microsoft which models are loaded, and leave an id in the home folder, unless this is set
# before they are imported (onnxruntime#27379). Who serves attention has not asked for that.
os.environ["ORT_DISABLE_TELEMETRY"] = os.environ.get("ORT_DISABLE_TELEMETRY") or "1"

Floats = NDArray[np.float32]
Recall = Callable[[str, Callable[[], Any]], Any]
"""What is known by a name, or else what the second argument finds out, as JSON has it."""


def find_out_anew(_: str, find_out: Callable[[], Any]) -> Any:
    """The `Recall` of who remembers nothing."""
    return find_out()


@final
@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call of the layer. All arrays C-contiguous and finite.

    Attributes:
        queries: (B, Q, query_size) float32.
        keys: (B, K, key_size) float32.
        values: (B, K, value_size) float32.
        valid_lens: (B, Q) int64, in 0..K; None where every key of every row counts.
        need_weights: whether the weights are wanted, too.
        alone: whether nothing else is being computed or waits, so that all CPUs may be used.
    """

    queries: Floats
    keys: Floats
    values: Floats
    valid_lens: NDArray[np.int64] | None
    need_weights: bool = False
    alone: bool = False


@final
@dataclass(frozen=True, slots=True)
class EngineResult:
    """output (B, Q, num_hiddens) float32, and weights (B, H, Q, K) float32 if they were wanted."""

    output: Floats
    weights: Floats | None


@final
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Projected:
    """Keys and values of one row behind their projections: each (1, H, K, D) float32, C-contiguous.

    Not to be written to once it was attended to: an engine may keep it where it computes, for as long as it is held.
    """

    keys: Floats
    values: Floats


class Engine(Protocol):
    """Computes calls of one layer. Every method is called from several threads at once.

    All may raise anything; the scheduler turns it into an engine failure.
    """

    @property
    def cost(self) -> CostModel:
        """What calls cost on this machine, measured before the first one."""

    @property
    def fault(self) -> str | None:
        """Why it will never compute anything again; None as long as it can."""

    def run(self, call: EngineCall) -> EngineResult:
        """The layer's answer."""

    def project(self, keys: Floats, values: Floats) -> Projected:
        """The projections of keys (1, K, key_size) and values (1, K, value_size)."""

    def attend(self, queries: Floats, projected: Projected, valid_lens: NDArray[np.int64] | None) -> Floats:
        """The output (1, Q, num_hiddens) of queries (1, Q, query_size); valid_lens as in `EngineCall`."""

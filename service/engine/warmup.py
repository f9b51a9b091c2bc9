"""What an engine finds out about a machine and a model before the first request: which graph is faster, and how long.

Engines measure by names of graphs; whoever compares graphs without lengths has them called "full" and "masked".
"""

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import numpy as np

from service.artifact import Layer
from service.cost import row_flops
from service.engine import EngineCall

RunGraph = Callable[[str, EngineCall], object]
_MEASURED_CALLS: Final = 5
# What the graph with lengths must save to be taken where there are none: it does more, and to measure is not exact.
_LEAST_MASKED_GAIN: Final = 0.95


@final
class Choice:
    """What was fastest at measured sizes: `at` answers for the size at or below."""

    def __init__(self, bounds: Sequence[float], names: Sequence[str]) -> None:
        self._bounds = tuple(bounds)
        self._names = tuple(names)

    def at(self, flops: float) -> str:
        """The name for a call of so many operations."""
        return self._names[bisect.bisect_right(self._bounds, flops, hi=len(self._names) - 1)]


def unmasked_choice(measured: dict[str, Any]) -> Choice:
    """The graph for a call without lengths, by what `measure` found."""
    return Choice(measured["flops"][1:], measured["faster"])


def measure(layer: Layer, lengths: Sequence[int], run: RunGraph) -> dict[str, Any]:
    """How long calls of one row take, of so many queries and keys each. As JSON has it.

    Returns:
        flops: of each call. seconds: of the faster graph, never falling. faster: which one that is.
    """
    seconds = [least_s(("full", "masked"), call_of(layer, length), run) for length in lengths]
    return {
        "flops": [float(row_flops(layer, length, length)) for length in lengths],
        # A slow moment while the first was measured is no property of it.
        "seconds": np.maximum.accumulate([min(pair) for pair in seconds]).tolist(),
        "faster": ["masked" if masked < _LEAST_MASKED_GAIN * full else "full" for full, masked in seconds],
    }


def least_s(names: Sequence[str], call: EngineCall, run: RunGraph) -> list[float]:
    """The shortest of a few calls of each graph: whatever else the machine did meanwhile only made others longer.

    In turn, so that it did so to all of them.
    """
    least = [float("inf")] * len(names)
    for number in range(1 + _MEASURED_CALLS):
        for index, name in enumerate(names):
            started = time.perf_counter()
            run(name, call)
            if number:  # the first one allocates
                least[index] = min(least[index], time.perf_counter() - started)
    return least


def call_of(layer: Layer, length: int) -> EngineCall:
    """A call of one row of zeros, with so many queries and keys, all valid."""
    queries, keys, values = (
        np.zeros((1, length, size), np.float32) for size in (layer.query_size, layer.key_size, layer.value_size)
    )
    return EngineCall(queries, keys, values, None)


def feed_of(name: str, call: EngineCall) -> dict[str, Any]:
    """A call's arrays by the names of a graph's inputs; every graph but "full" takes lengths."""
    feed: dict[str, Any] = {"queries": call.queries, "keys": call.keys, "values": call.values}
    if name != "full":
        every_key = np.full(call.queries.shape[:2], call.keys.shape[1]) if call.valid_lens is None else call.valid_lens
        feed["valid_lens"] = every_key
    return feed

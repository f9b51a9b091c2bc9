"""int8 against fp32 in process, on the same request and in turn; both have passed the export gate."""

import statistics
import time
from typing import Any, Final

import numpy as np
import orjson

from benchmarks.peers.contestants import GRAPH, INT8
from benchmarks.peers.servers.attention import Attention
from benchmarks.peers.servers.wire import spread
from benchmarks.peers.workloads import dense

_LENGTH: Final = 128
_ROUNDS: Final = 9
_CALLS: Final = 60


def measure() -> dict[str, Any]:
    """Median times of one call on one thread, the ratio with its spread, and the error that the manifest carries."""
    tensors = dense(_LENGTH, _LENGTH)(np.random.default_rng(0))
    feed = {**tensors, "valid_lens": spread(None, tensors)}
    exact, quantised = (Attention(str(path), 1) for path in (GRAPH, INT8))
    rounds = [(_median_ms(exact, feed), _median_ms(quantised, feed)) for _ in range(_ROUNDS + 1)][1:]
    ratios = [fp32_ms / int8_ms for fp32_ms, int8_ms in rounds]
    calibration = orjson.loads((INT8.parent / "manifest.json").read_bytes())["calibration"]
    return {
        "request": f"(1, {_LENGTH}, {_LENGTH})", "error": calibration["max_error"],
        "fp32_ms": statistics.median(fp32_ms for fp32_ms, _ in rounds),
        "int8_ms": statistics.median(int8_ms for _, int8_ms in rounds),
        "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
    }  # fmt: skip


def _median_ms(attention: Attention, feed: dict[str, np.ndarray]) -> float:
    durations = []
    for _ in range(_CALLS):
        started = time.perf_counter()
        attention(feed)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations) * 1000

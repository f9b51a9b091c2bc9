"""The limit in process: the same graph called in a loop on every core, with no server and no bytes in between."""

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Final

import numpy as np

from benchmarks.peers.contestants import GRAPH, WIDE_CALL, WORKER_THREADS, Setup
from benchmarks.peers.servers.attention import Attention
from benchmarks.peers.servers.wire import spread
from benchmarks.peers.workloads import Tensors
from benchmarks.peers.wrk import Figures

LOADED: Final = (WORKER_THREADS, WIDE_CALL)
IDLE: Final = (Setup(), WIDE_CALL)
Feed = Mapping[str, np.ndarray]


def feeds(requests: Sequence[Tensors]) -> list[Feed]:
    """What the graph is fed for each request."""
    return [{**tensors, "valid_lens": spread(tensors.get("valid_lens"), tensors)} for tensors in requests]


def outputs(requests: Sequence[Tensors]) -> list[np.ndarray]:
    """The right answers."""
    attention = Attention(str(GRAPH), 1)
    return [attention(feed) for feed in feeds(requests)]


def load(requests: Sequence[Feed], setup: Setup, seconds: float) -> Figures:
    """The same figures as wrk's, of `callers` loops side by side, each call on `threads` threads."""
    attention = Attention(str(GRAPH), setup.threads)
    attention(requests[0])
    end = time.perf_counter() + seconds
    durations: list[list[float]] = [[] for _ in range(setup.callers)]

    def loop(mine: list[float]) -> None:
        for feed in cycle(requests):
            started = time.perf_counter()
            attention(feed)
            now = time.perf_counter()
            mine.append(now - started)
            if now >= end:
                return

    started = time.perf_counter()
    threads = [threading.Thread(target=loop, args=(mine,)) for mine in durations]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _figures(sorted(one for mine in durations for one in mine), time.perf_counter() - started)


def _figures(durations: Sequence[float], elapsed_s: float) -> Figures:
    def at(share: float) -> int:
        return round(durations[min(int(share * len(durations)), len(durations) - 1)] * 1e6)

    return {
        "requests": len(durations), "duration_us": round(elapsed_s * 1e6),
        "p50_us": round(statistics.median(durations) * 1e6), "p90_us": at(0.9), "p99_us": at(0.99), "max_us": at(1),
    }  # fmt: skip

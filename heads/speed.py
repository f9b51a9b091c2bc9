"""How fast a layer answers with fewer heads: its unmasked graph in ONNX Runtime, in process, as the service runs it."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from export.convert import serialise, to_onnx
from export.signature import FULL
from model.attention import MultiHeadAttention
from model.pruning import keep_heads

_ROUNDS: Final = 15
_CALLS: Final = 8

Shape = tuple[int, int, int]


def speeds(
    layer: MultiHeadAttention, counts: Sequence[int], shape: Shape, threads: int, done: Callable[[int], None]
) -> dict[int, float]:
    """How many times faster than the whole layer it is with so many heads, by number of heads.

    All take turns, so that the machine's moods fall on all of them alike; of each the shortest call of a round counts,
    and of the rounds' ratios the median.

    Args:
        layer: the whole one.
        counts: numbers of heads. Which ones they are makes no difference to the time.
        shape: batch, queries and keys of a call.
        threads: of a call.
        done: is told how many graphs are ready, then how many rounds are over.
    """
    sessions: dict[int, ort.InferenceSession] = {}
    for count in dict.fromkeys([layer.num_heads, *counts]):
        sessions[count] = _session(layer if count == layer.num_heads else keep_heads(layer, range(count)), threads)
        done(len(sessions))
    feed = _feed(layer, shape)
    for session in sessions.values():
        session.run(None, feed)
    ratios: dict[int, list[float]] = {count: [] for count in sessions}
    for number in range(_ROUNDS):
        shortest = {count: _shortest_s(session, feed) for count, session in sessions.items()}
        for count, seconds in shortest.items():
            ratios[count].append(shortest[layer.num_heads] / seconds)
        done(len(sessions) + number + 1)
    return {count: statistics.median(found) for count, found in ratios.items()}


def steps(counts: Sequence[int], num_heads: int) -> int:
    """What `done` is told at the end."""
    return len(set(counts) | {num_heads}) + _ROUNDS


def _session(layer: MultiHeadAttention, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(serialise(to_onnx(layer, FULL)), options, providers=["CPUExecutionProvider"])


def _feed(layer: MultiHeadAttention, shape: Shape) -> Mapping[str, Any]:
    batch, num_queries, num_kv = shape
    sizes = {
        "queries": (num_queries, layer.W_q.in_features), "keys": (num_kv, layer.W_k.in_features),
        "values": (num_kv, layer.W_v.in_features),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((batch, *size), np.float32) for name, size in sizes.items()}


def _shortest_s(session: ort.InferenceSession, feed: Mapping[str, Any]) -> float:
    shortest = float("inf")
    for _ in range(_CALLS):
        began = time.perf_counter()
        session.run(None, feed)
        shortest = min(shortest, time.perf_counter() - began)
    return shortest

"""What is asked of the servers: tensors of seeded random numbers, and how many connections ask."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, final

import numpy as np

from benchmarks.peers.servers.wire import SIZE

Tensors = Mapping[str, np.ndarray]
Form = Literal["safetensors", "self-attention", "packed", "raw", "json", "oip-json"]
Measure = Literal["rate", "latency", "overhead"]

_RAGGED_ROWS: Final = 8
_RAGGED_QUERIES: Final = 16
_RAGGED_KEYS: Final = 256
_MEAN_LENGTH: Final = 28
_SIGMA: Final = 0.75  # of the logarithm: a few rows are several times as long as the mean


@final
@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of request, and what of its answers counts.

    Attributes:
        title: its row in the table.
        tensors: makes a request's tensors.
        ours: the forms that the service is asked in, each a row of the table.
        theirs: the form for each peer that accepts it, in order of preference.
        measure: rows a second, median latency, or the median latency beyond that of a call in process.
    """

    name: str
    title: str
    tensors: Callable[[np.random.Generator], Tensors]
    connections: int
    ours: Sequence[Form]
    theirs: Sequence[Form]
    measure: Measure
    rows: int = 1
    num_bodies: int = 16

    def requests(self) -> list[Tensors]:
        """The tensors of every distinct request, the same each time."""
        rng = np.random.default_rng(0)
        return [self.tensors(rng) for _ in range(self.num_bodies)]


def dense(num_queries: int, num_kv: int) -> Callable[[np.random.Generator], Tensors]:
    """Makes queries, keys and values of one row in which every key counts."""

    def make(rng: np.random.Generator) -> Tensors:
        lengths = {"queries": num_queries, "keys": num_kv, "values": num_kv}
        return {name: rng.standard_normal((1, length, SIZE), np.float32) for name, length in lengths.items()}

    return make


def self_attention(length: int) -> Callable[[np.random.Generator], Tensors]:
    """Makes one row whose queries are its keys and its values."""

    def make(rng: np.random.Generator) -> Tensors:
        return dict.fromkeys(("queries", "keys", "values"), rng.standard_normal((1, length, SIZE), np.float32))

    return make


def ragged(rng: np.random.Generator) -> Tensors:
    """Eight rows padded with zeros to 256 keys, of which log-normally many count."""
    mean = np.log(_MEAN_LENGTH) - _SIGMA**2 / 2
    valid_lens = np.clip(rng.lognormal(mean, _SIGMA, _RAGGED_ROWS), 1, _RAGGED_KEYS).astype(np.int64)
    tensors: dict[str, np.ndarray] = {
        name: rng.standard_normal((_RAGGED_ROWS, length, SIZE), np.float32)
        for name, length in (("queries", _RAGGED_QUERIES), ("keys", _RAGGED_KEYS), ("values", _RAGGED_KEYS))
    }
    padding = np.arange(_RAGGED_KEYS) >= valid_lens[:, None]
    tensors["keys"][padding] = tensors["values"][padding] = 0
    return {**tensors, "valid_lens": valid_lens}


def ragged_to_longest(rng: np.random.Generator) -> Tensors:
    """The same, padded no further than the longest row of the request, as a careful client would."""
    tensors = ragged(rng)
    longest = int(tensors["valid_lens"].max())
    return {**tensors, **{name: np.ascontiguousarray(tensors[name][:, :longest]) for name in ("keys", "values")}}


WORKLOADS: Final = (
    Workload("dense-16", "(1, 16, 16), 32 connections", dense(16, 16), 32, ["safetensors"], ["raw"], "rate"),
    Workload("dense-128", "(1, 128, 128), 32 connections", dense(128, 128), 32, ["safetensors"], ["raw"], "rate"),
    Workload(
        "self-128", "(1, 128, 128) self-attention, 32 connections", self_attention(128), 32,
        ["self-attention"], ["raw"], "rate",
    ),
    Workload("latency-128", "(1, 128, 128), 1 connection", dense(128, 128), 1, ["safetensors"], ["raw"], "latency"),
    Workload(
        "ragged-256", "8 ragged rows of 16 queries, padded to 256 keys, 32 connections", ragged, 32,
        ["packed", "safetensors"], ["raw"], "rate", rows=_RAGGED_ROWS,
    ),
    Workload(
        "ragged-longest", "the same, padded to the longest row, 32 connections", ragged_to_longest, 32,
        ["packed", "safetensors"], ["raw"], "rate", rows=_RAGGED_ROWS,
    ),
    Workload(
        "json-128", "(1, 128, 128) as JSON, 8 connections", dense(128, 128), 8,
        ["json"], ["json", "oip-json"], "rate", num_bodies=8,
    ),
    Workload("tiny", "(1, 1, 16), 1 connection", dense(1, 16), 1, ["safetensors"], ["raw"], "overhead"),
)  # fmt: skip

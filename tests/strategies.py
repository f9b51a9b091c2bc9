"""What Hypothesis draws: requests that a layer takes, tensors of any bits, and bodies that are almost right.

Shapes and lengths are drawn one by one, because they are what goes wrong; ordinary values come from a drawn seed,
because any ordinary value will do and a seed shrinks to 0.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from service.artifact import Layer
from service.cost import CostModel
from service.planner import Limits
from service.sequences import Sequences
from service.tensors import WireTensors

Array = NDArray[Any]

FLOAT_DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INTEGER_DTYPES = {kind.__name__: kind for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32)} | {
    "int64": np.int64,
    "uint64": np.uint64,
}

# The sizes of conftest's `odd` layer, for tests that need no graph: no two are equal.
LAYER = Layer(
    num_hiddens=21, num_heads=3, head_size=7, query_size=11, key_size=13, value_size=17, bias=True,
    scoring="dot_product", scoring_size=None,
)  # fmt: skip


def examples(count: int) -> settings:
    """That many examples, and no limit on their time: the cores are shared with the servers under test."""
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


float_dtypes = st.sampled_from([np.dtype(dtype) for dtype in FLOAT_DTYPES.values()])
integer_dtypes = st.sampled_from([np.dtype(dtype) for dtype in INTEGER_DTYPES.values()])


@dataclass(frozen=True)
class Request:
    """What a client means: queries (B, Q, ·), keys and values (B, K, ·), valid_lens (B,), (B, Q) or None."""

    queries: Array
    keys: Array
    values: Array
    valid_lens: Array | None

    @property
    def batch(self) -> int:
        """B."""
        return len(self.queries)

    @property
    def num_kv(self) -> int:
        """K."""
        return self.keys.shape[1]

    @property
    def lengths(self) -> Array:
        """The valid length of every query, (B, Q)."""
        lens = np.full(self.batch, self.num_kv) if self.valid_lens is None else self.valid_lens
        return np.array(np.broadcast_to(lens[:, None] if lens.ndim == 1 else lens, self.queries.shape[:2]), np.int64)

    @property
    def beyond(self) -> NDArray[np.bool_]:
        """(B, K): which keys no query of their entry reads. Where some length is 0 all are read."""
        lengths = self.lengths
        read = np.where((lengths == 0).any(1), self.num_kv, lengths.max(1))
        return np.arange(self.num_kv) >= read[:, None]

    def row(self, index: int) -> "Request":
        """One entry of the batch as a request of its own, its keys as long as they were."""
        one = slice(index, index + 1)
        return Request(self.queries[one], self.keys[one], self.values[one], self.lengths[one])

    def changed(self, **tensors: Any) -> "Request":
        """With other tensors."""
        return replace(self, **tensors)

    def wire(self) -> WireTensors:
        """As a codec would hand it over."""
        tensors = {"queries": self.queries, "keys": self.keys, "values": self.values, "valid_lens": self.valid_lens}
        return WireTensors({name: tensor for name, tensor in tensors.items() if tensor is not None})


@st.composite
def requests(
    draw: st.DrawFn, layer: Layer, *, least_length: int = 0, dtypes: st.SearchStrategy[np.dtype[Any]] | None = None
) -> Request:
    """Valid requests of standard normal numbers, every shape up to 3 entries, 5 queries and 7 keys."""
    batch, num_queries, num_kv = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = np.dtype(np.float32) if dtypes is None else draw(dtypes)
    queries, keys, values = (
        rng.standard_normal(shape, np.float32).astype(dtype)
        for shape in (
            (batch, num_queries, layer.query_size),
            (batch, num_kv, layer.key_size),
            (batch, num_kv, layer.value_size),
        )
    )
    return Request(queries, keys, values, draw(valid_lens(batch, num_queries, num_kv, least_length)))


@dataclass(frozen=True)
class PackedRequest:
    """What a client means by entries of unequal length; entry b is queries[b] (Q, ·), keys[b] and values[b] (K, ·).

    Attributes:
        valid_lens: one of each entry, within its own keys.
        self_attention: whether keys and values are the queries, and are not sent.
    """

    queries: list[Array]
    keys: list[Array]
    values: list[Array]
    valid_lens: list[int]
    self_attention: bool

    def entry(self, index: int) -> Request:
        """One entry as a request of its own."""
        lens = np.array([self.valid_lens[index]])
        return Request(self.queries[index][None], self.keys[index][None], self.values[index][None], lens)

    def wire(self) -> WireTensors:
        """As a codec of ragged lists would hand it over."""
        tensors: dict[str, Any] = {"queries": _ragged(self.queries), "valid_lens": np.array(self.valid_lens)}
        if not self.self_attention:
            tensors |= {"keys": _ragged(self.keys), "values": _ragged(self.values)}
        return WireTensors(tensors)


def _ragged(entries: list[Array]) -> Sequences:
    return Sequences.ragged(np.concatenate(entries), np.array([len(entry) for entry in entries], np.int64))


@st.composite
def packed_requests(draw: st.DrawFn, layer: Layer, *, least_length: int = 0) -> PackedRequest:
    """Valid requests of up to 4 entries, each of up to 5 queries and 7 keys of its own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=4))
    queries = [rng.standard_normal((num_queries, layer.query_size), np.float32) for num_queries, _ in sizes]
    self_attention = draw(st.booleans()) and layer.query_size == layer.key_size == layer.value_size
    keys = [rng.standard_normal((num_kv, layer.key_size), np.float32) for _, num_kv in sizes]
    values = [rng.standard_normal((num_kv, layer.value_size), np.float32) for _, num_kv in sizes]
    if self_attention:
        keys = values = queries
    lens = [draw(st.integers(least_length, len(entry))) for entry in keys]
    return PackedRequest(queries, keys, values, lens, self_attention)


def packed_request(layer: Layer, seed: int) -> PackedRequest:
    """A packed request of up to 4 entries, all from a seed; for tests that know their layer only when they run."""
    rng = np.random.default_rng(seed)
    num_queries, num_kv = rng.integers(1, 6, rng.integers(1, 5)), rng.integers(1, 8, 4)
    queries = [rng.standard_normal((length, layer.query_size), np.float32) for length in num_queries]
    self_attention = bool(rng.integers(2)) and layer.query_size == layer.key_size == layer.value_size
    keys, values = queries, queries
    if not self_attention:
        lengths = num_kv[: len(queries)]
        keys = [rng.standard_normal((length, layer.key_size), np.float32) for length in lengths]
        values = [rng.standard_normal((length, layer.value_size), np.float32) for length in lengths]
    return PackedRequest(queries, keys, values, [int(rng.integers(len(key) + 1)) for key in keys], self_attention)


@st.composite
def valid_lens(draw: st.DrawFn, batch: int, num_queries: int, num_kv: int, least: int = 0) -> Array | None:
    """None, (B,) or (B, Q) lengths in least..K, of any integer dtype."""
    shape = draw(st.sampled_from([None, (batch,), (batch, num_queries)]))
    if shape is None:
        return None
    size = int(np.prod(shape))
    lengths = draw(st.lists(st.integers(least, num_kv), min_size=size, max_size=size))
    return np.array(lengths, draw(integer_dtypes)).reshape(shape)


@st.composite
def any_bits(draw: st.DrawFn, dtypes: st.SearchStrategy[np.dtype[Any]], rank: int = 3) -> Array:
    """Arrays of every bit pattern, nan with payloads and subnormals included; axes of 1 to 5."""
    dtype = draw(dtypes)
    shape = tuple(draw(st.integers(1, 5)) for _ in range(rank))
    size_bytes = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.one_of(st.binary(min_size=size_bytes, max_size=size_bytes), _random_bytes(size_bytes)))
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _random_bytes(size_bytes: int) -> st.SearchStrategy[bytes]:
    return st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).bytes(size_bytes))


@st.composite
def mutated(draw: st.DrawFn, body: bytes) -> bytes:
    """The body with one to three stretches of it replaced, removed or doubled."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(body)))
        end = draw(st.integers(begin, min(len(body), begin + 16)))
        stretch = draw(st.one_of(st.just(b""), st.just(body[begin:end] * 2), st.binary(max_size=16)))
        body = body[:begin] + stretch + body[end:]
    return body


def json_values() -> st.SearchStrategy[Any]:
    """Any JSON value, mostly nested lists of numbers."""
    numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False))
    leaves = st.one_of(numbers, numbers, numbers, st.none(), st.booleans(), st.text(max_size=3))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3),
            st.dictionaries(st.text(max_size=3), inner, max_size=2),
        ),
        max_leaves=12,
    )


def json_text(value: Any) -> bytes:
    """The value as Python's own writer puts it."""
    return json.dumps(value).encode()


# Ways to divide a request: nothing bounded, calls or work that cost all, and everything between.
UNBOUNDED = Limits(workspace_bytes=2**62, call_s=float("inf"))
DEAR_CALLS = CostModel.linear(call_s=1e9, flop_s=1e-9)
DEAR_WORK = CostModel.linear(call_s=0.0, flop_s=1e-6)

costs = st.builds(
    CostModel.linear,
    call_s=st.sampled_from([0.0, 1e-6, 1e-4, 1e-2, 1e9]),
    flop_s=st.sampled_from([0.0, 1e-12, 1e-10, 1e-8]),
)
limits = st.builds(
    Limits,
    workspace_bytes=st.sampled_from([1, 97, 499, 4999, 49999, 2**62]),
    call_s=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, float("inf")]),
)

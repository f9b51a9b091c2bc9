"""The body of the servers that take any bytes: 32 bytes of header, then each tensor's own memory.

Cheaper to read than any published format, so that no peer is slow because of what we send it. Imports numpy alone: the
driver packs with it, the servers unpack.
"""

import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

SIZE: Final = 512  # of queries, keys, values and output
_HEADER: Final = struct.Struct("<4q")  # rows, queries, keys, rows that have a valid length (all or none)


def pack(tensors: Mapping[str, np.ndarray]) -> bytes:
    """Header, queries (B, Q, 512), keys and values (B, K, 512), and valid_lens (B,) if there are any."""
    rows, num_queries, _ = tensors["queries"].shape
    names = [name for name in ("queries", "keys", "values", "valid_lens") if name in tensors]
    lengths = rows if "valid_lens" in tensors else 0
    header = _HEADER.pack(rows, num_queries, tensors["keys"].shape[1], lengths)
    return header + b"".join(tensors[name].tobytes() for name in names)


def unpack(body: bytes) -> dict[str, np.ndarray]:
    """What the graph is fed: views of the body, valid_lens repeated to (B, Q)."""
    rows, num_queries, num_kv, lengths = _HEADER.unpack_from(body)
    offset, feed = _HEADER.size, {}
    for name, length in (("queries", num_queries), ("keys", num_kv), ("values", num_kv)):
        tensor = np.frombuffer(body, np.float32, rows * length * SIZE, offset)
        feed[name] = tensor.reshape(rows, length, SIZE)
        offset += tensor.nbytes
    feed["valid_lens"] = spread(np.frombuffer(body, np.int64, lengths, offset) if lengths else None, feed)
    return feed


def from_lists(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The same from what JSON holds: nested lists by name."""
    feed = {name: np.asarray(tensors[name], np.float32) for name in ("queries", "keys", "values")}
    lengths = tensors.get("valid_lens")
    feed["valid_lens"] = spread(None if lengths is None else np.asarray(lengths, np.int64), feed)
    return feed


def spread(lengths: np.ndarray | None, feed: Mapping[str, np.ndarray]) -> np.ndarray:
    """The valid lengths (B,) of rows, or none at all, as the graph wants them: (B, Q)."""
    rows, num_queries, _ = feed["queries"].shape
    if lengths is None:
        return np.full((rows, num_queries), feed["keys"].shape[1], np.int64)
    return np.repeat(lengths[:, None], num_queries, axis=1)

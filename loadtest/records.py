"""What a process reports of each request: 54 bytes, written one by one and read as an array."""

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from loadtest.connection import Exchange
from loadtest.shapes import Shape

Records = NDArray[Any]
DTYPE: Final = np.dtype([
    ("due", "<f8"), ("picked", "<f8"), ("sent", "<f8"), ("done", "<f8"), ("status", "<u2"),
    ("rows", "<u4"), ("queries", "<u4"), ("tokens", "<u4"), ("sent_bytes", "<u4"), ("received_bytes", "<u4"),
])  # fmt: skip
_PACK: Final = struct.Struct("<ddddHIIIII").pack


def record(exchange: Exchange, shape: Shape) -> bytes:
    """One request that has ended."""
    return _PACK(
        exchange.due_s, exchange.picked_s, exchange.sent_s, exchange.done_s, exchange.status,
        shape.rows, shape.num_queries, shape.num_tokens, exchange.sent_bytes, exchange.received_bytes,
    )  # fmt: skip


def parse(written: bytes) -> Records:
    """Those that were written behind each other."""
    return np.frombuffer(written, DTYPE)

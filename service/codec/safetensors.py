"""`application/vnd.safetensors`: read in place, written without copying a tensor.

Format: 8 bytes of little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, the data
(github.com/huggingface/safetensors, README, "Format"). The library itself copies every tensor on reading.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, final

import ml_dtypes
import numpy as np
import orjson

from service.codec import Body, Chunk
from service.codec.binary import memory_of, view
from service.errors import InvalidDtype, MalformedBody
from service.tensors import AttentionOutput, WireTensors

_MAX_HEADER_BYTES: Final = 64 * 1024
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
    "BOOL": np.dtype("?"),
}
# Name, dtype, shape, and where its data begins and ends.
_Entry = tuple[str, np.dtype[Any], tuple[int, ...], int, int]
_KNOWN_BYTES: Final = 1024
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@final
class SafetensorsCodec:
    """Tensors by name; `__metadata__` is ignored."""

    media_type = "application/vnd.safetensors"

    def decode(self, body: Body) -> WireTensors:
        """Views of the body."""
        text, start = _header(body)
        data = memoryview(body)[start:]
        entries = _known_entries(text, len(data)) if len(text) <= _KNOWN_BYTES else _entries(text, len(data))
        return WireTensors(
            {name: view(name, data[begin:end], dtype, shape) for name, dtype, shape, begin, end in entries}
        )

    def encode(self, output: AttentionOutput) -> Sequence[Chunk]:
        """A header, then each tensor's own memory."""
        header: dict[str, Any] = {}
        chunks: list[Chunk] = []
        offset = 0
        for name, tensor in output.named().items():
            end = offset + tensor.nbytes
            header[name] = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [offset, end]}
            chunks.append(memory_of(tensor))
            offset = end
        text = orjson.dumps(header)
        text += b" " * (-len(text) % 8)
        return (struct.pack("<Q", len(text)) + text, *chunks)


def _entries(text: bytes, data_bytes: int) -> tuple[_Entry, ...]:
    """What a header says of each tensor, judged against the size of the data."""
    try:
        header = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"body: the safetensors header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise MalformedBody("body: the safetensors header is no JSON object")
    entries = tuple(_entry(name, entry, data_bytes) for name, entry in header.items() if name != "__metadata__")
    _check_contiguous([(begin, end, name) for name, _, _, begin, end in entries], data_bytes)
    return entries


# Traffic repeats shapes, and a header is the same bytes for the same shapes.
_known_entries = lru_cache(maxsize=256)(_entries)


def _header(body: Body) -> tuple[bytes, int]:
    if len(body) < 8:
        raise MalformedBody(
            f"body: {len(body)} bytes are no safetensors file; want at least the 8 of its header length"
        )
    (length,) = struct.unpack_from("<Q", body)
    if length > min(_MAX_HEADER_BYTES, len(body) - 8):
        raise MalformedBody(
            f"body: header length is {length}, want at most {min(_MAX_HEADER_BYTES, len(body) - 8)} here"
        )
    return bytes(memoryview(body)[8 : 8 + length]), 8 + length


def _entry(name: str, entry: Any, data_bytes: int) -> _Entry:
    where = name[:64]
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise MalformedBody(f"{where}: header entry wants exactly dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise InvalidDtype(f"{where}: dtype is {str(entry['dtype'])[:32]!r}, want one of {', '.join(_DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise MalformedBody(f"{where}: shape and data_offsets want lists of sizes, data_offsets two of them")
    begin, end = offsets
    want = math.prod(shape) * dtype.itemsize
    if not begin <= end <= data_bytes or end - begin != want:
        raise MalformedBody(
            f"{where}: data_offsets are {begin} to {end} of {data_bytes} bytes, shape and dtype want {want} bytes"
        )
    return name, dtype, tuple(shape), begin, end


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(size) is int and size >= 0 for size in value)


def _check_contiguous(spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            raise MalformedBody(f"{name[:64]}: data begins at {begin}, want {reached}: no gap and no overlap")
        reached = end
    if reached != data_bytes:
        raise MalformedBody(f"body: {data_bytes - reached} bytes belong to no tensor")

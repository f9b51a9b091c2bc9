"""`application/x-npz`: numpy's archive. Nothing is unpickled, and nothing is inflated beyond the limit.

`numpy.load` would allocate what an entry's header claims before reading it; so the entries are read here, their sizes
checked against the archive's directory first.
"""

import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from service.codec import Body, Chunk
from service.errors import BodyTooLarge, InvalidDtype, MalformedBody
from service.sequences import Array
from service.tensors import AttentionOutput, WireTensors

_MAX_ENTRIES: Final = 16
_MAX_NPY_HEADER_BYTES: Final = 4096
_NUMBER_KINDS: Final = "biuf"
# What zipfile, zlib and numpy's header parser (a Python literal, evaluated) raise on bytes that are not an archive.
_FAULTS: Final = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError, LookupError, ValueError,
    TypeError, RuntimeError, SyntaxError, tokenize.TokenError, MemoryError,
)  # fmt: skip


@final
class NpzCodec:
    """Arrays by name, stored or deflated.

    Args:
        max_inflated_bytes: most that all entries may hold together once inflated.
    """

    media_type = "application/x-npz"

    def __init__(self, max_inflated_bytes: int) -> None:
        self._max_inflated_bytes = max_inflated_bytes

    def decode(self, body: Body) -> WireTensors:
        """The arrays of the archive, Fortran order and either byte order included."""
        try:
            with zipfile.ZipFile(io.BytesIO(body)) as archive:
                entries = archive.infolist()
                self._check_directory(entries)
                arrays = {_name(entry): _array(_name(entry), _read(archive, entry)) for entry in entries}
        except _FAULTS as error:
            reason = str(error)[:200] or "it ends too early"
            raise MalformedBody(f"body: not an npz archive: {reason}") from error
        return WireTensors(arrays)

    def encode(self, output: AttentionOutput) -> Sequence[Chunk]:
        """The answer as `numpy.savez` writes it, not compressed.

        Raises:
            InvalidDtype: the answer is bfloat16, which npz cannot hold.
        """
        if output.output.dtype.kind not in _NUMBER_KINDS:
            raise InvalidDtype("output: npz cannot hold bfloat16; accept safetensors, or send the queries as float32")
        file = io.BytesIO()
        np.savez(file, **output.named())  # type: ignore[arg-type]  # numpy types its keywords as allow_pickle
        return (file.getbuffer(),)

    def _check_directory(self, entries: list[zipfile.ZipInfo]) -> None:
        if len(entries) > _MAX_ENTRIES:
            raise MalformedBody(f"body: the archive has {len(entries)} entries, want at most {_MAX_ENTRIES}")
        names = [_name(entry) for entry in entries]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise MalformedBody(f"{twice}: given twice")
        # These are the sizes that `_read` holds every entry to.
        inflated = sum(entry.file_size for entry in entries)
        if inflated > self._max_inflated_bytes:
            raise BodyTooLarge(f"body: inflates to {inflated} bytes, the limit is {self._max_inflated_bytes}")
        for entry in entries:
            if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise MalformedBody(
                    f"{_name(entry)}: want stored or deflated entries, neither encrypted nor otherwise packed"
                )


def _name(entry: zipfile.ZipInfo) -> str:
    return entry.filename.removesuffix(".npy")[:64]


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    # `archive.read` inflates up to 2 GiB before it looks at the size that the directory states; a sized read does not.
    with archive.open(entry) as file:
        return file.read(entry.file_size)


def _array(name: str, data: bytes) -> Array:
    try:
        return _parsed(name, data)
    except _FAULTS as error:
        # numpy's own words advise the server's owner (allow_pickle) and quote addresses of memory.
        raise MalformedBody(f"{name}: is no array as numpy.save writes it, or has a shape no array can have") from error


def _parsed(name: str, data: bytes) -> Array:
    shape, fortran_order, dtype, start = _npy_header(name, data)
    want = math.prod(shape) * dtype.itemsize
    if len(data) - start != want:
        raise MalformedBody(f"{name}: holds {len(data) - start} bytes, shape {shape} of {dtype.name} wants {want}")
    flat = np.frombuffer(data, dtype, offset=start)
    # numpy reads a foreign byte order correctly, but the runtime does not: make it native here.
    return flat.reshape(shape, order="F" if fortran_order else "C").astype(dtype.newbyteorder("="), copy=False)


def _npy_header(name: str, data: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise MalformedBody(f"{name}: npy version is {version}, want 1.0 or 2.0")
    shape, fortran_order, dtype = readers[version](file, max_header_size=_MAX_NPY_HEADER_BYTES)
    if dtype.kind not in _NUMBER_KINDS:
        raise InvalidDtype(f"{name}: dtype is {dtype}, want numbers")
    if any(size < 0 for size in shape):
        raise MalformedBody(f"{name}: shape {shape} has a negative size")
    return shape, fortran_order, dtype, file.tell()

"""How a request is written and its answer read: json, safetensors, npz, oip-json, oip-binary.

Bodies are written before the clock starts. The last element of `queries` is then written anew each time one is sent
(`Mark`), which costs microseconds, so that no two requests are equal and no cache can answer.
"""

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

import numpy as np
import orjson
import safetensors.numpy

from loadtest.errors import LoadTestError
from loadtest.tensors import Array, mark

Protocol = Literal["safetensors", "json", "npz", "oip-binary", "oip-json"]
PROTOCOLS: Final[tuple[Protocol, ...]] = ("safetensors", "json", "npz", "oip-binary", "oip-json")
_DATATYPES: Final = {"float32": "FP32", "int64": "INT64"}
_DTYPES: Final = {"FP64": "<f8", "FP32": "<f4", "FP16": "<f2"}
_HEADER_LENGTH: Final = "Inference-Header-Content-Length"
_WIDTH: Final = 8


@final
@dataclass(frozen=True, slots=True)
class Mark:
    """Bytes of a body that differ each time: where they begin, and what they are for a value."""

    offset: int
    write: Callable[[float], bytes]


@final
@dataclass(frozen=True, slots=True)
class Body:
    """A written request.

    Attributes:
        content: the bytes.
        media_type: for `Content-Type`.
        headers: others that it needs.
        marks: what differs each time; none if it is always sent as it is.
    """

    content: bytes
    media_type: str
    headers: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()

    def fresh(self, number: int) -> bytes | bytearray:
        """The bytes as they are sent the `number`-th time."""
        if not self.marks:
            return self.content
        content, value = bytearray(self.content), mark(number)
        for one in self.marks:
            written = one.write(value)
            content[one.offset : one.offset + len(written)] = written
        return content


def write(protocol: Protocol, tensors: Mapping[str, Array]) -> Body:
    """A body that holds these tensors, with its marks.

    Args:
        protocol: one of `PROTOCOLS`.
        tensors: C-contiguous float32 and int64, `queries` among them.
    """
    return _WRITERS[protocol](tensors)


def read_output(protocol: Protocol, headers: Mapping[str, str], content: bytes) -> Array:
    """The tensor `output` of an answer.

    Args:
        protocol: that the request had.
        headers: of the answer, names in lower case.
        content: its body.

    Raises:
        LoadTestError: it is no answer of that protocol.
    """
    try:
        return _READERS[protocol](headers, content)
    except (ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        raise LoadTestError(f"answer: not one of {protocol}: {error}") from error


def _float32(value: float) -> bytes:
    return struct.pack("<f", value)


def _decimal(value: float) -> bytes:
    return f"{value:.6f}".encode()


def _write_safetensors(tensors: Mapping[str, Array]) -> Body:
    content = safetensors.numpy.save(dict(tensors))
    header_bytes = int.from_bytes(content[:8], "little")
    end = orjson.loads(content[8 : 8 + header_bytes])["queries"]["data_offsets"][1]
    return Body(content, "application/vnd.safetensors", marks=(Mark(8 + header_bytes + end - 4, _float32),))


def _write_npz(tensors: Mapping[str, Array]) -> Body:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{"queries": tensors["queries"], **tensors})
    content = file.getvalue()
    with zipfile.ZipFile(file) as archive:
        entry, directory = archive.infolist()[0], archive.start_dir
    names = struct.unpack_from("<HH", content, entry.header_offset + 26)
    begin = entry.header_offset + 30 + sum(names)
    last = begin + entry.file_size - 4
    before = zlib.crc32(content[begin:last])

    def checksum(value: float) -> bytes:
        return struct.pack("<I", zlib.crc32(_float32(value), before))

    # The checksum stands before the entry and in the directory at the end.
    sums = (Mark(entry.header_offset + 14, checksum), Mark(directory + 16, checksum))
    return Body(content, "application/x-npz", marks=(Mark(last, _float32), *sums))


def _write_json(tensors: Mapping[str, Array]) -> Body:
    written, offset = _numbers(tensors["queries"])
    start = b'{"queries":'
    others = b"".join(b',"%s":%s' % (name.encode(), _dumps(one)) for name, one in tensors.items() if name != "queries")
    content = start + written + others + b"}"
    return Body(content, "application/json", marks=(Mark(len(start) + offset, _decimal),))


def _write_oip_json(tensors: Mapping[str, Array]) -> Body:
    written, offset = _numbers(tensors["queries"].reshape(-1))
    heads = {name: _dumps(_described(name, one))[:-1] + b',"data":' for name, one in tensors.items()}
    start = b'{"inputs":[' + heads["queries"]
    others = [b",%s%s}" % (heads[name], _dumps(one.reshape(-1))) for name, one in tensors.items() if name != "queries"]
    content = start + written + b"}" + b"".join(others) + b"]}"
    return Body(content, "application/json", marks=(Mark(len(start) + offset, _decimal),))


def _write_oip_binary(tensors: Mapping[str, Array]) -> Body:
    ordered = {"queries": tensors["queries"], **tensors}
    inputs = [
        {**_described(name, one), "parameters": {"binary_data_size": one.nbytes}} for name, one in ordered.items()
    ]
    header = _dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    content = header + b"".join(one.tobytes() for one in ordered.values())
    last = len(header) + tensors["queries"].nbytes - 4
    lengths = {_HEADER_LENGTH: str(len(header))}
    return Body(content, "application/octet-stream", lengths, (Mark(last, _float32),))


def _numbers(queries: Array) -> tuple[bytes, int]:
    # The JSON, and where its last number begins, which is given the width of a mark.
    written = _dumps(queries)
    last = re.search(rb"[^\[\],]+(\]+)$", written)
    if last is None:
        raise LoadTestError("queries: no number in them")
    return written[: last.start()] + b"0" * _WIDTH + last[1], last.start()


def _described(name: str, tensor: Array) -> dict[str, Any]:
    return {"name": name, "shape": list(tensor.shape), "datatype": _DATATYPES[tensor.dtype.name]}


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _read_json(_: Mapping[str, str], content: bytes) -> Array:
    output = orjson.loads(content)["output"]
    if len({len(entry) for entry in output}) > 1:  # of packed queries: a list for each entry
        return np.concatenate([np.array(entry) for entry in output])
    return np.array(output)


def _read_safetensors(_: Mapping[str, str], content: bytes) -> Array:
    return safetensors.numpy.load(content)["output"]


def _read_npz(_: Mapping[str, str], content: bytes) -> Array:
    output: Array = np.load(io.BytesIO(content), allow_pickle=False)["output"]
    return output


def _read_oip(headers: Mapping[str, str], content: bytes) -> Array:
    length = int(headers.get(_HEADER_LENGTH.lower(), len(content)))
    offset = length
    for output in orjson.loads(content[:length])["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if output["name"] == "output":
            data = (
                np.array(output["data"])
                if size is None
                else np.frombuffer(content[offset : offset + size], _DTYPES[output["datatype"]])
            )
            return data.reshape(output["shape"])
        offset += size or 0
    raise KeyError("output")


_WRITERS: Final[Mapping[Protocol, Callable[[Mapping[str, Array]], Body]]] = {
    "safetensors": _write_safetensors,
    "json": _write_json,
    "npz": _write_npz,
    "oip-binary": _write_oip_binary,
    "oip-json": _write_oip_json,
}
_READERS: Final[Mapping[Protocol, Callable[[Mapping[str, str], bytes], Array]]] = {
    "safetensors": _read_safetensors,
    "json": _read_json,
    "npz": _read_npz,
    "oip-binary": _read_oip,
    "oip-json": _read_oip,
}

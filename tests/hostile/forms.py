"""The forms of a body: how each is read, how it is sent, and good ones to begin with.

Imported by the fuzzer's target, so nothing here may import more than the codecs need.
"""

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from safetensors.numpy import save

from service.codec.json import JsonCodec
from service.codec.npz import NpzCodec
from service.codec.oip import decode_request
from service.codec.safetensors import SafetensorsCodec
from service.tensors import AttentionInputs, WireTensors
from tests.strategies import LAYER

_INFLATED_BYTES: Final = 1024 * 1024
_NATURAL: Final = "/v1/attention?model=odd"
_OIP: Final = "/v2/models/odd/infer"
_LENGTH_BYTES: Final = 2


@final
@dataclass(frozen=True)
class Sent:
    """A request: where it goes, its headers and its body."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@final
@dataclass(frozen=True)
class Form:
    """One form of bodies.

    Attributes:
        read: what a codec makes of the bytes, judged as the service judges it.
        sent: the request that carries them.
        good: bytes that are read without complaint.
    """

    read: Callable[[bytes], AttentionInputs]
    sent: Callable[[bytes], Sent]
    good: Sequence[bytes]

    @staticmethod
    def of(decode: Callable[[bytes], WireTensors], path: str, media_type: str, good: Sequence[bytes]) -> "Form":
        """A form whose bytes are sent as they are."""
        return Form(
            lambda data: AttentionInputs.parse(decode(data), LAYER),
            lambda data: Sent(path, {"Content-Type": media_type}, data),
            good,
        )


def kept(name: str) -> list[bytes]:
    """The bodies of a form that were kept, each another one."""
    with zipfile.ZipFile(archive(name)) as files:
        return [files.read(entry) for entry in files.namelist()]


def archive(name: str) -> Path:
    """Where they are kept."""
    return Path(__file__).parent / f"{name}.zip"


def _split(data: bytes) -> tuple[int, bytes]:
    """The length of the JSON header that a body claims in its first bytes, and the body."""
    padded = data.ljust(_LENGTH_BYTES, b"\0")
    return struct.unpack_from("<H", padded)[0], padded[_LENGTH_BYTES:]


def _read_binary(data: bytes) -> AttentionInputs:
    length, body = _split(data)
    return AttentionInputs.parse(decode_request(body, length).tensors, LAYER)


def _send_binary(data: bytes) -> Sent:
    length, body = _split(data)
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(length)}
    return Sent(_OIP, headers, body)


def _wrapped(data: bytes) -> bytes:
    """An archive in which the queries are these bytes; fuzzers do not guess checksums."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as files:
        files.writestr("queries.npy", data)
        for name in ("keys", "values"):
            files.writestr(f"{name}.npy", _npy(_TENSORS[name]))
    return file.getvalue()


def _npy(tensor: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, tensor)
    return file.getvalue()


def _npz(write: Any) -> bytes:
    file = io.BytesIO()
    write(file, **_TENSORS)
    return file.getvalue()


def _oip(*, binary: bool) -> tuple[bytes, bytes]:
    inputs, chunks = [], []
    for name, tensor in _TENSORS.items():
        datatype = "INT64" if tensor.dtype == np.int64 else "FP32"
        entry: dict[str, Any] = {"name": name, "shape": tensor.shape, "datatype": datatype}
        if binary:
            entry["parameters"] = {"binary_data_size": tensor.nbytes}
            chunks.append(tensor.tobytes())
        else:
            entry["data"] = tensor.ravel().tolist()
        inputs.append(entry)
    request = {
        "id": "a", "inputs": inputs, "outputs": [{"name": "output", "parameters": {"binary_data": binary}}],
        "parameters": {"timeout": 1000000},
    }  # fmt: skip
    return json.dumps(request).encode(), b"".join(chunks)


def _oip_binary() -> bytes:
    header, data = _oip(binary=True)
    return struct.pack("<H", len(header)) + header + data


_TENSORS: Final = {
    "queries": np.ones((1, 2, LAYER.query_size), np.float32),
    "keys": np.ones((1, 3, LAYER.key_size), np.float32),
    "values": np.ones((1, 3, LAYER.value_size), np.float32),
    "valid_lens": np.array([2]),
}
_PACKED: Final = {
    **{name: tensor[0] for name, tensor in _TENSORS.items() if name != "valid_lens"},
    "query_lens": np.array([2]),
    "valid_lens": np.array([3]),
}
_NESTED: Final = {name: tensor.tolist() for name, tensor in _TENSORS.items()}
_npz_codec: Final = NpzCodec(_INFLATED_BYTES)

FORMS: Final[Mapping[str, Form]] = {
    "json": Form.of(JsonCodec().decode, _NATURAL, "application/json", [json.dumps(_NESTED).encode()]),
    "safetensors": Form.of(
        SafetensorsCodec().decode, _NATURAL, "application/vnd.safetensors", [save(_TENSORS), save(_PACKED)]
    ),
    "npz": Form.of(_npz_codec.decode, _NATURAL, "application/x-npz", [_npz(np.savez), _npz(np.savez_compressed)]),
    "npy": Form(
        lambda data: AttentionInputs.parse(_npz_codec.decode(_wrapped(data)), LAYER),
        lambda data: Sent(_NATURAL, {"Content-Type": "application/x-npz"}, _wrapped(data)),
        [_npy(_TENSORS["queries"]), _npy(np.asfortranarray(_TENSORS["queries"].astype(">f8")))],
    ),
    "oip_json": Form.of(
        lambda data: decode_request(data, None).tensors, _OIP, "application/json", [_oip(binary=False)[0]]
    ),
    "oip_binary": Form(_read_binary, _send_binary, [_oip_binary()]),
}

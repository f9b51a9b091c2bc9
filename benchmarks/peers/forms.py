"""Tensors as the bytes of a request, and the output out of the bytes of an answer, for every form that is sent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import orjson
from safetensors.numpy import load, save

from benchmarks.peers.servers.wire import pack
from benchmarks.peers.workloads import Form, Tensors

_SAFETENSORS: Final = "application/vnd.safetensors"


@final
@dataclass(frozen=True, slots=True)
class Codec:
    """A media type, and how to write a request and read an answer (the output, of any shape)."""

    media_type: str
    encode: Callable[[Tensors], bytes]
    decode: Callable[[bytes], np.ndarray]


def packed(tensors: Tensors) -> dict[str, np.ndarray]:
    """The tensors without padding: keys and values (sum of the valid lengths, size)."""
    valid = np.arange(tensors["keys"].shape[1]) < tensors["valid_lens"][:, None]
    return {**tensors, "keys": tensors["keys"][valid], "values": tensors["values"][valid]}


def _json(tensors: Tensors) -> bytes:
    return orjson.dumps(dict(tensors), option=orjson.OPT_SERIALIZE_NUMPY)


def _oip_json(tensors: Tensors) -> bytes:
    inputs = [
        {"name": name, "datatype": "FP32", "shape": tensor.shape, "data": tensor.ravel()}
        for name, tensor in tensors.items()
    ]
    return orjson.dumps({"inputs": inputs}, option=orjson.OPT_SERIALIZE_NUMPY)


def _from_json(answer: bytes) -> np.ndarray:
    value: Any = orjson.loads(answer)
    if isinstance(value, Mapping):
        value = value["output"] if "output" in value else value["outputs"][0]["data"]
    return np.asarray(value, np.float32)


def _from_safetensors(answer: bytes) -> np.ndarray:
    return load(answer)["output"]


CODECS: Final[Mapping[Form, Codec]] = {
    "safetensors": Codec(_SAFETENSORS, lambda tensors: save(dict(tensors)), _from_safetensors),
    "self-attention": Codec(_SAFETENSORS, lambda tensors: save({"queries": tensors["queries"]}), _from_safetensors),
    "packed": Codec(_SAFETENSORS, lambda tensors: save(packed(tensors)), _from_safetensors),
    "raw": Codec("application/octet-stream", pack, lambda answer: np.frombuffer(answer, np.float32)),
    "json": Codec("application/json", _json, _from_json),
    "oip-json": Codec("application/json", _oip_json, _from_json),
}

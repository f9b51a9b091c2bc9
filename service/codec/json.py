"""`application/json`: nested lists, read by simdjson straight into a float buffer."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import orjson

from service.codec import Body, Chunk
from service.codec.json_arrays import array, parse_object, refuse_hidden_lists
from service.errors import MalformedBody
from service.tensors import INPUT_NAMES, Array, AttentionOutput, WireTensors, refuse_unknown


@final
class JsonCodec:
    """An object of nested lists; `null` means absent. Answers hold the shortest decimals that give the same float32."""

    media_type = "application/json"

    def decode(self, body: Body) -> WireTensors:
        """The tensors of a JSON object: float32, and int64 lengths."""
        fields = _fields(parse_object(body, ", ".join(INPUT_NAMES)))
        tensors = {name: _tensor(name, value) for name, value in fields.items()}
        refuse_hidden_lists(body, 0, [(name, fields[name], tensor.shape) for name, tensor in tensors.items()])
        return WireTensors(tensors)

    def encode(self, output: AttentionOutput) -> Sequence[Chunk]:
        """`{"output": [...], "weights": [...]}`."""
        tensors = {name: tensor.astype(np.float32, copy=False) for name, tensor in output.named().items()}
        return (orjson.dumps(tensors, option=orjson.OPT_SERIALIZE_NUMPY),)


def _fields(document: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in document:
        refuse_unknown((name,))
        if name in fields:
            raise MalformedBody(f"{name}: given twice")
        fields[name] = document[name]
    return {name: value for name, value in fields.items() if value is not None}


def _tensor(name: str, value: Any) -> Array:
    if name == "valid_lens":
        return array(name, value, integers=True)
    with np.errstate(over="ignore"):  # what becomes infinite is refused, where it counts, as not finite
        return array(name, value, integers=False).astype(np.float32)

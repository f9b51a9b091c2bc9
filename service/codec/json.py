"""`application/json`: nested lists, read by simdjson straight into a float buffer."""

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import orjson

from service.codec import Body, Chunk
from service.codec.json_arrays import array, count_lists, entries, parse_object, refuse_hidden_lists
from service.errors import MalformedBody
from service.sequences import Array, Sequences
from service.tensors import INPUT_NAMES, AttentionOutput, WireTensors, refuse_unknown


@final
class JsonCodec:
    """An object of nested lists; `null` means absent. Answers hold the shortest decimals that give the same float32.

    The entries of queries, keys and values may differ in length; a packed answer is written entry by entry.
    """

    media_type = "application/json"

    def decode(self, body: Body) -> WireTensors:
        """The tensors of a JSON object: float32, and int64 lengths."""
        text = bytes(body)
        fields = _fields(parse_object(text, ", ".join(INPUT_NAMES)))
        tensors = {name: _tensor(name, value) for name, value in fields.items()}
        refuse_hidden_lists(text, 0, [(name, fields[name], _num_lists(tensor)) for name, tensor in tensors.items()])
        return WireTensors(tensors)

    def encode(self, output: AttentionOutput) -> Sequence[Chunk]:
        """`{"output": [...], "weights": [...]}`."""
        tensors: dict[str, Any] = {name: _writable(tensor) for name, tensor in output.named().items()}
        if output.query_lens is not None:
            tensors["output"] = [_writable(entry) for entry in output.entries()]
        return (orjson.dumps(tensors, option=orjson.OPT_SERIALIZE_NUMPY),)


def _fields(document: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in document:
        refuse_unknown((name,))
        if name in fields:
            raise MalformedBody(f"{name}: given twice")
        fields[name] = document[name]
    return {name: value for name, value in fields.items() if value is not None}


def _tensor(name: str, value: Any) -> Array | Sequences:
    if name in ("valid_lens", "query_lens"):
        return array(name, value, integers=True)
    tensor = entries(name, value)
    with np.errstate(over="ignore"):  # what becomes infinite is refused, where it counts, as not finite
        if isinstance(tensor, Sequences):
            return tensor.of(tensor.data.astype(np.float32))
        return tensor.astype(np.float32)


def _num_lists(tensor: Array | Sequences) -> int:
    if isinstance(tensor, Sequences):
        return 1 + len(tensor) + len(tensor.data)
    return count_lists(tensor.shape)


def _writable(tensor: Array) -> Array:
    return np.ascontiguousarray(tensor, np.float32)

"""`application/json`: nested lists, read by simdjson straight into a float buffer.

No Python object is made for a number: simdjson flattens an array into a buffer and refuses what is not a number; the
shape is read from the lengths of the lists, of which there are as many as tokens, not as numbers.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import orjson
import simdjson

from service.codec import Body, Chunk
from service.errors import InvalidDtype, InvalidShape, InvalidValidLens, MalformedBody
from service.tensors import INPUT_NAMES, Array, AttentionOutput, WireTensors, refuse_unknown

_MAX_AXES: Final = 8


@final
class JsonCodec:
    """An object of nested lists; `null` means absent. Answers hold the shortest decimals that give the same float32."""

    media_type = "application/json"

    def decode(self, body: Body) -> WireTensors:
        """The tensors of a JSON object: float32, and int64 lengths."""
        document = _parse(body)
        names = list(document)
        refuse_unknown(names)
        if len(set(names)) < len(names):
            raise MalformedBody("a tensor is given twice")
        fields = {name: document[name] for name in names}
        tensors = {name: _tensor(name, value) for name, value in fields.items() if value is not None}
        # A list in the place of a number would be flattened unseen. Counting brackets finds it: strings are refused
        # above, so every '[' of the body opens a list, and the shapes say how many lists there should be.
        if body.count(b"[") != sum(_count_lists(tensor.shape) for tensor in tensors.values()):
            raise InvalidShape("the lists of a tensor are not all nested to the same depth")
        return WireTensors(tensors)

    def encode(self, output: AttentionOutput) -> Sequence[Chunk]:
        """`{"output": [...], "weights": [...]}`."""
        tensors = {name: tensor.astype(np.float32, copy=False) for name, tensor in output.named().items()}
        return (orjson.dumps(tensors, option=orjson.OPT_SERIALIZE_NUMPY),)


def _parse(body: Body) -> Any:
    try:
        document = simdjson.Parser().parse(body)
    except (ValueError, RuntimeError) as error:  # simdjson raises both, by kind of fault
        raise MalformedBody(f"body: not JSON: {_reason(error)}") from error
    if not isinstance(document, simdjson.Object):
        raise MalformedBody(f"body: want a JSON object with {', '.join(INPUT_NAMES)}")
    return document


def _reason(error: Exception) -> str:
    text = str(error)
    if "NUMBER_ERROR" in text:
        return "a number is malformed, or beyond the range of float64"
    if "TAPE_ERROR" in text:
        return "a comma, bracket, quote or value is missing, left over or no JSON value (NaN and Infinity are none)"
    return text.partition(": ")[2] or text


def _tensor(name: str, value: Any) -> Array:
    if not isinstance(value, simdjson.Array):
        raise InvalidDtype(f"{name}: want nested lists of numbers, got {_kind(value)}")
    return _lengths(name, value) if name == "valid_lens" else _floats(name, value)


def _floats(name: str, value: Any) -> Array:
    shape = _shape(name, value)
    try:
        buffer = value.as_buffer(of_type="d")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidDtype(f"{name}: holds a string, boolean, null or object; want numbers") from error
    flat = np.frombuffer(buffer, np.float64)
    if flat.size != math.prod(shape):
        raise InvalidShape(f"{name}: {flat.size} numbers do not fill the shape {shape}; its lists differ in depth")
    with np.errstate(over="ignore"):
        return flat.astype(np.float32).reshape(shape)


def _shape(name: str, value: Any) -> tuple[int, ...]:
    # Level by level; every list of a level must be as long as its first.
    shape: list[int] = []
    level = [value]
    while level and isinstance(level[0], simdjson.Array):
        if len(shape) == _MAX_AXES:
            raise InvalidShape(f"{name}: has more than {_MAX_AXES} axes, want 3")
        lengths = _list_lengths(name, level)
        uneven = next((index for index, length in enumerate(lengths) if length != lengths[0]), None)
        if uneven is not None:
            raise InvalidShape(
                f"{name}: lists of one axis differ in length, {lengths[0]} and {lengths[uneven]}; want equal ones"
            )
        shape.append(lengths[0])
        level = _next_level(level, lengths[0])
    return tuple(shape)


def _list_lengths(name: str, level: list[Any]) -> list[int]:
    try:
        return [len(entry) for entry in level]
    except TypeError:
        raise InvalidShape(f"{name}: a number stands where a list should") from None


def _next_level(level: list[Any], length: int) -> list[Any]:
    if length == 0:
        return []
    if isinstance(level[0][0], simdjson.Array):
        return [entry for parent in level for entry in parent]
    return [level[0][0]]  # numbers: one stands for all, their types are checked when they are read


def _lengths(name: str, value: Any) -> Array:
    rows = value.as_list()
    flat = [entry for row in rows for entry in (row if isinstance(row, list) else [row])]
    for entry in flat:
        if type(entry) is not int:  # a bool is an int to isinstance
            raise InvalidDtype(f"{name}: want integers, got {_kind(entry)}")
        if not -(2**63) <= entry < 2**63:
            raise InvalidValidLens(f"{name}: {entry} is beyond every length")
    sizes = {len(row) if isinstance(row, list) else None for row in rows}
    if len(sizes) > 1:
        raise InvalidShape(f"{name}: its lists differ in length; want (batch,) or (batch, num_queries)")
    width = sizes.pop() if sizes else None
    return np.array(flat, np.int64).reshape((len(rows),) if width is None else (len(rows), width))


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", str: "a string", float: f"{value}", int: f"{value}", list: "a list"}
    return kinds.get(type(value), "null" if value is None else "an object")


def _count_lists(shape: tuple[int, ...]) -> int:
    return sum(math.prod(shape[:depth]) for depth in range(len(shape)))

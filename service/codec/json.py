"""`application/json`: nested lists, read by simdjson straight into a float buffer.

No Python object is made for a number: simdjson flattens an array into a buffer and refuses what is not a number; the
shape is read from the lengths of the lists, of which there are as many as tokens, not as numbers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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
        fields = _fields(_parse(body))
        tensors = {name: _tensor(name, value) for name, value in fields.items()}
        # A list in the place of a number would be flattened unseen. Counting brackets finds it: strings are refused
        # above, so every '[' of the body opens a list, and the shapes say how many lists there should be.
        if body.count(b"[") != sum(_count_lists(tensor.shape) for tensor in tensors.values()):
            raise InvalidShape(f"{_deeper(fields, tensors)}: its lists are not all nested to the same depth")
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
        return "a number is malformed, beyond the range of float64, or an integer of more than 64 bits"
    if "TAPE_ERROR" in text:
        return "a comma, bracket, quote or value is missing, left over or no JSON value (NaN and Infinity are none)"
    return text.partition(": ")[2] or text


def _fields(document: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in document:
        refuse_unknown((name,))
        if name in fields:
            raise MalformedBody(f"{name}: given twice")
        fields[name] = document[name]
    return {name: value for name, value in fields.items() if value is not None}


def _tensor(name: str, value: Any) -> Array:
    if not isinstance(value, simdjson.Array):
        raise InvalidDtype(f"{name}: want nested lists of numbers, got {_kind(value)}")
    shape = _shape(name, value)
    flat = _integers(name, value) if name == "valid_lens" else _floats(name, value)
    if flat.size != math.prod(shape):
        raise InvalidShape(f"{name}: {flat.size} numbers do not fill the shape {shape}; its lists differ in depth")
    return flat.reshape(shape)


def _shape(name: str, value: Any) -> tuple[int, ...]:
    # As the first list of each level says; then every other must agree.
    shape: list[int] = []
    first = value
    while isinstance(first, simdjson.Array):
        if len(shape) == _MAX_AXES:
            raise InvalidShape(f"{name}: has more than {_MAX_AXES} axes, want 3")
        shape.append(len(first))
        first = first[0] if shape[-1] else None
    if len(shape) > 1:
        _check_even(name, value, shape[1:])
    return tuple(shape)


def _check_even(name: str, value: Any, lengths: Sequence[int]) -> None:
    # One proxy at a time: a list of all takes more than twenty times the bytes of the body.
    length, *deeper = lengths
    for entry in value:
        if not isinstance(entry, simdjson.Array):
            raise _stray(name, entry)
        if len(entry) != length:
            raise InvalidShape(
                f"{name}: lists of one axis differ in length, {length} and {len(entry)}; want equal ones"
            )
        if deeper:
            _check_even(name, entry, deeper)


def _stray(name: str, entry: Any) -> InvalidShape | InvalidDtype:
    if type(entry) in (int, float):
        return InvalidShape(f"{name}: a number stands where a list should")
    return InvalidDtype(f"{name}: want nested lists of numbers, got {_kind(entry)}")


def _floats(name: str, value: Any) -> Array:
    try:
        buffer = value.as_buffer(of_type="d")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidDtype(f"{name}: holds a string, boolean, null or object; want numbers") from error
    with np.errstate(over="ignore"):
        return np.frombuffer(buffer, np.float64).astype(np.float32)


def _integers(name: str, value: Any) -> Array:
    # Never `as_list`: beyond 16,777,215 entries, the most a tape can state, pysimdjson 7.0.2 writes past its list.
    try:
        return np.frombuffer(value.as_buffer(of_type="i"), np.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_integer(name, value) from error


def _not_integer(name: str, value: Any) -> InvalidDtype | InvalidValidLens:
    wrong = next(entry for entry in _leaves(value) if type(entry) is not int or entry >= 2**63)
    if type(wrong) is int:  # a bool is an int to isinstance
        return InvalidValidLens(f"{name}: {wrong} is beyond every length")
    return InvalidDtype(f"{name}: want integers, got {_kind(wrong)}")


def _leaves(value: Any) -> Iterator[Any]:
    open_lists = [iter(value)]
    while open_lists:
        for entry in open_lists[-1]:
            if isinstance(entry, simdjson.Array):
                open_lists.append(iter(entry))
                break
            yield entry
        else:
            open_lists.pop()


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", str: "a string", float: f"{value}", int: f"{value}"}
    return kinds.get(type(value), "null" if value is None else "an object")


def _count_lists(shape: tuple[int, ...]) -> int:
    return sum(math.prod(shape[:depth]) for depth in range(len(shape)))


def _deeper(fields: Mapping[str, Any], tensors: Mapping[str, Array]) -> str:
    return next(name for name in fields if fields[name].mini.count(b"[") > _count_lists(tensors[name].shape))

"""JSON arrays to numpy without a Python object for a number: what simdjson offers, and the checks that it leaves out.

simdjson flattens nested lists into one buffer and refuses what is not a number. Shapes are read from the lengths of the
lists, of which there are as many as tokens, not as numbers; one at a time, since lists of proxies outgrow the body.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import simdjson

from service.errors import InvalidDtype, InvalidShape, InvalidValidLens, MalformedBody
from service.sequences import Array, Sequences

_MAX_AXES: Final = 8
_FAULTS: Final = (TypeError, ValueError, RuntimeError)  # simdjson raises each, by kind of fault


def parse_object(body: bytes, want: str) -> Any:
    """A JSON object, its parts still unread.

    Raises:
        MalformedBody: the bytes are not JSON, or not an object; `want` says what should be in it.
    """
    try:
        document = simdjson.Parser().parse(body)
    except _FAULTS as error:
        raise MalformedBody(f"body: not JSON: {_reason(error)}") from error
    if not isinstance(document, simdjson.Object):
        raise MalformedBody(f"body: want a JSON object with {want}")
    return document


def is_array(value: Any) -> bool:
    """Whether a value is a JSON array."""
    return isinstance(value, simdjson.Array)


def is_object(value: Any) -> bool:
    """Whether a value is a JSON object."""
    return isinstance(value, simdjson.Object)


def array(name: str, value: Any, *, integers: bool) -> Array:
    """Nested lists as an array of their shape: int64, or float64.

    Raises:
        InvalidDtype: something in them is not a number, or not an integer where those are wanted.
        InvalidShape: they differ in length or depth. A list in the place of a number may still hide; see
            `refuse_hidden_lists`.
        InvalidValidLens: an integer is beyond int64, and so beyond every length.
    """
    if not is_array(value):
        raise InvalidDtype(f"{name}: want nested lists of numbers, got {kind_of(value)}")
    shape = _shape(name, value)
    flat = _integers(name, value) if integers else _floats(name, value)
    if flat.size != math.prod(shape):
        raise InvalidShape(f"{name}: {flat.size} numbers do not fill the shape {shape}; its lists differ in depth")
    return flat.reshape(shape)


def entries(name: str, value: Any) -> Array | Sequences:
    """Nested lists as a float64 array, or as sequences where the lists of the second axis, and only those, differ.

    Raises:
        InvalidDtype, InvalidShape: as `array`.
    """
    lengths = _entry_lengths(value)
    if len(set(lengths)) <= 1:
        return array(name, value, integers=False)
    widths = {len(row) if is_array(row) else None for entry in value for row in entry}
    width = widths.pop()
    if width is None or widths:
        return array(name, value, integers=False)  # which says what is wrong
    flat = _floats(name, value)
    if flat.size != sum(lengths) * width:
        raise InvalidShape(f"{name}: {flat.size} numbers do not fill {sum(lengths)} rows of {width}")
    return Sequences.ragged(flat.reshape(sum(lengths), width), np.array(lengths, np.int64))


def count_lists(shape: tuple[int, ...]) -> int:
    """How many lists a nested array of this shape has."""
    return sum(math.prod(shape[:depth]) for depth in range(len(shape)))


def refuse_hidden_lists(body: bytes, other_lists: int, arrays: Collection[tuple[str, Any, int]]) -> None:
    """Refuses a list in the place of a number, which flattening hides.

    Every list opens with '[', so if the body has as many as the shapes tell, none is hidden. If it has more, a string
    may hold some, and each array is looked at, which is slow.

    Args:
        body: the JSON.
        other_lists: lists in it that are not among the arrays.
        arrays: name and value of each array that was read, and how many lists its shape tells.

    Raises:
        InvalidShape: there is one.
    """
    if body.count(b"[") == other_lists + sum(num_lists for _, _, num_lists in arrays):
        return
    for name, value, num_lists in arrays:
        if value.mini.count(b"[") > num_lists:
            raise InvalidShape(f"{name}: its lists are not all nested to the same depth")


def kind_of(value: Any) -> str:
    """A JSON value in a word or two."""
    if is_array(value):
        return "a list"
    kinds = {bool: "a boolean", str: "a string", float: f"{value}", int: f"{value}"}
    return kinds.get(type(value), "null" if value is None else "an object")


def _entry_lengths(value: Any) -> list[int]:
    """How long each entry is; nothing if they are not lists."""
    if not is_array(value) or not all(is_array(entry) for entry in value):
        return []
    return [len(entry) for entry in value]


def _reason(error: Exception) -> str:
    text = str(error)
    if "NUMBER_ERROR" in text:
        return "a number is malformed, beyond the range of float64, or an integer of more than 64 bits"
    if "TAPE_ERROR" in text:
        return "a comma, bracket, quote or value is missing, left over or no JSON value (NaN and Infinity are none)"
    return text.partition(": ")[2] or text


def _shape(name: str, value: Any) -> tuple[int, ...]:
    # As the first list of each level says; then every other must agree.
    shape: list[int] = []
    first = value
    while is_array(first):
        if len(shape) == _MAX_AXES:
            raise InvalidShape(f"{name}: has more than {_MAX_AXES} axes, want 3")
        shape.append(len(first))
        first = first[0] if shape[-1] else None
    if len(shape) > 1:
        _check_even(name, value, shape[1:])
    return tuple(shape)


def _check_even(name: str, value: Any, lengths: Sequence[int]) -> None:
    length, *deeper = lengths
    for entry in value:
        if not is_array(entry):
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
    return InvalidDtype(f"{name}: want nested lists of numbers, got {kind_of(entry)}")


def _floats(name: str, value: Any) -> Array:
    try:
        return np.frombuffer(value.as_buffer(of_type="d"), np.float64)
    except _FAULTS as error:
        raise InvalidDtype(f"{name}: holds a string, boolean, null or object; want numbers") from error


def _integers(name: str, value: Any) -> Array:
    # Never `as_list`: beyond 16,777,215 entries, the most a tape can state, pysimdjson 7.0.2 writes past its list.
    try:
        return np.frombuffer(value.as_buffer(of_type="i"), np.int64)
    except _FAULTS as error:
        raise _not_integer(name, value) from error


def _not_integer(name: str, value: Any) -> InvalidDtype | InvalidValidLens:
    wrong = next(entry for entry in _leaves(value) if type(entry) is not int or entry >= 2**63)
    if type(wrong) is int:  # a bool is an int to isinstance
        return InvalidValidLens(f"{name}: {wrong} is beyond every length")
    return InvalidDtype(f"{name}: want integers, got {kind_of(wrong)}")


def _leaves(value: Any) -> Iterator[Any]:
    open_lists = [iter(value)]
    while open_lists:
        for entry in open_lists[-1]:
            if is_array(entry):
                open_lists.append(iter(entry))
                break
            yield entry
        else:
            open_lists.pop()

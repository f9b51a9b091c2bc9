"""Tensors as bytes, without copying: the view of a body that is a tensor, and the memory of a tensor."""

from typing import Any

import numpy as np

from service.codec import Chunk
from service.errors import MalformedBody
from service.sequences import Array


def view(name: str, data: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """`data`, which holds just as many bytes as the shape wants, as a tensor.

    Raises:
        MalformedBody: no array can have this shape; an axis of 0 lets the others be of any size.
    """
    try:
        return np.frombuffer(data, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise MalformedBody(f"{name[:64]}: shape {shape} is larger than any array can be") from error


def memory_of(tensor: Array) -> Chunk:
    """The bytes of a tensor, row-major."""
    # Through uint8, because memoryview knows no bfloat16.
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data

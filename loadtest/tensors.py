"""The tensors of a request from its shape, seeded: padded or packed, as the service's contract names them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from loadtest.shapes import Shape

Array = NDArray[Any]
Form = Literal["padded", "packed"]
FORMS: Final[tuple[Form, ...]] = ("padded", "packed")
# So that a body can be sent a million times and never be the same; six decimals in a JSON body.
_STEPS: Final = 999_999
_STEP: Final = 1e-6


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of the served layer."""

    query_size: int
    key_size: int
    value_size: int


@final
@dataclass(frozen=True, slots=True)
class Composer:
    """Makes the tensors of requests.

    Attributes:
        layer: sizes of the last axes.
        form: "padded" has a batch axis and as many rows as the longest entry; "packed" has the rows of all entries
            behind each other, and their numbers.
        complete: whether the server wants all four tensors, `valid_lens` (B, Q) among them, as a bare graph does.
    """

    layer: Layer
    form: Form = "padded"
    complete: bool = False

    def compose(self, shape: Shape, rng: np.random.Generator) -> dict[str, Array]:
        """Standard normal float32 where tokens are, 0 where there is padding; lengths are int64."""
        if self.form == "packed":
            return self._packed(shape, rng)
        tensors = {"queries": _padded(shape.queries, self.layer.query_size, rng)}
        if shape.keys is not None:
            tensors["keys"] = _padded(shape.keys, self.layer.key_size, rng)
            tensors["values"] = _padded(shape.keys, self.layer.value_size, rng)
        if self.complete:
            return self._completed(tensors, shape)
        if shape.valid is not None or len(set(shape.valid_lens)) > 1:
            tensors["valid_lens"] = np.array(shape.valid_lens)
        return tensors

    def _packed(self, shape: Shape, rng: np.random.Generator) -> dict[str, Array]:
        tensors = {"queries": _random((shape.num_queries, self.layer.query_size), rng)}
        tensors["query_lens"] = np.array(shape.queries)
        if shape.keys is not None:
            tensors["keys"] = _random((sum(shape.keys), self.layer.key_size), rng)
            tensors["values"] = _random((sum(shape.keys), self.layer.value_size), rng)
            tensors["valid_lens"] = np.array(shape.keys)
        return tensors

    def _completed(self, tensors: dict[str, Array], shape: Shape) -> dict[str, Array]:
        queries = tensors["queries"]
        lengths = np.broadcast_to(np.array(shape.valid_lens)[:, None], queries.shape[:2])
        same = {"keys": queries, "values": queries}
        return {**same, **tensors, "valid_lens": np.ascontiguousarray(lengths)}


def mark(number: int) -> float:
    """The last element of the queries the `number`-th time that a body is sent, so that no two are the same."""
    return (number % _STEPS + 1) * _STEP


def marked(tensors: dict[str, Array], number: int) -> dict[str, Array]:
    """The tensors as they are sent that time."""
    queries = tensors["queries"].copy()
    queries.reshape(-1)[-1] = mark(number)
    return {**tensors, "queries": queries}


def _random(shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    return rng.standard_normal(shape, np.float32)


def _padded(lengths: Sequence[int], size: int, rng: np.random.Generator) -> Array:
    rows = _random((len(lengths), max(lengths), size), rng)
    rows[np.arange(max(lengths)) >= np.array(lengths)[:, None]] = 0
    return rows

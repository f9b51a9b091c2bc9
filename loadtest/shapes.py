"""What requests ask for, in sizes alone: how many entries, queries and keys. Pure.

B entries a request; each has its own number of queries and keys, and a number of keys that count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from loadtest.sizes import Sizes


@final
@dataclass(frozen=True, slots=True)
class Shape:
    """One request in sizes, an element an entry.

    Attributes:
        queries: of each entry.
        keys: of each entry; None is self-attention, whose keys are its queries.
        valid: keys that count; None is all.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...] | None = None
    valid: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """Entries."""
        return len(self.queries)

    @property
    def num_queries(self) -> int:
        """Of all entries, without padding."""
        return sum(self.queries)

    @property
    def valid_lens(self) -> tuple[int, ...]:
        """Keys of each entry that count."""
        return self.valid or self.keys or self.queries

    @property
    def num_tokens(self) -> int:
        """Queries and the keys that count; in self-attention they are the same tokens and count once."""
        return self.num_queries + (sum(self.valid_lens) if self.keys is not None else 0)


def together(shapes: Sequence[Shape]) -> Shape:
    """What several requests ask for, as if one did. Self-attention keeps its kind where all have it."""
    cross = any(one.keys is not None for one in shapes)
    keys = tuple(size for one in shapes for size in one.keys or one.queries) if cross else None
    valid = tuple(size for one in shapes for size in one.valid_lens)
    return Shape(tuple(size for one in shapes for size in one.queries), keys, valid)


@final
@dataclass(frozen=True, slots=True)
class Mix:
    """Shapes by distribution.

    Attributes:
        batch: entries of a request.
        queries: of an entry.
        keys: of an entry; None is self-attention.
        valid: keys of an entry that count, at most all of them; None is all.
    """

    batch: Sizes
    queries: Sizes
    keys: Sizes | None = None
    valid: Sizes | None = None

    def draw(self, rng: np.random.Generator, count: int) -> list[Shape]:
        """That many shapes."""
        return [self._one(rng, int(rows)) for rows in self.batch.draw(rng, count)]

    def _one(self, rng: np.random.Generator, rows: int) -> Shape:
        queries = self.queries.draw(rng, rows)
        keys = None if self.keys is None else self.keys.draw(rng, rows)
        valid = (
            None if self.valid is None else np.minimum(self.valid.draw(rng, rows), queries if keys is None else keys)
        )
        return Shape(
            _integers(queries), None if keys is None else _integers(keys), None if valid is None else _integers(valid)
        )


def _integers(sizes: Sequence[int] | np.ndarray) -> tuple[int, ...]:
    return tuple(int(size) for size in sizes)

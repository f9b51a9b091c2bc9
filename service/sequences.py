"""Batch entries of any lengths, one after the other: the one layout for padded, packed and ragged tensors.

numpy only. Shape letters: B batch, N positions of an entry.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Indices = NDArray[np.int64]


@lru_cache(maxsize=1024)
def _even(batch: int, length: int) -> tuple[Indices, Indices]:
    """Lengths and starts of so many equal entries. Read only, since they are shared; kept, since traffic repeats."""
    lengths, starts = np.full(batch, length), np.arange(0, batch * length, length)
    lengths.flags.writeable = starts.flags.writeable = False
    return lengths, starts


@final
@dataclass(frozen=True, slots=True)
class Sequences:
    """Entry b is `data[starts[b] : starts[b] + lengths[b]]`. Made by `dense` and `ragged`.

    Attributes:
        data: (sum of lengths, size).
        lengths: (B,) int64, each at least 1.
        starts: (B,) int64.
        length: of every entry, where they are equal by construction; else None.
    """

    data: Array
    lengths: Indices
    starts: Indices
    length: int | None

    @classmethod
    def dense(cls, tensor: Array) -> Self:
        """The entries of a (B, N, size) array; no copy if it is contiguous."""
        batch, length, size = tensor.shape
        lengths, starts = _even(batch, length)
        return cls(tensor.reshape(batch * length, size), lengths, starts, length)

    @classmethod
    def ragged(cls, data: Array, lengths: Indices) -> Self:
        """Entries of these lengths in a (sum of lengths, size) array."""
        return cls(data, lengths, np.cumsum(lengths) - lengths, None)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, N, size), N being the longest entry's length."""
        return len(self.lengths), int(self.lengths.max()), self.data.shape[1]

    def of(self, data: Array) -> Self:
        """The same entries of other data."""
        return type(self)(data, self.lengths, self.starts, self.length)

    def entry(self, index: int) -> Array:
        """(N, size), a view."""
        start = self.starts[index]
        return self.data[start : start + self.lengths[index]]

    def padded(self) -> Array:
        """(B, N, size), a view. Only where the entries have one length."""
        if self.length is None:
            raise ValueError("entries of unequal length are no array of three axes")
        return self.data.reshape(len(self.lengths), self.length, self.data.shape[1])

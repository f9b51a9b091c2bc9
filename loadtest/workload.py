"""What is sent: bodies made from a seed, or one that the user brings. Made before the clock starts."""

from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np

from loadtest import protocols
from loadtest.protocols import Body
from loadtest.shapes import Mix, Shape
from loadtest.tensors import Array, Composer, marked

UNKNOWN: Final = Shape(())
"""The shape of a body that the user brought."""


@final
@dataclass(frozen=True, slots=True)
class Made:
    """A written body and what it asks for."""

    body: Body
    shape: Shape


class Workload(Protocol):
    """Makes bodies; the same one for the same index, in every process."""

    def make(self, index: int) -> Made:
        """The body of that index."""


@final
@dataclass(frozen=True, slots=True)
class Composed:
    """Bodies of seeded tensors.

    Attributes:
        protocol: how they are written.
        composer: how tensors are made from shapes.
        mix: where shapes are drawn from, or the shapes themselves, in order (a trace).
        seed: of shapes and tensors.
    """

    protocol: protocols.Protocol
    composer: Composer
    mix: Mix | tuple[Shape, ...]
    seed: int

    def make(self, index: int) -> Made:
        """The body of that index, sent as it is or with another mark."""
        shape, tensors = self._compose(index)
        return Made(protocols.write(self.protocol, tensors), shape)

    def tensors(self, index: int) -> dict[str, Array]:
        """What the body of that index holds when it is sent the first time."""
        return marked(self._compose(index)[1], 0)

    def _compose(self, index: int) -> tuple[Shape, dict[str, Array]]:
        rng = np.random.default_rng([self.seed, index])
        (shape,) = self.mix.draw(rng, 1) if isinstance(self.mix, Mix) else (self.mix[index % len(self.mix)],)
        return shape, self.composer.compose(shape, rng)


@final
@dataclass(frozen=True, slots=True)
class Brought:
    """One body, sent again and again."""

    body: Body

    def make(self, index: int) -> Made:  # noqa: ARG002  # it is always the same
        """That body."""
        return Made(self.body, UNKNOWN)


def share(workload: Workload, first: int, step: int, count: int, most_bytes: int) -> list[Made]:
    """Bodies `first`, `first + step`, ... : `count` of them, or fewer if they would take more than `most_bytes`."""
    bodies: list[Made] = []
    taken = 0
    for place in range(count):
        bodies.append(workload.make(first + place * step))
        taken += len(bodies[-1].body.content)
        if taken >= most_bytes:
            break
    return bodies

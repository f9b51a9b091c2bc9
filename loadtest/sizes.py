"""Distributions of sizes, as they are written on the command line. Pure; randomness is an argument."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import LoadTestError

Integers = NDArray[np.int64]
FORMS: Final = "16, uniform:min=1,max=64, lognormal:mean=64,max=512[,min=1][,sigma=1], choice:16,64,128"


@final
@dataclass(frozen=True, slots=True)
class Sizes:
    """Whole numbers from 1 up, drawn from one distribution.

    Attributes:
        text: as it was written.
        sample: (generator, count) to that many numbers, not yet whole nor within bounds.
        low, high: the bounds.
    """

    text: str
    sample: Callable[[np.random.Generator, int], NDArray[Any]]
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Integers:
        """That many whole numbers within the bounds."""
        sizes: Integers = np.clip(np.rint(self.sample(rng, count)), self.low, self.high).astype(np.int64)
        return sizes

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return parse_sizes, (self.text,)


def parse_sizes(text: str) -> Sizes:
    """The distribution that a text names, one of `FORMS`.

    A log-normal one has that mean before it is cut off at its bounds, which the report tells the mean after.

    Raises:
        LoadTestError: it names none.
    """
    kind, _, arguments = text.partition(":")
    try:
        if kind.isdecimal() and not arguments:
            return _fixed(text, int(kind))
        if kind == "choice":
            return _choice(text, [int(one) for one in arguments.split(",")])
        given = dict(part.split("=") for part in arguments.split(","))
        return {"uniform": _uniform, "lognormal": _lognormal}[kind](text, given)
    except (ValueError, KeyError, TypeError) as error:
        raise LoadTestError(f"sizes: got {text!r}, want one of {FORMS}") from error


def _bounded(text: str, sample: Callable[[np.random.Generator, int], NDArray[Any]], low: int, high: int) -> Sizes:
    if not 1 <= low <= high:
        raise ValueError(text)
    return Sizes(text, sample, low, high)


def _fixed(text: str, size: int) -> Sizes:
    return _bounded(text, lambda _, count: np.full(count, size), size, size)


def _choice(text: str, sizes: Sequence[int]) -> Sizes:
    return _bounded(text, lambda rng, count: rng.choice(sizes, count), min(sizes), max(sizes))


def _uniform(text: str, given: Mapping[str, str]) -> Sizes:
    _check_names(given, {"min", "max"}, set())
    low, high = int(given["min"]), int(given["max"])
    return _bounded(text, lambda rng, count: rng.integers(low, high, count, endpoint=True), low, high)


def _lognormal(text: str, given: Mapping[str, str]) -> Sizes:
    _check_names(given, {"mean", "max"}, {"min", "sigma"})
    mean, sigma = float(given["mean"]), float(given.get("sigma", "1"))
    if not (mean > 0 and sigma > 0 and math.isfinite(mean * sigma)):
        raise ValueError(text)
    centre = math.log(mean) - sigma**2 / 2
    return _bounded(
        text, lambda rng, count: rng.lognormal(centre, sigma, count), int(given.get("min", "1")), int(given["max"])
    )


def _check_names(given: Mapping[str, str], wanted: set[str], optional: set[str]) -> None:
    if not wanted <= set(given) <= wanted | optional:
        raise ValueError(str(given))

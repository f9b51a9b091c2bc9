"""When requests are due. Pure: a seed and a rate give the same schedule everywhere, so that processes can share one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import LoadTestError
from loadtest.shapes import Shape

Seconds = NDArray[np.float64]
Process = Literal["poisson", "constant"]
PROCESSES: Final[tuple[Process, ...]] = ("poisson", "constant")


def schedule(rate: float, seconds: float, process: Process, seed: int) -> Seconds:
    """Offsets from the start at which requests are due, ascending, all below `seconds`.

    Args:
        rate: requests a second.
        seconds: that the schedule lasts.
        process: "poisson" draws exponential gaps, as independent clients make them; "constant" spaces them evenly.
        seed: of the gaps.
    """
    if process == "constant":
        return np.arange(math.ceil(rate * seconds)) / rate
    rng = np.random.default_rng(seed)
    # Six deviations more than are expected, so that they all but never end early; if they do, more are drawn.
    count = math.ceil(rate * seconds + 6 * math.sqrt(rate * seconds) + 10)
    gaps = rng.exponential(1 / rate, count)
    while gaps.sum() < seconds:
        gaps = np.concatenate([gaps, rng.exponential(1 / rate, count)])
    due = np.cumsum(gaps)
    return due[due < seconds]


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded traffic: when each request was due, and what it asked for.

    Attributes:
        due_s: offsets from the start, ascending.
        shapes: one a request.
    """

    due_s: Seconds
    shapes: tuple[Shape, ...]


def read_trace(path: Path) -> Trace:
    """A trace from a file: a line a request, of `offset_s` and `BxQ` (self-attention), `BxQxK` or `BxQxKxVALID`.

    Lines in any order; empty ones and what follows a # do not count.

    Raises:
        LoadTestError: it cannot be read, or a line is none of these.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"trace: {path}: {error}") from error
    requests = sorted(_requests(path, lines), key=lambda request: request[0])
    if not requests:
        raise LoadTestError(f"trace: {path} has no request; want lines like '0.25 1x16x64'")
    return Trace(np.array([due for due, _ in requests]), tuple(shape for _, shape in requests))


def _requests(path: Path, lines: list[str]) -> Iterator[tuple[float, Shape]]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            offset, sizes = words
            yield _offset(offset), _shape([int(size) for size in sizes.split("x")])
        except ValueError as error:
            raise LoadTestError(
                f"trace: {path}, line {number}: got {line!r}, want offset_s and BxQ, BxQxK or BxQxKxVALID"
            ) from error


def _offset(text: str) -> float:
    offset = float(text)
    if not 0 <= offset < math.inf:
        raise ValueError(text)
    return offset


def _shape(sizes: list[int]) -> Shape:
    if not 2 <= len(sizes) <= 4 or min(sizes) < 1 or (len(sizes) == 4 and sizes[3] > sizes[2]):
        raise ValueError(sizes)
    rows = sizes[0]
    parts: list[Any] = [(size,) * rows for size in sizes[1:]]
    return Shape(*parts)

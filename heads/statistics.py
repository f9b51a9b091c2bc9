"""What many entries say together: means with their intervals, and how far two orders agree. numpy only, pure."""

from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RESAMPLES: Final = 2000
_TAIL: Final = 0.025


@final
@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over entries with its 95 % interval, from resampling them (Efron's percentile bootstrap)."""

    mean: float
    low: float
    high: float


def means(samples: Any, seed: int) -> list[Mean]:
    """The mean of each column of (entries, columns).

    With one entry the interval has no width: nothing is known of others.
    """
    values = np.asarray(samples, np.float64)
    count = len(values)
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), _RESAMPLES) / count
    low, high = np.quantile(drawn @ values, [_TAIL, 1 - _TAIL], axis=0)
    return [Mean(*map(float, one)) for one in zip(values.mean(axis=0), low, high, strict=True)]


def agreement(first: Any, second: Any) -> float:
    """Kendall's tau-b of two scores of the same heads: 1 for the same order, -1 for the opposite, 0 for no relation."""
    one, other = (np.asarray(scores, np.float64) for scores in (first, second))
    above = np.triu_indices(len(one), 1)
    signs = [np.sign(np.subtract.outer(scores, scores))[above] for scores in (one, other)]
    untied = np.sqrt(np.prod([np.count_nonzero(sign) for sign in signs], dtype=np.float64))
    return float(np.dot(*signs) / untied) if untied else 0.0

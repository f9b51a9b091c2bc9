"""Whether one test was worse than another, with the doubt that is left. Pure.

Windows of a level are what is compared: their spread says how far the same thing differs from itself. The interval is a
bootstrap of the ratio of their means (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

Verdict = Literal["worse", "better", "no difference shown", "too few windows"]
_FIGURES: Final = {"answers_a_second": "answers/s", "p50_ms": "p50", "p99_ms": "p99"}
_HIGHER_IS_BETTER: Final = ("answers_a_second",)
_RESAMPLES: Final = 4000
_LEAST_WINDOWS: Final = 5
# Of a run, which make two of them different questions.
_ASKED: Final = ("workload", "protocol", "model", "machine", "processes")


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of one level in both tests.

    Attributes:
        load: of the level.
        figure: which one.
        old, new: means over windows.
        ratio: new by old.
        low, high: 95 % of the doubt about the ratio.
        verdict: what that says.
    """

    load: str
    figure: str
    old: float
    new: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


def differences(old: Mapping[str, Any], new: Mapping[str, Any], threshold: float) -> list[Difference]:
    """Every figure of every load that both tests have.

    Args:
        old: a report.
        new: a later one.
        threshold: 0.03 means that three percent do not matter, however certain they are.
    """
    before = {level["load"]: level for level in old["levels"]}
    return [
        difference
        for level in new["levels"]
        if level["load"] in before
        for difference in _of_level(before[level["load"]], level, threshold)
    ]


def unlike(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what the tests differ beside their figures, in words."""
    return [
        f"{path}: {was!r} before, {now!r} now"
        for name in _ASKED
        for path, was, now in _unequal(name, old.get(name), new.get(name))
    ]


def _of_level(old: Mapping[str, Any], new: Mapping[str, Any], threshold: float) -> Iterator[Difference]:
    rng = np.random.default_rng(0)
    for figure, name in _FIGURES.items():
        before, after = (_values(level, figure) for level in (old, new))
        if min(len(before), len(after)) < _LEAST_WINDOWS:
            yield Difference(new["load"], name, np.nan, np.nan, np.nan, np.nan, np.nan, "too few windows")
            continue
        ratio = float(after.mean() / before.mean())
        low, high = (float(one) for one in np.quantile(_resampled(before, after, rng), [0.025, 0.975]))
        verdict = _verdict((low, ratio, high), threshold, higher_is_better=figure in _HIGHER_IS_BETTER)
        yield Difference(new["load"], name, float(before.mean()), float(after.mean()), ratio, low, high, verdict)


def _values(level: Mapping[str, Any], figure: str) -> NDArray[np.float64]:
    return np.array([window[figure] for window in level["windows"] if window["due"] and window["answers_a_second"]])


def _resampled(old: NDArray[np.float64], new: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    means = [rng.choice(values, (_RESAMPLES, len(values))).mean(axis=1) for values in (old, new)]
    ratios: NDArray[np.float64] = means[1] / means[0]
    return ratios


def _verdict(interval: tuple[float, float, float], threshold: float, *, higher_is_better: bool) -> Verdict:
    low, ratio, high = interval
    if low <= 1 <= high or abs(ratio - 1) <= threshold:
        return "no difference shown"
    return "better" if (ratio > 1) == higher_is_better else "worse"


def _unequal(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from _unequal(f"{path}.{name}", old.get(name), new.get(name))
    elif old != new:
        yield path, old, new

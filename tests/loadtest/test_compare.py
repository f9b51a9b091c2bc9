"""Comparison of two reports: differences are told from chance, and from those that do not matter."""

from typing import Any

import numpy as np
import pytest

from loadtest.compare import differences, unlike


def report(
    scale: float, *, spread: float = 0.02, seed: int = 0, windows: int = 8, load: str = "4 in flight"
) -> dict[str, Any]:
    """A level whose latencies are 10 ms times `scale`, and whose windows differ by `spread`."""
    noise = np.random.default_rng(seed).normal(1, spread, (windows, 3))
    rows = [
        {"answers_a_second": 100 / scale * a, "p50_ms": 10 * scale * b, "p99_ms": 20 * scale * c, "due": 50}
        for a, b, c in noise
    ]
    return {"levels": [{"load": load, "windows": rows}]}


def verdicts(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Of throughput, median, p99."""
    return [difference.verdict for difference in differences(old, new, 0.03)]


def test_a_tenth_slower_is_worse() -> None:
    """In throughput and in latency; the other way round it is better."""
    assert verdicts(report(1, seed=1), report(1.1, seed=2)) == ["worse"] * 3
    assert verdicts(report(1.1, seed=1), report(1, seed=2)) == ["better"] * 3


def test_the_same_is_no_difference() -> None:
    """For twenty pairs that differ by chance alone, nearly none is told of; with the threshold, none."""
    found = [one for seed in range(20) for one in verdicts(report(1, seed=seed), report(1, seed=100 + seed))]
    assert set(found) == {"no difference shown"}


def test_what_is_certain_and_small_does_not_matter() -> None:
    """Two percent, without any doubt, below the threshold."""
    assert set(verdicts(report(1, spread=1e-4), report(1.02, spread=1e-4, seed=3))) == {"no difference shown"}


def test_what_is_large_and_uncertain_is_not_shown() -> None:
    """A tenth, where windows differ by half."""
    assert "worse" not in verdicts(report(1, spread=0.5, seed=1), report(1.1, spread=0.5, seed=2))


def test_interval_holds_the_ratio() -> None:
    """And is about as wide as the spread says: some two and a half standard errors of a ratio on each side."""
    (throughput, *_) = differences(report(1, seed=4), report(1.1, seed=5), 0.03)
    assert throughput.low < throughput.ratio < throughput.high
    assert throughput.high - throughput.low == pytest.approx(4 * 0.02 * 2**0.5 / 8**0.5 / 1.1, rel=0.6)


def test_few_windows_are_not_judged() -> None:
    """Four say too little of their own spread."""
    assert set(verdicts(report(1, windows=4), report(2, windows=8))) == {"too few windows"}


def test_only_loads_of_both() -> None:
    """What one test did not do is not compared."""
    assert differences(report(1), report(1, load="8 in flight"), 0.03) == []


def test_tells_in_what_the_tests_differ() -> None:
    """So that nobody takes another workload for another speed."""
    old = {"workload": {"batch": "1", "queries": "16"}, "machine": {"cores": 2}}
    new = {"workload": {"batch": "1", "queries": "32"}, "machine": {"cores": 2}}
    assert unlike(old, new) == ["workload.queries: '16' before, '32' now"]

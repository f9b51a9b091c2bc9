"""Counters and histograms for the hot path: plain numbers, made into Prometheus' families when they are read.

`prometheus_client`'s own take a lock and several calls for each number, twenty of which are a tenth of a small request.
These are written by one thread at a time, which the caller sees to.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str, ...]


@final
class Counters(Collector):
    """One counter for each combination of labels.

    Args:
        name: without `_total`.
        documentation: what is counted.
        label_names: of every combination.
        present: combinations that are there from the start, at 0.
    """

    def __init__(self, name: str, documentation: str, label_names: Sequence[str], present: Iterable[Labels]) -> None:
        self._name = name
        self._documentation = documentation
        self._label_names = label_names
        self._values: dict[Labels, float] = dict.fromkeys(present, 0.0)

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        """So much more."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def collect(self) -> Iterable[Metric]:
        """The family as it is now."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        yield family


@final
class Histograms(Collector):
    """One histogram for each combination of labels; `bounds` are the upper ones of its buckets, ascending."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: Sequence[str],
        bounds: Sequence[float],
        present: Iterable[Labels],
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label_names = label_names
        self._bounds = bounds
        self._names = [*(f"{float(bound)}" for bound in bounds), "+Inf"]
        self._counts: dict[Labels, list[int]] = {labels: [0] * len(self._names) for labels in present}
        self._sums: dict[Labels, float] = dict.fromkeys(self._counts, 0.0)

    def observe(self, labels: Labels, value: float) -> None:
        """One more value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterable[Metric]:
        """The family as it is now."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        for labels, counts in self._counts.items():
            buckets = list(zip(self._names, itertools.accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family

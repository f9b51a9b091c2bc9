"""What a server says of itself over the same time: two looks at /metrics, and what lies between them."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from prometheus_client.parser import text_string_to_metric_families

from loadtest.errors import LoadTestError
from loadtest.target import Target
from loadtest.web import get

Labels = frozenset[tuple[str, str]]
STAGES: Final = ("decode", "queue", "compute", "encode")


@final
@dataclass(frozen=True, slots=True)
class Exposition:
    """Samples of /metrics at one time (monotonic seconds)."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of the samples of that name with these labels; None if there is none."""
        wanted = set(labels.items())
        found = [value for (sample, has), value in self.samples.items() if sample == name and wanted <= has]
        return sum(found) if found else None


def look(server: Target) -> Exposition | None:
    """What /metrics says now; None where there is no such thing."""
    try:
        content = get(server.at("/metrics"), timeout_s=2.0)
        if content is None:
            return None
        families = list(text_string_to_metric_families(content.decode()))
    except (LoadTestError, ValueError):
        return None
    samples = {
        (sample.name, frozenset(sample.labels.items())): float(sample.value)
        for family in families
        for sample in family.samples
    }
    return Exposition(time.monotonic(), samples)


def between(before: Exposition | None, after: Exposition | None) -> dict[str, Any] | None:
    """What the server did from one look to the other; None if it does not say.

    Milliseconds of each stage and of a whole request, mean; requests by code; rows an engine call; the part of what was
    computed that was padding; cores that were busy; memory in bytes at the end. What it does not tell is None.
    """
    if before is None or after is None or after.total("mha_stage_seconds_count") is None:
        return None
    window = _Window(before, after)
    cpu_s = window.grown("process_cpu_seconds_total")
    return {
        "seconds": after.at_s - before.at_s,
        "request_ms": window.inference_ms(),
        "stages_ms": {stage: window.mean_ms("mha_stage_seconds", stage=stage) for stage in STAGES},
        "requests": window.codes(),
        "rows_a_call": window.ratio("mha_call_rows_sum", "mha_call_rows_count"),
        "padding": {kind: window.padding(f"mha_{kind}_total") for kind in ("queries", "keys")},
        "busy_cores": None if cpu_s is None else cpu_s / (after.at_s - before.at_s),
        "memory_bytes": after.total("process_resident_memory_bytes"),
    }


@final
@dataclass(frozen=True, slots=True)
class _Window:
    before: Exposition
    after: Exposition

    def grown(self, name: str, **labels: str) -> float | None:
        after = self.after.total(name, **labels)
        return None if after is None else after - (self.before.total(name, **labels) or 0.0)

    def ratio(self, over: str, under: str, **labels: str) -> float | None:
        above, below = self.grown(over, **labels), self.grown(under, **labels)
        return above / below if above is not None and below else None

    def mean_ms(self, family: str, **labels: str) -> float | None:
        mean_s = self.ratio(f"{family}_sum", f"{family}_count", **labels)
        return None if mean_s is None else 1000 * mean_s

    def padding(self, name: str) -> float | None:
        valid, computed = self.grown(name, kind="valid"), self.grown(name, kind="computed")
        return 1 - valid / computed if valid is not None and computed else None

    def codes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for sample, labels in self.after.samples:
            given = dict(labels)
            if sample == "mha_requests_total" and _is_inference(given.get("route", "")):
                grown = self.grown(sample, **given) or 0.0
                if grown:
                    counts[given["code"]] = counts.get(given["code"], 0) + int(grown)
        return counts

    def inference_ms(self) -> float | None:
        family = "mha_request_seconds"
        routes = {dict(labels)["route"] for sample, labels in self.after.samples if sample == f"{family}_count"}
        wanted = [route for route in routes if _is_inference(route)]
        seconds = sum(self.grown(f"{family}_sum", route=route) or 0.0 for route in wanted)
        count = sum(self.grown(f"{family}_count", route=route) or 0.0 for route in wanted)
        return 1000 * seconds / count if count else None


def _is_inference(route: str) -> bool:
    return route == "/v1/attention" or route.endswith("/infer")

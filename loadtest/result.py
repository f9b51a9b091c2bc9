"""A level in figures, as it stands in the JSON report. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loadtest import judge
from loadtest.driver import Usage
from loadtest.durations import Durations
from loadtest.level import Level
from loadtest.reference import References
from loadtest.slo import Slo
from loadtest.tally import Tally

QUANTILES: Final[Mapping[str, float]] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
_KINDS: Final = ("kind", "concurrency", "rate", "process", "samples")


def level_result(
    level: Level,
    tally: Tally,
    usages: Sequence[Usage],
    *,
    server: Mapping[str, Any] | None,
    references: References | None,
    slo: Slo | None,
) -> dict[str, Any]:
    """Everything that is known of one level.

    Durations are in milliseconds; a percentile that too few requests lie beyond is None.
    """
    outcomes = tally.outcomes
    return {
        "load": level.key,
        "level": {name: getattr(level, name) for name in _KINDS},
        "warmup_s": level.warmup_s,
        "seconds": tally.seconds,
        "requests": {"sent": tally.ended, **outcomes},
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
        "per_second": tally.per_second(),
        "goodput": _goodput(tally, slo),
        "latency_ms": durations(tally.latency),
        "service_ms": durations(tally.service),
        "lag_ms": durations(tally.lag),
        "histogram": tally.latency.encoded(),
        "curve": _curve(tally.latency),
        "windows": _windows(tally),
        "steady": judge.is_steady(tally),
        "generator": {
            "processes": len(usages),
            "busy": max(usage.cpu_s / max(usage.wall_s, 1e-9) for usage in usages),
            "waited_for_a_core": max(usage.waited_s / max(usage.wall_s, 1e-9) for usage in usages),
            "connections": sum(usage.most_open for usage in usages),
            "waited_for_a_connection": sum(usage.had_to_wait for usage in usages),
        },
        "server": None if server is None else {**server, "gap_ms": _gap(tally, server)},
        "compared": None if references is None else _compared(references),
        "faults": judge.faults(level, tally, usages),
        "remarks": judge.remarks(level, tally, usages),
        "slo_missed": None if slo is None else slo.missed(tally.counts),
        "slo_clear": None if slo is None else slo.is_clear([window.counts for window in tally.windows]),
    }


def durations(values: Durations) -> dict[str, float | None]:
    """Count, mean, percentiles and the largest, in milliseconds."""
    quantiles = {name: values.quantile_s(quantile) for name, quantile in QUANTILES.items()}
    seconds = {"mean": values.mean_s(), **quantiles, "max": values.max_s()}
    return {"count": values.count, **{name: None if one is None else 1000 * one for name, one in seconds.items()}}


def _goodput(tally: Tally, slo: Slo | None) -> float | None:
    # Answers a second within the strictest bound.
    return None if slo is None else tally.counts.within[slo.strictest] / max(tally.seconds, 1e-9)


def _gap(tally: Tally, server: Mapping[str, Any]) -> float | None:
    # What a request takes beyond what the server knows of: network, the client's own work, waiting for a core.
    mean_s, request_ms = tally.service.mean_s(), server["request_ms"]
    return None if mean_s is None or request_ms is None else 1000 * mean_s - request_ms


def _compared(references: References) -> dict[str, Any]:
    return {
        "with": references.kind,
        "answers": references.compared,
        "wrong": len(references.wrong),
        "examples": references.wrong[:5],
        "max_error": references.max_error,
        "tolerance": references.tolerance,
    }


def _curve(values: Durations) -> dict[str, list[float]]:
    # A few hundred points are enough for a chart; the histogram has all.
    quantiles, values_s = values.curve() if values.count else ([], [])
    step = max(1, len(quantiles) // 400)
    places = sorted({*range(0, len(quantiles), step), len(quantiles) - 1}) if quantiles else []
    return {"quantile": [quantiles[place] for place in places], "ms": [1000 * values_s[place] for place in places]}


def _windows(tally: Tally) -> list[dict[str, Any]]:
    # A level that ends when all are answered is one window, as long as it took.
    seconds = tally.window_s if len(tally.windows) > 1 else max(tally.seconds, 1e-9)
    return [
        {
            "begins_s": window.begins_s,
            "answers_a_second": window.answered / seconds,
            "due": window.latency.count,
            "p50_ms": 1000 * window.latency.estimate_s(0.5),
            "p99_ms": 1000 * window.latency.estimate_s(0.99),
        }
        for window in tally.windows
    ]

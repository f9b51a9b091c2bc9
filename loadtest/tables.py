"""A report as tables of words, for the terminal and for the page. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from loadtest.charts import parts_ms
from loadtest.result import QUANTILES

_MISSING: Final = "-"


@final
@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows; the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def level_table(levels: Sequence[Mapping[str, Any]]) -> Table:
    """What clients saw: throughput, latency from when requests were due, and what was not answered."""
    columns = ("load", "answers/s", "tokens/s", "MB/s", *QUANTILES, "max", "service p50", "not answered")
    return Table(columns, tuple(map(_level_row, levels)))


def stage_table(levels: Sequence[Mapping[str, Any]]) -> Table | None:
    """Where the time went by what the server says; None if it says nothing."""
    rows = tuple(_stage_row(level) for level in levels if level["server"])
    columns = (
        "load", "client", "server", "decode", "queue", "compute", "encode", "other work", "gap", "rows/call",
        "padding q/k", "server cores", "server memory", "sender busy", "lag p99",
    )  # fmt: skip
    return Table(columns, rows) if rows else None


def notes(levels: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What to know of the figures: `INVALID` where they are the generator's, else `note`; and the words."""
    return [
        (kind, f"{level['load']}: {text}")
        for level in levels
        for kind, texts in (
            ("INVALID", level["faults"]),
            ("note", [f"{status} came with: {text}" for status, text in level["said"].items()]),
            ("note", level["remarks"]),
        )
        for text in texts
    ]


def milliseconds(value: float | None) -> str:
    """Three digits, with the unit."""
    if value is None:
        return _MISSING
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{_digits(value)} ms"


def _level_row(level: Mapping[str, Any]) -> tuple[str, ...]:
    per_second, latency = level["per_second"], level["latency_ms"]
    tokens = _digits(per_second["tokens"]) if per_second["tokens"] else _MISSING
    megabytes = (per_second["sent_bytes"] + per_second["received_bytes"]) / 1e6
    times = [milliseconds(latency[name]) for name in (*QUANTILES, "max")]
    return (
        level["load"], _digits(per_second["requests"]), tokens, _digits(megabytes), *times,
        milliseconds(level["service_ms"]["p50"]), _not_answered(level["requests"]),
    )  # fmt: skip


def _stage_row(level: Mapping[str, Any]) -> tuple[str, ...]:
    server, generator = level["server"], level["generator"]
    parts = [milliseconds(value) for value in parts_ms(level).values()]
    padding = "/".join(_percent(server["padding"][kind]) for kind in ("queries", "keys"))
    memory = server["memory_bytes"]
    return (
        level["load"], milliseconds(level["service_ms"]["mean"]), milliseconds(server["request_ms"]), *parts,
        _number(server["rows_a_call"]), padding, _number(server["busy_cores"]),
        _MISSING if memory is None else f"{memory / 2**20:.0f} MiB", _percent(generator["busy"]),
        milliseconds(level["lag_ms"]["p99"]),
    )  # fmt: skip


def _not_answered(requests: Mapping[str, int]) -> str:
    missed = {name: requests[name] for name in ("refused", "timed_out", "failed", "broken") if requests[name]}
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in missed.items()) or "0"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.0%}"

"""The charts of the HTML report, as plotly.js takes them. Pure: a report in, data and layouts out."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from loadtest.exposition import STAGES

Chart = dict[str, Any]
_PERCENTILES: Final = {"p50": "#3778c2", "p90": "#e08e0b", "p99": "#c2373f"}
_TAILS: Final = {"0 %": 1, "50 %": 2, "90 %": 10, "99 %": 100, "99.9 %": 1000, "99.99 %": 10_000}
_MOST_NINES: Final = 100_000.0
# Of one colour scale that stays apart for the colour-blind (Okabe and Ito, 2008).
_PARTS: Final = {
    "decode": "#56b4e9", "queue": "#d55e00", "compute": "#009e73", "encode": "#cc79a7", "other work": "#999999",
    "gap": "#f0e442",
}  # fmt: skip


def charts(report: Mapping[str, Any]) -> dict[str, Chart]:
    """Each chart by its name: `throughput`, `distribution`, `timeline`, and `stages` where the server tells."""
    levels = report["levels"]
    drawn = {"throughput": _throughput(levels), "distribution": _distribution(levels), "timeline": _timeline(levels)}
    return {**drawn, **({"stages": _stages(levels)} if any(_tells(level) for level in levels) else {})}


def _throughput(levels: Sequence[Mapping[str, Any]]) -> Chart:
    x = [level["per_second"]["requests"] for level in levels]
    data = [
        {
            "type": "scatter", "mode": "lines+markers", "name": name, "x": x,
            "y": [level["latency_ms"][name] for level in levels], "text": [level["load"] for level in levels],
            "hovertemplate": "%{text}<br>%{x:.4g} answers/s<br>%{y:.4g} ms", "line": {"color": colour},
        }
        for name, colour in _PERCENTILES.items()
    ]  # fmt: skip
    return {"data": data, "layout": _layout("Latency by throughput", "answers a second", "ms", log_y=True)}


def _distribution(levels: Sequence[Mapping[str, Any]]) -> Chart:
    data = [
        {
            "type": "scatter", "mode": "lines", "name": level["load"], "line": {"shape": "hv"},
            "x": [min(1 / max(1 - quantile, 1e-9), _MOST_NINES) for quantile in level["curve"]["quantile"]],
            "y": level["curve"]["ms"], "text": [f"{100 * one:.5g} %" for one in level["curve"]["quantile"]],
            "hovertemplate": "%{text} within %{y:.4g} ms",
        }
        for level in levels
    ]  # fmt: skip
    layout = _layout("How latency is distributed", "of the answers", "ms", log_y=True)
    layout["xaxis"] |= {"type": "log", "tickvals": list(_TAILS.values()), "ticktext": list(_TAILS)}
    return {"data": data, "layout": layout}


def _timeline(levels: Sequence[Mapping[str, Any]]) -> Chart:
    times, windows, begins_s = [], [], 0.0
    for level in levels:
        times += [begins_s + window["begins_s"] for window in level["windows"]]
        windows += [(level["load"], window) for window in level["windows"]]
        begins_s += level["seconds"]
    loads = [load for load, _ in windows]

    def line(name: str, figure: str, **more: Any) -> Chart:
        values = [window[figure] for _, window in windows]
        return {"type": "scatter", "mode": "lines", "name": name, "x": times, "y": values, "text": loads, **more}

    answers = line("answers/s", "answers_a_second", yaxis="y2", line={"color": "#999999", "shape": "hv"})
    data = [line(name, f"{name}_ms", line={"color": _PERCENTILES[name], "shape": "hv"}) for name in ("p50", "p99")]
    layout = _layout("One level after the other", "seconds that counted", "ms", log_y=True)
    layout["yaxis2"] = {
        "title": {"text": "answers a second"},
        "overlaying": "y",
        "side": "right",
        "rangemode": "tozero",
    }
    return {"data": [*data, answers], "layout": layout}


def _stages(levels: Sequence[Mapping[str, Any]]) -> Chart:
    told = [level for level in levels if _tells(level)]
    parts = [parts_ms(level) for level in told]
    data = [
        {
            "type": "bar", "name": part, "x": [level["load"] for level in told], "y": [one[part] for one in parts],
            "marker": {"color": colour}, "hovertemplate": f"{part}: %{{y:.4g}} ms",
        }
        for part, colour in _PARTS.items()
    ]  # fmt: skip
    layout = _layout("Where the time went, mean", "", "ms")
    return {"data": data, "layout": {**layout, "barmode": "stack"}}


def parts_ms(level: Mapping[str, Any]) -> dict[str, float]:
    """Mean milliseconds of a request by where they went, 0 where nothing is known: the server's stages, its other work,
    and the gap that the client saw beyond."""  # noqa: D205, D209  # one sentence
    server = level["server"]
    stages = {stage: server["stages_ms"][stage] or 0.0 for stage in STAGES}
    other = max(0.0, (server["request_ms"] or 0.0) - sum(stages.values()))
    return {**stages, "other work": other, "gap": max(0.0, server["gap_ms"] or 0.0)}


def _tells(level: Mapping[str, Any]) -> bool:
    return bool(level["server"]) and level["server"]["request_ms"] is not None


def _layout(title: str, x: str, y: str, *, log_y: bool = False) -> Chart:
    return {
        "title": {"text": title},
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}, **({"type": "log"} if log_y else {"rangemode": "tozero"})},
        "legend": {"orientation": "h", "y": -0.25},
        "margin": {"t": 48, "r": 56},
        "hovermode": "closest",
    }

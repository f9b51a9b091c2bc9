"""The report as one HTML file that needs nothing else: charts drawn by plotly.js, which comes along."""

import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any, Final

import orjson
from plotly.offline import get_plotlyjs

from loadtest.charts import charts
from loadtest.tables import Table, level_table, notes, stage_table

_TEMPLATE: Final = Path(__file__).with_name("page.html")
_SETTINGS: Final = ("created", "target", "options", "bodies", "machine", "model")


def page(report: Mapping[str, Any]) -> str:
    """The HTML of a report. Its numbers are in it as JSON, too: the script element `report`."""
    drawn = charts(report)
    stages = stage_table(report["levels"])
    verdict = report["verdict"]
    return Template(_TEMPLATE.read_text()).substitute(
        title=html.escape(f"Load test of {report['target']}"),
        outcome="passed" if verdict["exit_status"] == 0 else "failed",
        verdict=html.escape("; ".join(verdict["reasons"]) or "Nothing to object to."),
        command=html.escape(report["command"]),
        levels=_table(level_table(report["levels"])),
        divs="".join(f'<div class="chart" id="{name}"></div>' for name in drawn),
        stages=_table(stages) if stages else "<p>The server does not tell.</p>",
        notes=_notes(report),
        settings=_table(_settings(report)),
        report=_json(report),
        charts=_json(drawn),
        plotly=get_plotlyjs(),
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cells(row: Iterable[str]) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in row)


def _notes(report: Mapping[str, Any]) -> str:
    found = [html.escape(f"{kind}, {text}") for kind, text in notes(report["levels"])]
    return "<ul>" + "".join(f"<li>{one}</li>" for one in found) + "</ul>" if found else "<p>None.</p>"


def _settings(report: Mapping[str, Any]) -> Table:
    rows = tuple(
        (name, value if isinstance(value, str) else orjson.dumps(value).decode())
        for name, value in _flat("", {name: report[name] for name in _SETTINGS})
        if value is not None
    )
    return Table(("", ""), rows)


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [one for name, part in value.items() for one in _flat(f"{prefix}.{name}".lstrip("."), part)]


def _json(value: Any) -> str:
    # Nothing in it may end the script element that it stands in.
    return orjson.dumps(value).decode().replace("<", "\\u003c")

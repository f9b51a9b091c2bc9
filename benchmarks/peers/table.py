"""`python -m benchmarks.peers.table`: README's table of what a results file holds, losses as well as wins."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import orjson

from benchmarks.peers.contestants import CONTESTANTS, LIMIT, OURS, ROOT
from benchmarks.peers.figures import Spread, overhead_ms, p50_ms, ratios, rows_per_s
from benchmarks.peers.results import RESULTS
from benchmarks.peers.workloads import WORKLOADS

README: Final = ROOT / "README.md"
START: Final = "<!-- bench:start -->"
END: Final = "<!-- bench:end -->"
_TITLES: Final = {one.name: one.title for one in WORKLOADS}
_FORMS: Final = {"packed": "ours packed", "safetensors": "ours padded too"}
_PACKAGES: Final = ("onnxruntime", "fastapi", "mosec", "litserve", "mlserver", "ray", "bentoml")

Results = Mapping[str, Any]
Lane = Mapping[str, Any]


def render(results: Results) -> str:
    """The table, what its cells mean, and what it was measured with."""
    others = [LIMIT, *(one.name for one in CONTESTANTS if one.name != OURS)]
    notes: list[str] = []
    rows = [
        row for workload in results["workloads"] for row in _rows(workload, others, results["unavailable"], notes)
    ]  # fmt: skip
    head = ["", OURS, *others]
    lines = [_line(head), _line(["---"] * len(head)), *(_line(row) for row in rows)]
    return "\n".join([*_warning(results), *lines, "", *_legend(results), *(["", *notes] if notes else [])]) + "\n"


def replaced(text: str, table: str) -> str:
    """The text with the table between its markers.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end or START in after or END in before + after:
        raise ValueError(f"want {START} and {END}, once each")
    return f"{before}{start}\n{table}{end}{after}"


def _rows(
    workload: Mapping[str, Any], others: Sequence[str], missing: Mapping[str, str], notes: list[str]
) -> list[list[str]]:
    """A row for each form that the service was asked in."""
    lanes: list[Lane] = workload["lanes"]
    ours = [lane for lane in lanes if lane["name"] == OURS]
    reasons = {**missing, **{lane["name"]: lane["unavailable"] for lane in lanes if lane["unavailable"]}}
    rows = []
    for lane in ours:
        title = _TITLES[workload["name"]] + (f": {_FORMS[lane['form']]}" if len(ours) > 1 else "")
        if lane["unavailable"]:
            rows.append([title, _note(f"{OURS}: {lane['unavailable']}", notes), *("" for _ in others)])
            continue
        cells = [_cell(workload, lane, name, reasons, notes) for name in others]
        rows.append([title, _absolute(workload, lane), *cells])
    return rows


def _absolute(workload: Mapping[str, Any], lane: Lane) -> str:
    if workload["measure"] == "overhead":
        return _added(lane, _lane(workload, LIMIT))
    if workload["measure"] == "latency":
        return f"{Spread.of([p50_ms(one) for one in lane['rounds']]).median:.2f} ms"
    rate = Spread.of([rows_per_s(one, workload["rows"]) for one in lane["rounds"]]).median
    return f"{rate:,.0f} {'rows' if workload['rows'] > 1 else ''}/s".replace(" /", "/")


def _cell(workload: Mapping[str, Any], ours: Lane, name: str, reasons: Mapping[str, str], notes: list[str]) -> str:
    """How many times as fast ours is, in bold where a peer is faster; for overheads, the peer's own."""
    lane = _lane(workload, name)
    if lane is None or lane["unavailable"]:
        reason = reasons.get(name)
        return _note(f"{name}: {reason}", notes) if reason else "-"
    if workload["measure"] == "overhead":
        if name == LIMIT:
            return f"{Spread.of([p50_ms(one) for one in lane['rounds']]).median:.2f} ms"
        added = _added(lane, _lane(workload, LIMIT))
        faster = statistics.median(map(p50_ms, lane["rounds"])) < statistics.median(map(p50_ms, ours["rounds"]))
        return f"**{added}**" if faster else added
    spread = ratios(ours["rounds"], lane["rounds"], workload["measure"], workload["rows"])
    median = f"{spread.median:.2f}"
    shown = f"**{median}**" if spread.median < 1 and name != LIMIT else median
    return f"{shown} ({spread.least:.2f} to {spread.most:.2f})"


def _added(lane: Lane, limit: Lane | None) -> str:
    if limit is None:
        return "-"
    spread = overhead_ms(lane["rounds"], limit["rounds"])
    return f"{spread.median:+.2f} ms ({spread.least:+.2f} to {spread.most:+.2f})"


def _lane(workload: Mapping[str, Any], name: str) -> Lane | None:
    return next((lane for lane in workload["lanes"] if lane["name"] == name), None)


def _note(text: str, notes: list[str]) -> str:
    """A mark of a footnote, the same for the same text."""
    known = [note.partition(" ")[2].removesuffix("<br>") for note in notes]
    if text not in known:
        known.append(text)
        notes.append(f"<sup>{len(known)}</sup> {text}<br>")
    return f"-<sup>{known.index(text) + 1}</sup>"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _warning(results: Results) -> list[str]:
    return ["**A partial run, to see the benchmark work: not to be quoted.**", ""] if results["partial"] else []


def _legend(results: Results) -> list[str]:
    machine = results["machine"]
    changed = " with changes" if results["modified"] else ""
    pins = {name: version for packages in results["packages"].values() for name, version in packages.items()}
    versions = ", ".join(f"{name} {pins[name]}" for name in _PACKAGES if name in pins)
    meaning = (
        f"How many times as fast as each of them {OURS} is: the median of {results['rounds']} rounds of"
        f" {results['seconds']:g} s (least to most). In bold, the other is faster; *{LIMIT}* is the limit, the same"
        " graph called in a loop. In the last row, what each adds to the median latency of such a call."
    )
    circumstances = (
        f"{machine['cpu']}{_instructions(machine)}, {machine['cores']} cores, {machine['memory_gib']} GiB,"
        f" Python {machine['python']}, {versions}; {results['date'][:10]}, commit {results['commit'][:12]}{changed}."
    )
    lines = [meaning, "", circumstances]
    again = [one for one in results["workloads"] if "again" in one]
    if again:
        each = "; ".join(
            f"{_TITLES[one['name']]}: {one['again']['date'][:10]}, commit {one['again']['commit'][:12]}"
            for one in again
        )
        lines += ["", f"Measured again: {each}."]
    planned = results.get("planned")
    if planned:
        in_process = (
            f"In process, {planned['request']}: {planned['planned_ms']:.1f} ms as the service plans it,"
            f" {planned['padded_ms']:.1f} ms as one padded call, {planned['ratio']:.1f} times as fast."
        )
        lines += ["", in_process]
    int8 = results.get("int8")
    if int8:
        quantised = (
            f"In process, {int8['request']} on one thread: {int8['fp32_ms']:.2f} ms in fp32,"
            f" {int8['int8_ms']:.2f} ms in int8, {int8['ratio']:.1f} times as fast"
            f" ({int8['least']:.2f} to {int8['most']:.2f}), largest error {int8['error']:.1%} of the largest output."
        )
        lines += ["", quantised]
    return lines


def _instructions(machine: Mapping[str, Any]) -> str:
    """What the arithmetic depends on, where the results say it."""
    return f" with {', '.join(machine['instructions'])}" if machine.get("instructions") else ""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--check", is_flag=True, help="Change nothing; fail if README differs from the results.")
@click.option("--results", default=RESULTS, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(check: bool, results: Path) -> None:
    """Writes the table of a results file between README's markers."""
    text = README.read_text()
    wanted = replaced(text, render(orjson.loads(results.read_bytes())))
    if not check:
        README.write_text(wanted)
    elif text != wanted:
        sys.exit("README.md's table is not that of the results: python -m benchmarks.peers.table")


if __name__ == "__main__":
    main()

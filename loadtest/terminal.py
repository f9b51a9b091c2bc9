"""What a person sees while a test runs, and when it has ended."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from loadtest.compare import Difference
from loadtest.level import Level
from loadtest.tables import Table, level_table, milliseconds, notes, stage_table
from loadtest.tally import Tally

_PIPE_WIDTH = 220


@final
class Shown:
    """The progress of levels, on standard error; a line for each that has ended, where that is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:20}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[figures]}"),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._level: Level | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def __call__(self, level: Level, tally: Tally, passed_s: float) -> None:
        """How a level goes, `passed_s` seconds after it began."""
        whole_s = level.warmup_s + level.seconds
        if level is not self._level:
            self._level = level
            self._task = self._progress.add_task(level.key, total=whole_s or None, figures="")
        assert self._task is not None  # noqa: S101  # it was added with the level
        self._progress.update(self._task, completed=min(passed_s, whole_s), figures=_figures(level, tally, passed_s))

    def say(self, text: str) -> None:
        """A line above the progress, or on its own."""
        self._console.print(text, highlight=False, markup=False)

    def ended(self, result: Mapping[str, Any]) -> None:
        """A level has ended."""
        if not self._console.is_terminal:
            latency = result["latency_ms"]
            figures = f"{result['per_second']['requests']:,.1f} answers/s, p50 {milliseconds(latency['p50'])}"
            self.say(f"{result['load']}: {figures}, p99 {milliseconds(latency['p99'])}")


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """The tables of a report, what to know of them, and the verdict."""
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    console.print(_rich(level_table(report["levels"]), "What clients saw; latency from when requests were due"))
    stages = stage_table(report["levels"])
    if stages is not None:
        console.print(_rich(stages, "Where the time went, mean; by /metrics over the same seconds"))
    for kind, text in notes(report["levels"]):
        console.print(f"{kind:8} {text}", markup=False)
    for line in report["verdict"]["reasons"]:
        console.print(line, markup=False)


def print_differences(found: Sequence[Difference], unlike: Sequence[str], console: Console) -> None:
    """What `compare` found, and in what the two tests were different ones."""
    rows = tuple(_difference_row(difference) for difference in found)
    console.print(_rich(Table(("load", "figure", "old", "new", "new by old", "95 %", ""), rows), "New by old, windows"))
    for line in unlike:
        console.print(f"note     not the same test: {line}", markup=False)


def _difference_row(one: Difference) -> tuple[str, ...]:
    if one.verdict == "too few windows":
        return one.load, one.figure, "", "", "", "", one.verdict
    interval = f"{one.low:.3f} to {one.high:.3f}"
    return one.load, one.figure, f"{one.old:.4g}", f"{one.new:.4g}", f"{one.ratio:.3f}", interval, one.verdict


def _rich(table: Table, title: str) -> RichTable:
    shown = RichTable(title=title, title_justify="left", box=box.SIMPLE)
    for place, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if place else "left")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _figures(level: Level, tally: Tally, passed_s: float) -> str:
    if passed_s < level.warmup_s:
        return "warming up"
    seconds = max(min(passed_s - level.warmup_s, tally.seconds or passed_s), 1e-3)
    missed = tally.ended - tally.outcomes["answered"]
    median = milliseconds(1000 * tally.latency.estimate_s(0.5))
    return f"{tally.arrived / seconds:,.0f} answers/s, p50 {median}" + (f", {missed:,} not answered" if missed else "")

"""Tables and progress, on a terminal or in a file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_WIDTH = 140  # of what goes into a pipe or a file


def say(console: Console, *lines: str) -> None:
    """Plain lines, not wrapped."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Rows under their columns, all to the right but the first."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar, and what to tell it: how much is done. Nothing where there is no terminal, and at the end of it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)

"""`mha heads show`."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich.console import Console

from heads.contributions import look
from heads.errors import HeadsError
from heads.inputs import Labels, read_inputs, read_labels
from heads.measures import Habit, habits
from heads.options import heads_of
from heads.picture import check_picture, heat_maps, save
from heads.source import Source
from heads.terminal import print_table, say


@final
@dataclass(frozen=True, slots=True)
class Question:
    """What to draw: the entry's number, heads such as "0,3" (None for all), and a file of labels (None for none)."""

    entry: int
    heads: str | None
    labels: Path | None


def show(source: Source, file: Path, question: Question, out: Path) -> None:
    """Draws an entry's heads, and prints their habits.

    Raises:
        HeadsError: a file, an entry or a head that is none.
    """
    check_picture("--out", out)
    entries = read_inputs(file, source.layer, with_padding=True).entries
    number = question.entry
    if number >= len(entries):
        raise HeadsError(f"--entry {number}: {file} has {len(entries)}, counted from 0")
    entry = entries[number]
    chosen = heads_of(question.heads, source.layer.num_heads)
    labels = Labels() if question.labels is None else read_labels(question.labels, number, entry)
    weights = look(source.layer, entry).weights
    of_heads = habits(weights, entry.valid_lens)
    save(heat_maps(weights, entry, chosen, of_heads, labels), "--out", out)
    rows = [_row(head, of_heads[head], is_self=entry.is_self) for head in chosen]
    console = Console()
    print_table(console, ("head", "entropy", "of the most", "reach", "largest weight"), rows)
    say(console, f"drawn: {out}")


def _row(head: int, one: Habit, *, is_self: bool) -> tuple[str, ...]:
    reach = f"{one.reach:.1f}" if is_self else "-"
    return str(head), f"{one.entropy_bits:.2f} bits", f"{one.evenness:.0%}", reach, f"{one.most:.3f}"

"""`mha heads rank`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.console import Console

from heads.errors import HeadsError
from heads.importance import Wanted
from heads.inputs import Entry, read_inputs, read_outputs
from heads.ranking import Question, drawn, rank
from heads.source import Source
from heads.terminal import print_table, progress, say


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """How many entries to look at (None for all), and the seed by which they are drawn and intervals are."""

    size: int | None
    seed: int


def rank_heads(source: Source, file: Path, files: Mapping[str, Path | None], sample: Sample, out: Path) -> None:
    """Ranks the heads, writes the report, and prints it.

    Args:
        source: the layer.
        file: of inputs.
        files: of targets and gradients, by option.
        sample: of the entries.
        out: of the report; gone on with where it is there.

    Raises:
        HeadsError: a file that is none.
    """
    if not out.resolve().parent.is_dir():
        raise HeadsError(f"--out {out}: no such folder")
    inputs = read_inputs(file, source.layer)
    wanted = wanted_of(files, inputs.entries, source.layer.num_hiddens)
    entries = drawn(len(inputs.entries), sample.size, sample.seed)
    question = Question(source, inputs, wanted, entries, sample.seed, _digest_of(files))
    with progress(Console(stderr=True), "entries", len(entries)) as done:
        found = rank(question, out, done)
    _print(found, out, Console())


def wanted_of(files: Mapping[str, Path | None], entries: Sequence[Entry], num_hiddens: int) -> list[Wanted]:
    """What each entry's output should be, from the files of `--target` and `--gradients`.

    Raises:
        HeadsError: one of them is none, or does not fit.
    """
    by_option = {
        option: [None] * len(entries) if file is None else read_outputs(file, option, entries, num_hiddens)
        for option, file in files.items()
    }
    return [
        Wanted(*(None if one is None else one.double() for one in both))
        for both in zip(by_option["--target"], by_option["--gradients"], strict=True)
    ]


def _digest_of(files: Mapping[str, Path | None]) -> str:
    digest = hashlib.sha256()
    for option, file in files.items():
        digest.update(option.encode() + (b"" if file is None else file.read_bytes()))
    return digest.hexdigest()


def _print(found: Mapping[str, Any], out: Path, console: Console) -> None:
    methods = found["methods"]
    rows = [
        (str(head), *(_cell(methods[name], head) for name in methods))
        for head in next(iter(methods.values()))["order"]
    ]  # fmt: skip
    title = f"Importance, 95 % interval, place; {len(found['entries'])} entries"
    print_table(console, ("head", *methods), rows, title)
    agreements = [f"{pair} agree to {tau:+.2f}" for pair, tau in found["agreement"].items()]
    say(console, *agreements, "(Kendall's tau: 1 is the same order, 0 no relation)", f"report: {out}")


def _cell(method: Mapping[str, Any], head: int) -> str:
    one = method["heads"][head]
    return f"{one['mean']:.4f}  {one['low']:.4f} to {one['high']:.4f}  {method['order'].index(head) + 1:>3}"

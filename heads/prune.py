"""`mha heads prune`: which heads to keep, what that costs, and the smaller layer as an artefact of its own."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from rich.console import Console

from export.artifact import Destination
from export.errors import ExportError
from export.parity import CaseResult
from export.pipeline import export_layer
from heads.contributions import contributions, look, output_of
from heads.errors import HeadsError
from heads.gram import Pruning
from heads.importance import METHODS, Wanted, scores
from heads.inputs import Inputs, read_inputs
from heads.options import heads_of
from heads.picture import check_picture, curve_of_errors, save
from heads.rank import wanted_of
from heads.ranking import order, read_ranking
from heads.source import Source
from heads.speed import Shape, speeds, steps
from heads.sweep import GREEDY, RANDOM, Halves, Point, as_json, curves, fewest, gram_of, halves
from heads.terminal import print_table, progress, say
from model.attention import MultiHeadAttention
from model.pruning import keep_heads

FORMAT: Final = "mha-heads-sweep/1"
_ROWS_A_FEATURE: Final = 3
WAYS: Final = (GREEDY, *METHODS)


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """How heads are chosen.

    Attributes:
        file: of inputs.
        held_out: of inputs on which errors are measured; None deals out those of `file`.
        files: of targets and gradients, by option.
        ranking: a report of `mha heads rank`; None ranks by what heads are fitted on.
        by: one of `WAYS`.
        refit: whether W_o is fitted anew.
        seed: of the halves, and of random orders.
    """

    file: Path
    held_out: Path | None
    files: Mapping[str, Path | None]
    ranking: Path | None
    by: str
    refit: bool
    seed: int


@final
class Trial:
    """A layer, its orders of heads, and what keeping some of them costs."""

    def __init__(self, source: Source, settings: Settings) -> None:
        layer = source.layer
        self.source = source
        self.settings = settings
        inputs = read_inputs(settings.file, layer)
        self.split = _split(layer, inputs, settings)
        self.pruning = Pruning(layer, self.split.fitted_on)
        wanted = wanted_of(settings.files, inputs.entries, layer.num_hiddens)
        self.orders = {
            GREEDY: self.pruning.eliminated(self.split.fitted_on, refit=settings.refit),
            **self._ranked(inputs, wanted),
        }
        if settings.by not in self.orders:
            raise HeadsError(f"--by {settings.by}: wants --target, or a --ranking that has it")
        self.curves = curves(layer, self.split, self.orders, settings.seed, refit=settings.refit)

    @property
    def points(self) -> list[Point]:
        """By the way that was chosen, all heads first."""
        return self.curves[self.settings.by]

    def point_of(self, heads: Sequence[int]) -> Point:
        """What keeping exactly these costs."""
        error = self.pruning.error(heads, self.split.held_out)
        refitted = self.pruning.error(heads, self.split.held_out, refit=True)
        return Point(len(heads), tuple(sorted(heads)), error, refitted, error, error)

    def pruned(self, point: Point) -> MultiHeadAttention:
        """The layer with that point's heads."""
        smaller = keep_heads(self.source.layer, point.heads)
        if self.settings.refit:
            weight, bias = self.pruning.refitted(point.heads)
            with torch.no_grad():
                smaller.W_o.weight.copy_(weight)
                if bias is not None:
                    smaller.W_o.bias.copy_(bias)
        return smaller

    def error_of(self, point: Point) -> float:
        """Of the layer that `pruned` makes."""
        return point.cost(refit=self.settings.refit)

    def _ranked(self, inputs: Inputs, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
        if self.settings.ranking is not None:
            ranked = read_ranking(self.settings.ranking, self.source)
            return {name: order(ranked, name) for name in ranked["methods"]}
        totals: dict[str, torch.Tensor] = {}
        layer = self.source.layer
        for entry in self.split.fitted_entries:
            of_heads = contributions(layer, look(layer, inputs.entries[entry]).features)
            for name, found in scores(of_heads, output_of(layer, of_heads), wanted[entry]).items():
                totals[name] = totals.get(name, 0) + torch.tensor(found, dtype=torch.float64)
        return {name: torch.argsort(total).tolist() for name, total in totals.items()}


def prune(
    trial: Trial, keep: int | None, most_error: float | None, heads: str | None, destination: Destination,
) -> None:  # fmt: skip
    """Publishes the layer with the heads that one of the three says.

    Raises:
        HeadsError: nothing keeps the bound, or the layer has no such heads, or a gate of the export failed.
    """
    console = Console()
    point = _chosen(trial, keep, most_error, heads)
    settings = trial.settings
    num_heads = trial.source.layer.num_heads
    error = trial.error_of(point)
    origin = _origin(trial, point, error)
    steps_shown = _Steps(Console(stderr=True))
    try:
        export_layer(trial.pruned(point), origin, destination, steps_shown)
    except ExportError as failed:
        raise HeadsError(f"{failed}\nNothing was published.") from failed
    alone = settings.held_out is None and trial.split.held_out_entries == trial.split.fitted_entries
    measured = "on the one entry there is" if alone else "on entries that were held out"
    rows = {
        "published": str(destination.folder),
        "heads": f"{point.kept} of {num_heads} kept: {', '.join(map(str, point.heads))}",
        "error": f"{error:.2%} of the output, {measured}" + (", W_o fitted anew" if settings.refit else ""),
        "by chance": _by_chance(trial, point),
        "serve it": f"mha serve --models {destination.repository}",
    }
    say(console, *(f"{name:10} {value}" for name, value in rows.items()), *(_doubts(trial) if settings.refit else ()))


def sweep(
    trial: Trial, shape: Shape | None, threads: int, report: Path | None, plot: Path | None
) -> None:  # fmt: skip
    """Prints the price of every number of heads by every way, and writes it.

    Args:
        trial: of the layer.
        shape: of the call whose speed is measured; None measures none.
        threads: of it.
        report: of the JSON; None writes none.
        plot: of the picture; None draws none.
    """
    layer = trial.source.layer
    counts = [point.kept for point in trial.points]
    faster: dict[int, float] = {}
    if shape is not None:
        with progress(Console(stderr=True), "speed", steps(counts, layer.num_heads)) as done:
            faster = speeds(layer, counts, shape, threads, done)
    content = {
        "format": FORMAT,
        "layer": trial.source.digest,
        "origin": dict(trial.source.origin),
        "num_heads": layer.num_heads,
        "seed": trial.settings.seed,
        "fitted_on": {"entries": len(trial.split.fitted_entries), "queries": trial.split.fitted_on.rows},
        "held_out": {"entries": len(trial.split.held_out_entries), "queries": trial.split.held_out.rows},
        "refit": trial.settings.refit,
        "curves": as_json(trial.curves),
        "faster": {str(count): ratio for count, ratio in faster.items()},
        "speed_of": None if shape is None else {"shape": list(shape), "threads": threads},
    }
    console = Console()
    _print_sweep(trial, faster, console)
    say(console, *_doubts(trial))
    if report is not None:
        try:
            report.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise HeadsError(f"--report {report}: {error.strerror}") from error
    if plot is not None:
        save(curve_of_errors(trial.curves, faster, refit=trial.settings.refit), "--plot", plot)


def check_files(report: Path | None, plot: Path | None) -> None:
    """Refuses, before any work is done, what could not be written.

    Raises:
        HeadsError: a folder that is not there, or a picture of a format that is none.
    """
    if report is not None and not report.resolve().parent.is_dir():
        raise HeadsError(f"--report {report}: no such folder")
    if plot is not None:
        check_picture("--plot", plot)


def destination_of(
    source: Source, out: Path | None, name: str | None, version: int | None, *, force: bool
) -> Destination:
    """Where the smaller layer goes: beside the one that it comes from, as its next version, unless something is said.

    Raises:
        HeadsError: the version is taken.
    """
    folder = source.folder.resolve() if source.folder is not None else None
    repository = out or (Path("models") if folder is None else folder.parent.parent)
    named = name or ("attention" if folder is None else folder.parent.name)
    if version is None:
        version = next(free for free in itertools.count(1) if not (repository / named / str(free)).exists())
    destination = Destination(repository, named, version, force)
    try:
        destination.check()
    except ExportError as error:
        raise HeadsError(str(error)) from error
    return destination


def _split(layer: MultiHeadAttention, inputs: Inputs, settings: Settings) -> Halves:
    every = range(len(inputs.entries))
    if settings.held_out is None:
        return halves(layer, inputs, every, settings.seed)
    others = read_inputs(settings.held_out, layer)
    beyond = range(len(others.entries))
    return Halves(gram_of(layer, inputs, every), gram_of(layer, others, beyond), tuple(every), tuple(beyond))


def _chosen(trial: Trial, keep: int | None, most_error: float | None, heads: str | None) -> Point:
    num_heads = trial.source.layer.num_heads
    if heads is not None:
        return trial.point_of(heads_of(heads, num_heads))
    if keep is not None:
        if keep >= num_heads:
            raise HeadsError(f"--keep {keep}: the layer has {num_heads} heads, so that none would be pruned")
        return trial.points[num_heads - keep]
    assert most_error is not None  # noqa: S101  # one of the three is given
    point = fewest(trial.points, most_error, refit=trial.settings.refit)
    if point is None:
        best = trial.error_of(trial.points[1]) if num_heads > 1 else float("inf")
        raise HeadsError(
            f"--max-error {most_error:g}: without even one of {num_heads} heads the error is {best:.4g}; allow more"
            + ("" if trial.settings.refit else ", or try --refit")
        )
    return point


def _origin(trial: Trial, point: Point, error: float) -> dict[str, Any]:
    # Heads are counted as in the layer that was never pruned.
    origin = dict(trial.source.origin)
    before = str(origin.get("kept_heads", ",".join(map(str, range(trial.source.layer.num_heads))))).split(",")
    return {
        **origin,
        "of_heads": int(origin.get("of_heads", trial.source.layer.num_heads)),
        "kept_heads": ",".join(before[head] for head in point.heads),
        "pruned_from": trial.source.digest,
        "chosen_by": trial.settings.by,
        "refitted": "yes" if trial.settings.refit else "no",
        "held_out_error": f"{error:.4g}",
    }


def _doubts(trial: Trial) -> list[str]:
    layer, fitted_on = trial.source.layer, trial.split.fitted_on
    features = layer.num_heads * layer.head_size
    if fitted_on.rows >= _ROWS_A_FEATURE * features:
        return []
    doubt = f"W_o was fitted to {fitted_on.rows} queries, with {features} features to weigh: it may follow their chance"
    return [f"note       {doubt}; give more inputs"]


def _by_chance(trial: Trial, point: Point) -> str:
    of_chance = trial.curves[RANDOM][trial.source.layer.num_heads - point.kept]
    return f"{trial.error_of(of_chance):.2%} (nine of ten choices between {of_chance.low:.2%} and {of_chance.high:.2%})"


def _print_sweep(trial: Trial, faster: Mapping[int, float], console: Console) -> None:
    names, refit = list(trial.curves), trial.settings.refit
    last = () if refit else (f"{trial.settings.by}, W_o refitted",)
    rows = []
    for place, point in enumerate(trial.points):
        errors = [f"{trial.error_of(trial.curves[name][place]):.2%}" for name in names]
        speed = f"{faster[point.kept]:.2f}x" if point.kept in faster else "-"
        rows.append((str(point.kept), *errors, *([] if refit else [f"{point.refitted:.2%}"]), speed))
    print_table(
        console, ("heads kept", *names, *last, "faster"), rows,
        "Error of the output, on what was held out, by which heads are taken away first" + (", W_o refitted" * refit),
    )  # fmt: skip


@final
class _Steps:
    """Steps of the export, on a line each."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def step(self, what: str) -> None:
        self._console.print(what, highlight=False)

    def case(self, result: CaseResult) -> None:
        """A case is not worth a line."""

"""`mha heads`: show, rank, prune."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from heads.errors import HeadsError
from heads.options import OF_LAYER, chosen_layer, of_layer
from heads.picture import SUFFIXES
from heads.prune import WAYS, Settings, Trial, check_files, destination_of, prune, sweep
from heads.rank import Sample, rank_heads
from heads.show import Question, show
from heads.speed import Shape
from heads.sweep import GREEDY

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_SHAPE = "1x128x128"
_FILE = click.Path(path_type=Path)


@click.group(context_settings=_SETTINGS)
def heads() -> None:
    """See the heads of a layer, rank them, and prune those that matter least.

    INPUTS is a .npz, .safetensors or .json file of tensors as they would be posted: queries, and if wanted keys,
    values, valid_lens, query_lens.

    \b
    mha heads show  examples/seeds.json --model models/attention/1 --out heads.png
    mha heads rank  inputs.npz --model models/attention/1 --out ranking.json
    mha heads prune inputs.npz --model models/attention/1 --sweep --plot sweep.png
    mha heads prune inputs.npz --model models/attention/1 --keep 3
    """  # noqa: D301  # \b keeps click from rewrapping the examples


@heads.command("show", context_settings=_SETTINGS, short_help="Draw what each head attends to.")
@click.argument("inputs", type=_FILE)
@of_layer
@click.option("--entry", type=click.IntRange(min=0), default=0, show_default=True, help="Which batch entry.")
@click.option("--heads", "chosen", metavar="LIST", help="Which heads, such as 0,3.  [default: all]")
@click.option("--labels", type=_FILE, help="Names of the tokens: a JSON list of texts, or one for each entry.")
@click.option("--out", type=_FILE, default=Path("heads.png"), show_default=True,
              help=f"The picture: {', '.join(SUFFIXES)}.")  # fmt: skip
def show_heads(**options: Any) -> None:
    """Draw what each head attends to on one entry of INPUTS, and say how widely and how far it looks."""
    with _mistakes():
        source = chosen_layer(**_of_layer(options))
        question = Question(options["entry"], options["chosen"], options["labels"])
        show(source, options["inputs"], question, options["out"])


@heads.command("rank", context_settings=_SETTINGS, short_help="Say how much each head matters, by three methods.")
@click.argument("inputs", type=_FILE)
@of_layer
@click.option("--target", type=_FILE, help="What the output should be: a tensor 'output', .npz or .safetensors.")
@click.option("--gradients", type=_FILE, help="Of your model's loss by the layer's output, as such a tensor.")
@click.option("--sample", type=click.IntRange(min=1), help="So many entries, drawn by --seed.  [default: all]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of sample and intervals.")
@click.option("--out", type=_FILE, default=Path("ranking.json"), show_default=True,
              help="The report. One that is there and not complete is gone on with.")  # fmt: skip
def rank(**options: Any) -> None:
    """Say how much each head of a layer matters on INPUTS, side by side, with intervals over the entries.

    leave-one-out: how much the output changes without the head. gradient: how much a loss would change with the head's
    share (Michel et al. 2019); the loss is yours with --gradients, the distance from --target, or the output's square.
    loss: how much further from --target the output is without the head.
    """
    with _mistakes():
        source = chosen_layer(**_of_layer(options))
        sample = Sample(options["sample"], options["seed"])
        rank_heads(source, options["inputs"], _wanted(options), sample, options["out"])


@heads.command("prune", context_settings=_SETTINGS, short_help="Make a smaller layer, or show what it would cost.")
@click.argument("inputs", type=_FILE)
@of_layer
@click.option("--keep", type=click.IntRange(min=1), help="How many heads to keep.")
@click.option("--max-error", type=click.FloatRange(0, min_open=True),
              help="Keep as few as leave the error of the output below this; 0.02 is 2 %.")  # fmt: skip
@click.option("--heads", "chosen", metavar="LIST", help="Keep exactly these, such as 0,3.")
@click.option("--sweep", "is_sweep", is_flag=True, help="Publish nothing: error and speed for every number of heads.")
@click.option("--by", type=click.Choice(WAYS), default=GREEDY, show_default=True,
              help="Who goes first: greedy, one at a time, whoever costs least then; or by a ranking.")  # fmt: skip
@click.option("--refit", is_flag=True, help="Fit W_o anew to the whole layer's output, by least squares.")
@click.option("--held-out", type=_FILE,
              help="Inputs on which errors are measured.  [default: a half of INPUTS]")  # fmt: skip
@click.option("--ranking", type=_FILE, help="What `mha heads rank` wrote.  [default: ranked on INPUTS]")
@click.option("--target", type=_FILE, help="As of `mha heads rank`, for --by loss.")
@click.option("--gradients", type=_FILE, help="As of `mha heads rank`, for --by gradient.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of halves and of chance.")
@click.option("--out", type=_FILE, help="Model repository.  [default: that of --model]")
@click.option("--name", help="Name to serve it under.  [default: that of --model]")
@click.option("--version", type=click.IntRange(min=1), help="Version to publish.  [default: the next one]")
@click.option("--force", is_flag=True, help="Overwrite the version if it exists.")
@click.option("--report", type=_FILE, help="Of --sweep, as JSON.")
@click.option("--plot", type=_FILE, help=f"Of --sweep, as a picture: {', '.join(SUFFIXES)}.")
@click.option("--shape", default=_SHAPE, show_default=True, metavar="BxQxK",
              help="Of the call that --sweep times; none times none.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Of that call.")
def prune_heads(**options: Any) -> None:
    """Make a smaller layer of the heads that matter most on INPUTS, and publish it through the gate of `mha export`.

    Heads keep their size and the output keeps its own, so that the smaller layer takes and answers what the whole one
    does. Give one of --keep, --max-error, --heads and --sweep.
    """
    given = [name for name in ("keep", "max_error", "chosen") if options[name] is not None]
    if len(given) + options["is_sweep"] != 1:
        raise click.UsageError("give one of --keep, --max-error, --heads and --sweep")
    if not options["is_sweep"] and (options["report"] or options["plot"]):
        raise click.UsageError("--report and --plot are of --sweep")
    shape = _shape(options["shape"])
    with _mistakes():
        check_files(options["report"], options["plot"])
        source = chosen_layer(**_of_layer(options))
        settings = Settings(
            options["inputs"], options["held_out"], _wanted(options), options["ranking"], options["by"],
            options["refit"], options["seed"],
        )  # fmt: skip
        if options["is_sweep"]:
            sweep(Trial(source, settings), shape, options["threads"], options["report"], options["plot"])
            return
        where = destination_of(source, options["out"], options["name"], options["version"], force=options["force"])
        prune(Trial(source, settings), options["keep"], options["max_error"], options["chosen"], where)


def _of_layer(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in OF_LAYER}


def _wanted(options: dict[str, Any]) -> dict[str, Path | None]:
    return {"--target": options["target"], "--gradients": options["gradients"]}


def _shape(text: str) -> Shape | None:
    if text == "none":
        return None
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isascii() and size.isdecimal() and 0 < int(size) <= 2**20 for size in sizes):
        raise click.UsageError(f"--shape: got {text!r}, want batch, queries and keys, such as {_SHAPE}, or none")
    batch, num_queries, num_kv = map(int, sizes)
    return batch, num_queries, num_kv


@contextmanager
def _mistakes() -> Iterator[None]:
    """What a user can mend is said in one line; the exit status is 1."""
    try:
        yield
    except HeadsError as error:
        raise click.ClickException(str(error)) from error

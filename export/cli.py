"""`mha export`: options in, a table out."""

from pathlib import Path
from typing import Any, final

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from export.artifact import Destination
from export.errors import ExportError
from export.parity import CaseResult, comparisons
from export.pipeline import Precision, checkpoint_source, export_layer
from export.precision import PRECISIONS
from model.attention import MultiHeadAttention, seeded_layer
from model.checkpoint import LAYOUTS, CheckpointError, load_layer
from model.scoring import SCORINGS

_RANDOM_ONLY = ("num_hiddens", "query_size", "key_size", "value_size", "bias", "scoring", "seed")


@click.command("export", short_help="Turn a layer into a checked artefact.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("models"), show_default=True,
              help="Model repository to publish into.")  # fmt: skip
@click.option("--name", default="attention", show_default=True, help="Name the layer is served under.")
@click.option("--version", type=click.IntRange(min=1), default=1, show_default=True, help="Version to publish.")
@click.option("--force", is_flag=True, help="Overwrite the version if it exists.")
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True,
              help="Arithmetic of the projections; inputs and outputs stay float32.")  # fmt: skip
@click.option("--calibration", type=click.Path(path_type=Path),
              help="Inputs to measure its error on, .npz or .safetensors.  [default: standard normal]")  # fmt: skip
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Weights to export: .safetensors or .pt.")
@click.option("--prefix", help="Which layer of the checkpoint, e.g. encoder.layer.0.")
@click.option("--layout", type=click.Choice(["auto", *LAYOUTS]), default="auto", show_default=True,
              help="How the checkpoint names its tensors.")  # fmt: skip
@click.option("--num-heads", type=click.IntRange(min=1),
              help="Heads. With --checkpoint, config.json beside the file is asked first.")  # fmt: skip
@click.option("--num-hiddens", type=click.IntRange(min=1), help="Size of the output. Without --checkpoint.")
@click.option("--query-size", type=click.IntRange(min=1), help="Last axis of queries.  [default: num-hiddens]")
@click.option("--key-size", type=click.IntRange(min=1), help="Last axis of keys.  [default: num-hiddens]")
@click.option("--value-size", type=click.IntRange(min=1), help="Last axis of values.  [default: num-hiddens]")
@click.option("--bias", is_flag=True, default=None, help="Give the projections a bias.")
@click.option("--scoring", type=click.Choice(SCORINGS), help="[default: dot_product]")
@click.option("--seed", type=click.IntRange(min=0), help="Of the random weights.  [default: 0]")
@click.pass_context
def export(context: click.Context, /, **options: Any) -> None:
    """Export a multi-head attention layer to ONNX, prove that it computes the same, and publish it.

    Give either --num-hiddens and --num-heads (random weights from --seed), or --checkpoint.

    \b
    mha export --num-hiddens 100 --num-heads 5
    mha export --checkpoint model.safetensors --prefix encoder.layer.0 --name minilm
    """  # noqa: D301  # \b keeps click from rewrapping the examples
    destination = Destination(options["out"], options["name"], options["version"], options["force"])
    precision = Precision(options["precision"], options["calibration"])
    console = Console(stderr=True)
    try:
        destination.check()
        layer, source = _layer(options)
        with _ShownProgress(console) as progress:
            content = export_layer(layer, source, destination, progress, precision)
    except (ExportError, CheckpointError, ValueError) as error:
        click.echo(f"Error: {error}\nNothing was published.", err=True)
        context.exit(1)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe or a log file has no width of its own
    _print_summary(console, destination, content)


def _layer(options: dict[str, Any]) -> tuple[MultiHeadAttention, dict[str, Any]]:
    if options["checkpoint"] is None:
        return _random_layer(options)
    unwanted = [_flag(name) for name in _RANDOM_ONLY if options[name] is not None]
    if unwanted:
        raise click.UsageError(f"{', '.join(unwanted)}: the checkpoint decides this; leave it out")
    path: Path = options["checkpoint"]
    loaded = load_layer(path, prefix=options["prefix"], layout=options["layout"], num_heads=options["num_heads"])
    return loaded.layer, checkpoint_source(path, loaded)


def _random_layer(options: dict[str, Any]) -> tuple[MultiHeadAttention, dict[str, Any]]:
    if options["prefix"] is not None or options["layout"] != "auto":
        raise click.UsageError("--prefix and --layout need --checkpoint")
    missing = [_flag(name) for name in ("num_hiddens", "num_heads") if options[name] is None]
    if missing:
        raise click.UsageError(f"missing {' and '.join(missing)}: give --num-hiddens and --num-heads, or --checkpoint")
    seed = options["seed"] or 0
    layer = seeded_layer(
        options["num_hiddens"],
        options["num_heads"],
        seed=seed,
        bias=bool(options["bias"]),
        query_size=options["query_size"],
        key_size=options["key_size"],
        value_size=options["value_size"],
        scoring=options["scoring"] or "dot_product",
    )
    return layer, {"kind": "random", "seed": seed}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@final
class _ShownProgress:
    """Steps and parity cases as a live line on a terminal, as plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
        )
        self._task = self._live.add_task("start", total=None)
        self._measured, self._wanted = 0, len(comparisons())

    def __enter__(self) -> "_ShownProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def step(self, what: str) -> None:
        self._live.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(what, highlight=False)

    def case(self, result: CaseResult) -> None:
        self._measured += 1
        progress = f"parity {self._measured}/{self._wanted}"
        self._live.update(self._task, description=f"{progress}: {result.lowering}, {result.name}")


def _print_summary(console: Console, destination: Destination, content: dict[str, Any]) -> None:
    layer, parity, calibration = content["layer"], content["parity"], content["calibration"]
    sizes = f"{layer['num_hiddens']} hiddens, {layer['num_heads']} heads of {layer['head_size']}"
    compared = f"{len(parity['cases'])} comparisons with torch and a float64 oracle"
    rows = {
        "published": str(destination.folder),
        "layer": f"{sizes}, {layer['scoring']}, {'bias' if layer['bias'] else 'no bias'}",
        "inputs": f"queries {layer['query_size']}, keys {layer['key_size']}, values {layer['value_size']}",
        "graphs": ", ".join(f"{entry['file']} ({entry['size_bytes']:,} bytes)" for entry in content["lowerings"]),
        "opset": f"{content['opset']}; batch, num_queries and num_kv are dynamic",
        "parity": f"{compared}, largest error {parity['max_error']:.1e} (limit {parity['limit']:.0e})",
        "precision": (
            f"{content['precision']}, largest error {calibration['max_error']:.1e} of the largest output, mean "
            f"{calibration['mean_error']:.1e} (limit {calibration['limit']:.0e}), measured on "
            + ", ".join(f"{key} {value}" for key, value in calibration["source"].items())
        ),
        "digest": f"sha256 {content['lowerings'][0]['sha256']} of {content['lowerings'][0]['file']}",
        "serve it": f"mha serve --models {destination.repository}",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    console.print(table, highlight=False, soft_wrap=True)

"""Options that the commands share: which layer, which heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from heads.errors import HeadsError
from heads.source import Source, from_artifact, from_checkpoint
from model.checkpoint import LAYOUTS

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OF_LAYER: Final = (
    click.option("--model", type=click.Path(path_type=Path), help="The layer in an artefact: models/attention/1."),
    click.option("--checkpoint", type=click.Path(path_type=Path), help="The layer in a checkpoint instead."),
    click.option("--prefix", help="Which layer of the checkpoint, e.g. encoder.layer.0."),
    click.option("--layout", type=click.Choice(["auto", *LAYOUTS]), default="auto", show_default=True,
                 help="How the checkpoint names its tensors."),
    click.option("--num-heads", type=click.IntRange(min=1), help="Of a checkpoint without config.json."),
)  # fmt: skip
OF_LAYER: Final = ("model", "checkpoint", "prefix", "layout", "num_heads")


def of_layer(command: _Command) -> _Command:
    """Gives a command the options that name a layer."""
    for option in reversed(_OF_LAYER):
        command = option(command)
    return command


def chosen_layer(
    model: Path | None, checkpoint: Path | None, prefix: str | None, layout: str, num_heads: int | None
) -> Source:
    """The layer that the options name.

    Raises:
        HeadsError: they name none, or it cannot be read.
        UsageError: they contradict each other.
    """
    if (model is None) == (checkpoint is None):
        raise click.UsageError("give either --model, an artefact's folder, or --checkpoint")
    if checkpoint is not None:
        return from_checkpoint(checkpoint, prefix, layout, num_heads)
    if prefix is not None or layout != "auto" or num_heads is not None:
        raise click.UsageError("--prefix, --layout and --num-heads need --checkpoint")
    assert model is not None  # noqa: S101  # one of the two is given
    return from_artifact(model)


def heads_of(text: str | None, num_heads: int, option: str = "--heads") -> list[int]:
    """Indices such as 0,3; all heads without any.

    Raises:
        HeadsError: they are none of the layer's.
    """
    if text is None:
        return list(range(num_heads))
    parts = [part.strip() for part in text.split(",")]
    heads = [int(part) for part in parts if part.isascii() and part.isdecimal()]
    if len(heads) < len(parts) or len(set(heads)) < len(heads) or max(heads) >= num_heads:
        raise HeadsError(f"{option}: got {text!r}, want some of 0 to {num_heads - 1}, such as 0,3, each once")
    return heads

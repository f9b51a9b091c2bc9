"""Pictures of what heads attend to, and of what pruning costs. matplotlib, without a display and without its state."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from heads.errors import HeadsError
from heads.inputs import Entry, Labels
from heads.measures import Habit
from heads.sweep import RANDOM, Point

SUFFIXES: Final = (".png", ".svg", ".pdf")
_COLUMNS: Final = 4
_COLOURS: Final = "viridis"
_MOST_LABELS: Final = 64
_DOTS_PER_INCH: Final = 110
# Text stays text. The same picture, the same bytes: identifiers are drawn from what they are of, and no time is noted.
_DRAWING: Final[Any] = {"svg.fonttype": "none", "svg.hashsalt": "mha"}
_METADATA: Final[dict[str, dict[str, Any]]] = {
    ".png": {"Software": None}, ".svg": {"Date": None, "Creator": None}, ".pdf": {"CreationDate": None},
}  # fmt: skip


def heat_maps(weights: Tensor, entry: Entry, heads: Sequence[int], of_heads: Sequence[Habit], labels: Labels) -> Figure:
    """One heat map a head, (Q, K), all on one colour scale from 0 to the largest weight shown, which its bar explains.

    Keys beyond a query's valid length are hatched: nothing is read there.

    Args:
        weights: (H, Q, K).
        entry: that they are of.
        heads: which of them to draw, in this order.
        of_heads: their habits, as long as `weights`.
        labels: of queries and keys; numbers stand in for those that are missing.
    """
    shown = weights[list(heads)].double().numpy()
    columns = min(_COLUMNS, len(heads))
    rows = math.ceil(len(heads) / columns)
    num_queries, num_kv = shown.shape[1:]
    width = float(np.clip(0.22 * num_kv + 1.0, 2.6, 6.5))
    height = float(np.clip(0.22 * num_queries + 1.1, 2.2, 6.5))
    figure = Figure(figsize=(columns * width + 1.0, rows * height + 0.3), layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    lengths = entry.valid_lens.numpy()[:, None]
    beyond = (np.arange(num_kv) >= lengths) & (lengths > 0)
    largest = float(shown.max())
    for place, axes in enumerate(grid.flat):
        if place >= len(heads):
            axes.set_axis_off()
            continue
        image = _draw(axes, np.ma.masked_array(shown[place], beyond), largest)
        habit = of_heads[heads[place]]
        reach = f", reach {habit.reach:.1f}" if entry.is_self else ""
        axes.set_title(f"head {heads[place]}\n{habit.entropy_bits:.1f} bits{reach}", fontsize=9, loc="left")
        _tick(axes.xaxis, labels.keys, num_kv, rotation=90)
        _tick(axes.yaxis, labels.queries, num_queries, rotation=0)
        if place % columns == 0:
            axes.set_ylabel("query")
        if place >= len(heads) - columns:
            axes.set_xlabel("key")
    bar = figure.colorbar(image, ax=grid, shrink=0.8, label="attention weight")
    bar.outline.set_visible(False)
    return figure


def curve_of_errors(curves: Mapping[str, Sequence[Point]], faster: Mapping[int, float], *, refit: bool) -> Figure:
    """Errors against heads kept, a line for each way to choose them, chance as a band; the speed below, if known."""
    figure = Figure(figsize=(7.0, 6.4 if faster else 4.2), layout="constrained")
    ratios = (2, 1) if faster else (1,)
    grid: Any = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)
    above = grid[0, 0]
    for name, points in curves.items():
        kept = [point.kept for point in points]
        style = {"color": "0.4", "linestyle": "--"} if name == RANDOM else {"marker": "o", "markersize": 3}
        above.plot(kept, [100 * point.cost(refit=refit) for point in points], label=name, **style)
        if name == RANDOM:
            edges = ([100 * point.low for point in points], [100 * point.high for point in points])
            above.fill_between(kept, *edges, color="0.85", label="nine of ten random choices")
    above.set_ylabel("error of the output, W_o refitted, %" if refit else "error of the output, %")
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    if faster:
        counts = sorted(faster)
        grid[1, 0].plot(counts, [faster[count] for count in counts], marker="o", markersize=3, color="0.2")
        grid[1, 0].set_ylabel("times faster")
        grid[1, 0].set_ylim(bottom=0)
    grid[-1, 0].set_xlabel("heads kept")
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure


def check_picture(option: str, path: Path) -> None:
    """Refuses, before any work is done, what could not be drawn.

    Raises:
        HeadsError: there is no such format, or no such folder.
    """
    if path.suffix not in SUFFIXES:
        raise HeadsError(f"{option} {path}: got {path.suffix or 'no suffix'}, want {', '.join(SUFFIXES)}")
    if not path.resolve().parent.is_dir():
        raise HeadsError(f"{option} {path}: no such folder")


def save(figure: Figure, option: str, path: Path) -> None:
    """Writes a picture, in the format that its suffix says.

    Raises:
        HeadsError: the file cannot be written.
    """
    try:
        with rc_context(_DRAWING):
            figure.savefig(path, dpi=_DOTS_PER_INCH, metadata=_METADATA[path.suffix])
    except OSError as error:
        raise HeadsError(f"{option} {path}: {error.strerror}") from error


def _draw(axes: Axes, values: Any, largest: float) -> Any:
    axes.patch.set(facecolor="0.92", hatch="////", edgecolor="0.75")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=7)
    return axes.imshow(values, cmap=_COLOURS, vmin=0.0, vmax=largest, aspect="auto", interpolation="nearest")


def _tick(axis: Any, labels: Sequence[str], count: int, *, rotation: int) -> None:
    if not labels:
        axis.set_major_locator(MaxNLocator(integer=True))
        return
    step = math.ceil(count / _MOST_LABELS)
    axis.set_ticks(range(0, count, step), [_plain(label) for label in labels[::step]], rotation=rotation)


def _plain(label: str) -> str:
    # A dollar sign would begin a formula.
    return label.replace("$", r"\$")

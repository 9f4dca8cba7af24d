"""Figures of `deep_mlp.py`: loss and speed by depth, and singular values of the Jacobian during training."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.analysis import figures
from experiments.runs import TARGET, Row, save_figure

CHANCE = math.log(10)
"""Loss of a network that gives ten classes the same probability."""

HIGHEST = 3.0
"""Higher losses, and those of diverged runs, are drawn at this loss."""

SHIFT = 1.15
"""Ratio of the horizontal positions of two methods at the same depth."""

FLOOR, CEILING = 1e-12, 1e12
"""Singular values outside of this range are drawn at its ends."""


def best(rows: Sequence[Row]) -> dict[tuple[int, str, int], Row]:
    """Returns (width, method, depth) -> the run with the lowest last training loss among rates and seeds."""
    chosen: dict[tuple[int, str, int], Row] = {}
    for row in sorted(rows, key=last_loss, reverse=True):
        chosen[row["width"], row["method"], row["depth"]] = row
    return chosen


def last_loss(row: Row) -> float:
    """Returns the mean training loss of the last epoch; infinity for a diverged run."""
    return math.inf if row["train_loss"][-1] is None else row["train_loss"][-1]


def draw(rows: Sequence[Row], path: Path, methods: Sequence[str]) -> None:
    """Draws <path>_loss.png, <path>_epochs.png and <path>_jacobian.png.

    Every point is the run with the lowest last training loss among all learning rates and seeds. A hollow point marks a
    run with fewer epochs than the longest run of the same width; no line joins it.

    Args:
      rows: the table.
      path: beginning of the files' paths.
      methods: all methods, in the order of their colours.
    """
    runs = best(rows)
    by_depth(runs, path.with_name(f"{path.name}_loss.png"), methods, "loss")
    by_depth(runs, path.with_name(f"{path.name}_epochs.png"), methods, "epochs")
    jacobians(runs, path.with_name(f"{path.name}_jacobian.png"), methods)


def by_depth(runs: dict[tuple[int, str, int], Row], path: Path, methods: Sequence[str], quantity: str) -> None:
    """Draws the last training loss, or the epochs to the training accuracy `TARGET`, by depth; one panel per width."""
    pyplot = figures.pyplot()
    widths = sorted({width for width, _, _ in runs})
    figure, axes = pyplot.subplots(
        1, len(widths), figsize=(1 + 4 * len(widths), 3.6), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, width in zip(axes[0], widths, strict=True):
        longest = max(row["epochs"] for (w, _, _), row in runs.items() if w == width)
        for index, method in enumerate(methods):
            # Each method has its own horizontal offset, so that equal values do not hide each other.
            shift = SHIFT ** (index - (len(methods) - 1) / 2)
            points = sorted((depth * shift, row) for (w, m, depth), row in runs.items() if (w, m) == (width, method))
            values = [min(last_loss(row), HIGHEST) if quantity == "loss" else epochs(row, longest) for _, row in points]
            style = figures.line(index) | {"linewidth": 1.2}
            whole = [row["epochs"] == longest for _, row in points]
            joined = [(depth, value) for (depth, _), value, full in zip(points, values, whole, strict=True) if full]
            axis.plot(*np.array(joined).reshape(-1, 2).T, **style, label=method)
            for (depth, row), value, full in zip(points, values, whole, strict=True):
                # A shorter run that did not reach the target says nothing about the epochs of the others.
                if full or quantity == "loss" or row["epochs_to_target"] is not None:
                    fill = style["color"] if full else "white"
                    axis.plot(depth, value, "o", markersize=5, color=style["color"], markerfacecolor=fill)
        axis.set(title=f"width {width}, {longest} epochs", xlabel="layers, methods side by side", xscale="log")
        depths = sorted({depth for _, _, depth in runs})
        axis.set_xticks(depths, [f"{depth:,}" for depth in depths])
        axis.minorticks_off()
        line = CHANCE if quantity == "loss" else longest + 1
        axis.axhline(line, color="0.6", linewidth=1, linestyle=":")
        text = "equal probabilities" if quantity == "loss" else "not reached"
        axis.margins(y=0.1)
        axis.text(0.99, line, text, transform=axis.get_yaxis_transform(), ha="right", va="bottom", color="0.4")
    title = "training loss, last epoch" if quantity == "loss" else f"epochs to a training accuracy of {TARGET:.0%}"
    axes[0, 0].set_ylabel(title)
    save_figure(figure, axes[0, 0], path)


def epochs(row: Row, longest: int) -> float:
    """Returns the epochs to `TARGET`, or one more than those of the longest run if the run did not reach it."""
    return longest + 1 if row["epochs_to_target"] is None else row["epochs_to_target"]


def jacobians(runs: dict[tuple[int, str, int], Row], path: Path, methods: Sequence[str]) -> None:
    """Draws quantiles of the singular values of dx_L / dx_0 by epoch: a row per depth, a column per method.

    The depths are the deepest three that at least two methods have, at the width with the most runs.
    """
    pyplot = figures.pyplot()
    widths = [width for width, _, _ in runs]
    width = max(sorted(set(widths)), key=widths.count)
    found = [depth for w, _, depth in runs if w == width]
    depths = sorted({depth for depth in found if found.count(depth) > 1} or {*found})[-3:]
    shape = len(depths), len(methods)
    size = 1 + 2 * shape[1], 0.8 + 1.8 * shape[0]
    figure, axes = pyplot.subplots(*shape, figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained")
    for row, depth in enumerate(depths):
        for column, method in enumerate(methods):
            axis, run = axes[row, column], runs.get((width, method, depth))
            if run is not None:
                fan(axis, run, figures.line(column)["color"])
            axis.set_yscale("log")
            axis.set_title(f"{method}, {depth} layers", fontsize="small")
    figure.supxlabel("epoch", fontsize="medium")
    figure.supylabel("singular values", fontsize="medium")
    save_figure(figure, None, path)


def fan(axis: Any, run: Row, color: str) -> None:
    """Draws the median, the range of the middle 80 % and the full range, by epoch."""
    # After a divergence the parameters are not finite, and the ReLU of NaN has a derivative all the same.
    finite = run["singular_values"][: -1 if run["status"] == "diverged" else None]
    values = np.clip(np.array(finite, np.float64), FLOOR, CEILING)
    lowest, low, median, high, highest = values.T
    x = np.arange(len(values))
    axis.fill_between(x, lowest, highest, color=color, alpha=0.15, linewidth=0)
    axis.fill_between(x, low, high, color=color, alpha=0.35, linewidth=0)
    axis.plot(x, median, color=color, linewidth=1.5, marker="." if len(x) == 1 else None)

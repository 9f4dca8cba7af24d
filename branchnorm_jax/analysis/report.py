"""Plots of a run, from its log files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.analysis import figures
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.training.watch import FACTOR
from branchnorm_jax.workdir import Workdir


def draw_curves(workdir: Workdir) -> Path:
    """Plots loss, BLEU, alpha and learning rate to `<workdir>/curves.png`.

    Raises:
      UserError: if the run has no logged updates.
    """
    pyplot = figures.pyplot()

    updates = read_lines(workdir / "metrics.jsonl", ("nll", "alpha", "learning_rate"))
    validations = read_lines(workdir / "validation.jsonl", ("nll",))
    if not updates:
        raise UserError(f"{workdir / 'metrics.jsonl'}: nothing to draw; train first, with train.log_every > 0")

    def column(lines: list[dict], name: str) -> tuple[list[float], list[float]]:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        return [step for step, _ in points], [value for _, value in points]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    left.plot(*column(updates, "nll"), linewidth=0.8, color="tab:blue", label="training nll")
    if validations:
        left.plot(*column(validations, "nll"), "o-", markersize=3, color="tab:orange", label="validation nll")
    colors = {"nonfinite": ("not finite", "tab:red"), "spike": ("spike", "tab:purple"), "rollback": ("rollback", "k")}
    for event in read_lines(workdir / "events.jsonl", ("kind",)):
        if event["kind"] in colors:
            label, color = colors[event["kind"]]
            left.axvline(event["step"], color=color, linewidth=0.8, linestyle=":", label=label)
    left.set(xlabel="update", ylabel="nats per target token", ylim=(0, None))
    handles = dict(zip(*reversed(left.get_legend_handles_labels()), strict=True))
    left.legend(handles.values(), handles.keys(), loc="center right", frameon=False)
    if any("bleu" in line for line in validations):
        bleu = left.twinx()
        bleu.plot(*column(validations, "bleu"), "s--", markersize=3, color="tab:green")
        bleu.set(ylim=(0, 100))
        bleu.set_ylabel("validation BLEU", color="tab:green")
    right.plot(*column(updates, "alpha"), color="tab:red")
    right.set(xlabel="update", ylim=(0, 1.05))
    right.set_ylabel("alpha", color="tab:red")
    rate = right.twinx()
    rate.plot(*column(updates, "learning_rate"), color="tab:gray")
    rate.set(ylim=(0, None))
    rate.set_ylabel("learning rate", color="tab:gray")
    path = workdir / "curves.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


LAYER_STATISTICS = {
    "gradient": ("gradient norm", "log"),
    "update": ("relative update", "log"),
    "branch": ("branch / skip (RMS)", "log"),
    "cosine": ("cosine of input and output", "linear"),
    "sparsity": ("fraction of zero hidden units", "linear"),
    "similarity": ("token similarity", "linear"),
}
"""Name in layers.jsonl -> (title, colour scale)."""


def draw_layers(workdir: Workdir) -> Path:
    """Plots the statistics in layers.jsonl as heat maps to `<workdir>/layers.png`.

    The axes are layer and update. Non-finite values are red.

    Raises:
      UserError: if the run has no logged layer statistics.
    """
    lines = layer_lines(workdir)
    # Runs of earlier versions lack newer statistics.
    statistics = {
        name: style for name, style in LAYER_STATISTICS.items() if all(name in line["decoder"] for line in lines)
    }
    grid = {
        stack: [(f"{stack}: {title}", name, scale) for name, (title, scale) in statistics.items()]
        for stack in stacks_of(lines[0])
    }
    return _draw_heat_maps(lines, grid, workdir / "layers.png")


def draw_factors(workdir: Workdir) -> Path:
    """Plots the learned factors in layers.jsonl to `<workdir>/factors.png`, one row per stack.

    Heat maps show each factor by layer and update; the last panel shows all factors of the stack by layer in the last
    logged update. ReZero's Figure 6 (r) and Figure 3 of "Transformers without Tears" (g) are of these two kinds.

    Raises:
      UserError: if the run has no logged layer statistics, or its layers have no learned factors.
    """
    lines = layer_lines(workdir)
    # A run that an earlier version began has lines without factors.
    names = {stack: factor_names(lines[-1], stack) for stack in stacks_of(lines[-1])}
    lines = [line for line in lines if all(line[stack].keys() >= set(names[stack]) for stack in names)]
    grid = {
        stack: [(f"{stack}: {name.removeprefix(FACTOR)}", name, "linear") for name in own]
        for stack, own in names.items()
    }
    if not any(grid.values()):
        raise UserError(f"{workdir / 'layers.jsonl'}: the layers have no learned factors")
    return _draw_heat_maps(lines, grid, workdir / "factors.png", last=True)


def layer_lines(workdir: Workdir) -> list[dict[str, Any]]:
    """Returns the lines of layers.jsonl. Raises `UserError` if there are none."""
    lines = read_lines(workdir / "layers.jsonl", ("decoder",))
    if not lines:
        raise UserError(f"{workdir / 'layers.jsonl'}: nothing to draw; train first, with train.watch_every > 0")
    return lines


def stacks_of(line: Mapping[str, Any]) -> list[str]:
    """Returns the stacks in a line of layers.jsonl."""
    return [stack for stack in STACKS if stack in line]


def factor_names(line: Mapping[str, Any], stack: str) -> list[str]:
    """Returns the names of the learned factors of a stack in a line of layers.jsonl."""
    return [name for name in line[stack] if name.startswith(FACTOR)]


Grid = Mapping[str, list[tuple[str, str, str]]]
"""Stack -> heat maps as (title, name in layers.jsonl, colour scale)."""


def _draw_heat_maps(lines: list[dict[str, Any]], grid: Grid, path: Path, last: bool = False) -> Path:
    """Draws a row of heat maps for each stack. `last` adds a panel with the values of the last line by layer."""
    pyplot = figures.pyplot()
    from matplotlib.ticker import MaxNLocator

    columns = max(map(len, grid.values())) + last
    figure, axes = pyplot.subplots(
        len(grid), columns, figsize=(3 * columns, 2.5 * len(grid)), layout="constrained", squeeze=False
    )
    steps = [line["step"] for line in lines]
    for row, (stack, maps) in zip(axes, grid.items(), strict=True):
        for axis in row[len(maps) : columns - last]:
            axis.axis("off")
        for index, (title, name, scale) in enumerate(maps):
            # null in the file means not finite, and becomes NaN here.
            values = np.array([line[stack][name] for line in lines], np.float64).T
            _heat_map(figure, row[index], steps, values, scale)
            row[index].set_title(title, fontsize=9)
            if last:
                label = title.removeprefix(f"{stack}: ")
                row[-1].plot(np.arange(1, len(values) + 1), values[:, -1], **figures.line(index), label=label)
        if last and maps:
            row[-1].set(xlabel="layer")
            row[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
            row[-1].set_title(f"{stack}, update {steps[-1]}", fontsize=9)
            row[-1].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _heat_map(figure: Any, axis: Any, steps: list[int], values: np.ndarray, scale: str) -> None:
    """Draws values [L, lines] with their colour bar. Values that are not finite are red."""
    from matplotlib import colormaps, colors

    masked = np.ma.masked_invalid(values)
    finite = masked.compressed()
    if scale == "log":
        # Limit the colour scale to 8 decades: smaller values, and zeros, get the lowest colour.
        top = max(finite.max(initial=0), 1e-30)
        least = max(finite[finite > 0].min(initial=top), 1e-8 * top) / 1.01
        norm: colors.Normalize = colors.LogNorm(least, top)
        masked = np.maximum(masked, least)
    else:
        norm = colors.Normalize()
    # A column extends from its update to the next one.
    edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
    shades = colormaps["viridis"].with_extremes(bad="tab:red")
    mesh = axis.pcolormesh(edges, np.arange(len(values) + 1) + 0.5, masked, norm=norm, cmap=shades)
    figure.colorbar(mesh, ax=axis)
    axis.set(xlabel="update", ylabel="layer")

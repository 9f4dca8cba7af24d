"""Plots of a run, from its log files."""

from pathlib import Path

import numpy as np

from branchnorm_jax.analysis import figures
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.training.logs import read_lines
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
    """Plots layers.jsonl as heat maps to `<workdir>/layers.png`.

    The axes are layer and update. Non-finite values are red.

    Raises:
      UserError: if the run has no logged layer statistics.
    """
    pyplot = figures.pyplot()
    from matplotlib import colors

    lines = read_lines(workdir / "layers.jsonl", ("decoder",))
    if not lines:
        raise UserError(f"{workdir / 'layers.jsonl'}: nothing to draw; train first, with train.watch_every > 0")
    steps, stacks = [line["step"] for line in lines], [stack for stack in STACKS if stack in lines[0]]
    # Runs of earlier versions lack newer statistics.
    statistics = {
        name: style for name, style in LAYER_STATISTICS.items() if all(name in line["decoder"] for line in lines)
    }
    shades = pyplot.get_cmap("viridis").with_extremes(bad="tab:red")
    figure, axes = pyplot.subplots(
        len(stacks),
        len(statistics),
        figsize=(3 * len(statistics), 2.5 * len(stacks)),
        layout="constrained",
        squeeze=False,
    )
    for row, stack in zip(axes, stacks, strict=True):
        for axis, (name, (title, scale)) in zip(row, statistics.items(), strict=True):
            # null in the file means not finite, and becomes NaN here.
            values = np.ma.masked_invalid(np.array([line[stack][name] for line in lines], np.float64).T)
            finite = values.compressed()
            if scale == "log":
                # Limit the colour scale to 8 decades: smaller values, and zeros, get the lowest colour.
                top = max(finite.max(initial=0), 1e-30)
                least = max(finite[finite > 0].min(initial=top), 1e-8 * top) / 1.01
                norm: colors.Normalize = colors.LogNorm(least, top)
                values = np.maximum(values, least)
            else:
                norm = colors.Normalize()
            # A column extends from its update to the next one.
            edges = [*steps, steps[-1] + max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1)]
            mesh = axis.pcolormesh(edges, np.arange(len(values) + 1) + 0.5, values, norm=norm, cmap=shades)
            figure.colorbar(mesh, ax=axis)
            axis.set(title=f"{stack}: {title}", xlabel="update", ylabel="layer")
            axis.title.set_fontsize(9)
    path = workdir / "layers.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path

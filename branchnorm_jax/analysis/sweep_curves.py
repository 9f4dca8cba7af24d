"""The runs of a sweep over time: loss and gradient norm by update, and the learned factors of the layers at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.analysis import figures
from branchnorm_jax.analysis.report import factor_names, stacks_of
from branchnorm_jax.analysis.sweep import Run, name_of
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.training.watch import FACTOR
from branchnorm_jax.workdir import Workdir

CURVES = {
    "nll": ("training nll, nats per target token", "linear"),
    "grad_norm": ("gradient norm before clipping", "log"),
}
"""Field of metrics.jsonl -> (label, scale) of its panel."""

COLUMNS = 3
STYLES = ("-", "--", ":", "-.")
"""Of lines with equal colours."""

Points = tuple[Sequence[float], Sequence[float]]


def panels(workdir: Workdir) -> dict[str, Points]:
    """Returns the curves of a run by panel: the fields of `CURVES` by update, and each learned factor by layer.

    The factors are those of the last line of layers.jsonl. A run that has not begun has no curves.
    """
    updates, layers = read_lines(workdir / "metrics.jsonl", CURVES), read_lines(workdir / "layers.jsonl", ("decoder",))
    steps = [line["step"] for line in updates]
    # null in the file means not finite, and becomes a gap.
    curves: dict[str, Points] = {
        field: (steps, np.array([line[field] for line in updates], np.float64).tolist()) for field in CURVES if updates
    }
    for line in layers[-1:]:
        for stack in stacks_of(line):
            for name in factor_names(line, stack):
                values = np.array(line[stack][name], np.float64).tolist()
                curves[f"{stack}: {name.removeprefix(FACTOR)}"] = range(1, len(values) + 1), values
    return curves


def draw(folders: Mapping[str, tuple[Run, Workdir]], path: Path) -> None:
    """Draws the curves of all runs to `path`. Runs that differ only in the seed share colour and label.

    Without any logged update there is no figure.
    """
    runs = [
        (name_of({axis: value for axis, value in run.items() if axis != "train.seed"}, " "), panels(workdir))
        for run, workdir in folders.values()
    ]
    labels = list(dict.fromkeys(label for label, _ in runs))
    names = list(dict.fromkeys(name for _, curves in runs for name in curves))
    if not names:
        return
    pyplot = figures.pyplot()
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    rows = -(-len(names) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(4 * COLUMNS, 3 * rows), layout="constrained", squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for label, curves in runs:
            if name in curves:
                axis.plot(*curves[name], **look(labels.index(label)))
        label, scale = CURVES.get(name, (f"{name} at the end", "linear"))
        axis.set(xlabel="update" if name in CURVES else "layer", yscale=scale)
        axis.set_title(label, fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    lines = [Line2D([], [], **look(index)) for index in range(len(labels))]
    figure.legend(lines, labels, loc="outside lower center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def look(index: int) -> dict[str, Any]:
    """Returns the colour and the dashes of the runs with one label."""
    colours = len(figures.COLOURS)
    style = STYLES[index // colours % len(STYLES)]
    return {"color": figures.COLOURS[index % colours], "linestyle": style, "linewidth": 0.9}

"""The figure of a sweep: the main score of every run.

The first column of numbers, such as depth or learning rate, becomes the horizontal axis, and lines join its points.
Each setting of the other columns gets its own panel. Runs without such a number stand side by side, without lines.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from branchnorm_jax.analysis import figures
from branchnorm_jax.analysis.sweep import axes_of, name_of
from branchnorm_jax.analysis.sweep_results import TITLES, metric_of
from branchnorm_jax.options import fields, parse_depth

MARKERS = "os^Dv<>d"
"""Their number and that of the colours have no common divisor, so 56 methods have different pairs."""

STYLES = ("-", "--", ":")
"""Of lines with equal colours."""

DODGE = {True: (0.08, 0.5), False: (0.12, 0.8)}
"""Whether lines join the points -> horizontal distance of two methods in one setting, and the most for all of them.

The unit is the smallest distance of two settings.
"""

UNSET = "as configured"
"""The setting of a run that does not have an axis of the columns."""


class Panel(NamedTuple):
    """A part of the figure with its own horizontal axis.

    Attributes:
      title: setting of the columns other than the axis.
      axis: name of the horizontal axis; "" if the panel has unrelated settings.
      places: settings on the axis, as written -> their places; the smallest distance is 1.
      log: whether the places are proportional to logarithms.
      runs: (label of the method, setting on the axis) -> runs, which differ only in the seed.
    """

    title: str
    axis: str
    places: dict[str, float]
    log: bool
    runs: dict[tuple[str, str], list[Mapping[str, Any]]]

    @property
    def joined(self) -> bool:
        """Whether lines join the points."""
        return self.axis != "" and len(self.places) > 1


def panels(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[Panel]:
    """Distributes the runs over panels."""
    points = [axes_of(row) for row in rows]
    numeric = next((axis for axis in columns if numbers(axis, {p[axis]: None for p in points if axis in p})), "")
    others = [axis for axis in columns if axis != numeric and any(axis in point for point in points)]
    found: dict[tuple[str, str], dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
    for row, point in zip(rows, points, strict=True):
        across = {axis: point.pop(axis) for axis in columns if axis in point}
        label = name_of(point, " ") or "all"
        if numeric in across:
            title = "\n".join(f"{short(axis)}:\n{across.get(axis, UNSET)}" for axis in others)
            panel, setting = (title, numeric), across[numeric]
        else:
            panel, setting = ("", ""), name_of(across, "\n") or (UNSET if numeric or others else "")
        found.setdefault(panel, {}).setdefault((label, setting), []).append(row)
    return [
        Panel(title, axis, *places(axis, dict.fromkeys(setting for _, setting in runs)), runs)
        for (title, axis), runs in found.items()
    ]


def short(axis: str) -> str:
    """Returns the name of an axis in words, without its section."""
    return axis.rpartition(".")[2].replace("_", " ")


def numbers(axis: str, settings: Iterable[str]) -> dict[str, float]:
    """Returns the number of each setting; {} if they are not different finite numbers. A depth counts its layers."""
    values = {}
    for text in settings:
        layers = parse_depth(text) if axis == "depth" else None
        try:
            values[text] = float(sum(layers) if layers else text)
        except ValueError:
            return {}
    different = len(set(values.values())) == len(values)
    return values if different and all(map(math.isfinite, values.values())) else {}


def places(axis: str, settings: Iterable[str]) -> tuple[dict[str, float], bool]:
    """Places the settings of a panel on its axis, in increasing order.

    Numbers are placed on a logarithmic scale if they are spread more evenly there.
    """
    values = numbers(axis, settings) if axis else {text: float(i) for i, text in enumerate(settings)}
    values = dict(sorted(values.items(), key=lambda item: item[1]))
    scales = {False: list(values.values())}
    if axis and min(values.values()) > 0:
        scales[True] = [math.log(value) for value in values.values()]
    gaps = {log: [b - a for a, b in itertools.pairwise(scale)] or [1.0] for log, scale in scales.items()}
    log = max(scales, key=lambda log: min(gaps[log]) / max(gaps[log]))
    return {text: (x - scales[log][0]) / min(gaps[log]) for text, x in zip(values, scales[log], strict=True)}, log


def draw(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Plots the main score of the test set: means of the seeds, with bars from the lowest to the highest.

    Crosses mark runs without a score, triangles means above the axis.

    Args:
      rows: results of the runs, see `sweep.collect`.
      columns: axes of the table's columns.
      path: file of the figure.
    """
    pyplot = figures.pyplot()
    parts = panels(rows, columns)
    labels = list(dict.fromkeys(label for panel in parts for label, _ in panel.runs))
    widths = [max(panel.places.values()) + 1.2 for panel in parts]
    figure, axes = pyplot.subplots(
        *(1, len(parts)),
        figsize=(min(1.8 * sum(widths), 14), max(4.0, 0.25 * len(labels))),
        width_ratios=widths,
        sharey=True,
        squeeze=False,
    )
    metric = metric_of(rows)
    higher = False
    bottom, top = limits([row[metric] for row in rows if row[metric] is not None], metric)
    for axis, panel, width in zip(axes[0], parts, widths, strict=True):
        higher |= plot(axis, panel, metric, labels, (bottom - 0.05 * (top - bottom), top))
        axis.set_title(panel.title, fontsize="medium")
        axis.set(xlabel=axis_name(panel), xlim=(-0.6, width - 0.6))
        axis.set_xticks(list(panel.places.values()), list(panel.places))
        axis.grid(linewidth=0.5, color="0.88")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    unscored = list(dict.fromkeys(row["status"] for row in rows if row[metric] is None))
    seeds = any(len(runs) > 1 for panel in parts for runs in panel.runs.values())
    axes[0, 0].set_ylim(bottom - (0.1 if unscored else 0.03) * (top - bottom), top)
    axes[0, 0].set_ylabel(TITLES[metric] + (", mean and range of seeds" if seeds else ""))
    handles = axes[0, 0].get_legend_handles_labels()[0]
    if unscored:
        handles += axes[0, 0].plot([], [], "x", color="0.2", label=f"no score: {', '.join(unscored)}")
    if higher:
        handles += axes[0, 0].plot([], [], "^", color="0.2", label=f"above {top:.3g}")
    axes[0, -1].legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def limits(scores: Sequence[float], metric: str) -> tuple[float, float]:
    """Returns the range of the vertical axis. More than twice the fewest bits per byte are outside of it."""
    if metric == "bits_per_byte" and scores:
        return 0.97 * min(scores), min(1.05 * max(scores), 2 * min(scores))
    return 0.0, max(5.0 if metric == "bleu" else 0.0, 1.05 * max(scores, default=0.0)) or 1.0


def plot(axis: Any, panel: Panel, metric: str, labels: Sequence[str], ends: tuple[float, float]) -> bool:
    """Plots a panel. Each label has its own horizontal offset, so that equal scores do not hide each other.

    Returns whether a mean is above the axis.

    Args:
      axis: Matplotlib axes.
      panel: what to plot.
      metric: the score to plot.
      labels: all labels of the figure, in the order of the legend.
      ends: heights of the crosses, and of the triangles for means above the axis.
    """
    here = list(dict.fromkeys(label for label, _ in panel.runs))
    higher = False
    most_step, room = DODGE[panel.joined]
    step = min(most_step, room / len(here))
    for index, label in enumerate(labels):
        colour = figures.COLOURS[index % len(figures.COLOURS)]
        style = STYLES[index // len(figures.COLOURS) % len(STYLES)] if panel.joined else "none"
        shift = step * (here.index(label) - (len(here) - 1) / 2) if label in here else 0.0
        x_values, means = [], []
        for setting, place in panel.places.items():
            runs = panel.runs.get((label, setting), [])
            scores = [run[metric] for run in runs if run[metric] is not None]
            if len(scores) < len(runs):
                axis.plot(place + shift, ends[0], "x", color=colour)
            if scores:
                x_values.append(place + shift)
                means.append(statistics.mean(scores))
                if means[-1] > ends[1]:
                    axis.plot(x_values[-1], ends[1], "^", color=colour, clip_on=False)
                    higher = True
                axis.vlines(x_values[-1], min(scores), max(scores), color=colour, linewidth=10, alpha=0.35)
        look = dict(color=colour, marker=MARKERS[index % len(MARKERS)], markeredgecolor="white", markeredgewidth=0.6)
        axis.plot(x_values, means, **look, markersize=7.5, linestyle=style, linewidth=1.2, label=label)
    return higher


def axis_name(panel: Panel) -> str:
    """Returns the label of the horizontal axis, with its unit."""
    if not panel.axis:
        return ""
    unit = "layers" if panel.axis == "depth" else dict(fields())[panel.axis].metadata["unit"]
    notes = ", ".join(filter(None, (unit, "log scale" if panel.log else "")))
    return short(panel.axis) + (f" ({notes})" if notes else "")

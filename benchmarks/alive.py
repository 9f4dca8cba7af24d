"""Compares linear with adaptive alpha: layers that get a gradient, and the loss.

    python -m benchmarks.alive runs/sweep_adaptive

Reads the runs of configs/sweep_adaptive.py. A layer is alive if its gradient is above 1/1000 of the largest gradient of
its stack.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import save
from branchnorm_jax import config as configs
from branchnorm_jax.analysis import figures
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.training.watch import WEAK

SHOWN = 9
"""Number of updates in the table, evenly spread over the run."""


def alive(line: dict[str, Any], stack: str) -> float:
    """Returns the fraction of a stack's layers that are alive in one line of layers.jsonl."""
    gradient = np.array([value or 0.0 for value in line[stack]["gradient"]])
    return float((gradient > WEAK * gradient.max()).mean())


def read(folder: Path) -> dict[str, Any]:
    """Reads alpha, the fractions of living layers and the last validation loss of one run."""
    metrics, layers = (read_lines(folder / f"{name}.jsonl", ()) for name in ("metrics", "layers"))
    alphas = {line["step"]: line["alpha"] for line in metrics}
    return {
        "steps": [line["step"] for line in layers],
        "alpha": [alphas.get(line["step"]) for line in layers],
        **{stack: [alive(line, stack) for line in layers] for stack in STACKS},
        "valid_nll": read_lines(folder / "validation.jsonl", ("nll",))[-1]["nll"],
    }


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plots alpha and the fraction of living layers; thin lines are seeds, thick lines are means."""
    pyplot = figures.pyplot()
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    titles = {"alpha": "alpha"} | {stack: f"fraction of {stack} layers alive" for stack in STACKS}
    for color, (schedule, seeds) in zip(figures.COLOURS, runs.items(), strict=False):
        for axis, (name, title) in zip(axes, titles.items(), strict=True):
            values = np.array([run[name] for run in seeds], np.float64)
            axis.plot(seeds[0]["steps"], values.T, color=color, linewidth=0.6, alpha=0.5)
            axis.plot(seeds[0]["steps"], values.mean(0), color=color, linewidth=2, label=schedule)
            axis.set(title=title, xlabel="update", ylim=(-0.03, 1.03))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Prints the table, draws the figure and saves the values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="workdir of the sweep")
    folder = parser.parse_args().sweep
    runs: dict[str, list[dict[str, Any]]] = {"linear": [], "adaptive": []}
    for path in sorted(folder.glob("*/status.json")):
        runs[configs.load(path.parent / "config.json").model.alpha_schedule].append(read(path.parent))
    draw(runs, folder / "alive.png")
    steps = runs["linear"][0]["steps"]
    picked = np.linspace(0, len(steps) - 1, SHOWN).round().astype(int)
    print("| " + " | ".join(["update", *(str(steps[i]) for i in picked)]) + " |", "|---" * (SHOWN + 1) + "|", sep="\n")
    for name in ("alpha", *STACKS):
        for schedule, seeds in runs.items():
            means = np.array([run[name] for run in seeds], np.float64).mean(0)
            print(f"| {schedule}: {name} | " + " | ".join(f"{means[i]:.2f}" for i in picked) + " |")
    for schedule, seeds in runs.items():
        print(f"{schedule}: validation nll {', '.join(format(run['valid_nll'], '.3f') for run in seeds)}")
    save("alive", runs)


if __name__ == "__main__":
    main()

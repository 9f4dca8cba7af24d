"""Shows when and why an encoder collapses: similarity of its tokens, gradient, drift, and the gain from the source.

    python -m benchmarks.collapse runs/collapse [more sweeps]

Reads the runs of configs/sweep_collapse.py. For each run, over the updates:

- the similarity of the tokens of a sentence after each encoder layer (1: all tokens have the same vector),
- the gradient of the encoder's first layer divided by the gradient of its last layer, and the ratio that the theory of
  dead layers predicts from the branches: the product of (1 + r^2)^(-1/2) over the sub-layers, r = rms(b F) / rms(a x),
- the drift of the encoder's matrices, |W_t - W_0| / |W_0|, from the remaining checkpoints,
- source_gain: the nll with the sources of other sentences minus the nll.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import save
from branchnorm_jax import config as configs
from branchnorm_jax.analysis import figures
from branchnorm_jax.analysis.sweep_results import score_of
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.training.state import INIT_STREAM
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir

READS = 0.05
"""Threshold of `source_gain`, in nats per target token, above which the model reads its source."""

SUBLAYERS = 2
"""Number of sub-layers in an encoder layer."""


def matrices(params: Any) -> np.ndarray:
    """Returns the matrices of each encoder layer as one vector, [L, parameters]."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params["encoder"]) if leaf.ndim == 3]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def drift(config: Config, workdir: Workdir, model: Transformer, steps: list[int]) -> list[float]:
    """Returns |W_t - W_0| / |W_0| of the encoder's matrices at each step, the mean over layers."""
    key = jax.random.fold_in(jax.random.key(config.train.seed), INIT_STREAM)
    start = matrices(jax.jit(model.init)(key))
    drifts = []
    for step in steps:
        trained = matrices(restore_model(config, workdir, model, str(step))[0])
        drifts.append(float((np.linalg.norm(trained - start, axis=1) / np.linalg.norm(start, axis=1)).mean()))
    return drifts


def read(folder: Path) -> dict[str, Any]:
    """Reads the measurements of one run."""
    workdir = Workdir(folder)
    config = configs.load(folder / "config.json")
    layers, validations = (read_lines(folder / f"{name}.jsonl", ()) for name in ("layers", "validation"))
    _, model = network(config, workdir)
    encoder = {name: np.array([line["encoder"][name] for line in layers], float) for name in layers[0]["encoder"]}
    checkpoints = Checkpoints(folder / "checkpoints", config.train, print, read_only=True).steps()
    reading = [line["step"] for line in validations if line["source_gain"] > READS]
    gradient = encoder["gradient"]
    return {
        "config": {
            **{name: getattr(config.model, name) for name in ("method", "alpha_steps", "alpha_end")},
            **{name: getattr(config.train, name) for name in ("branch_update_power", "seed", "optimizer")},
            **{name: getattr(config.train, name) for name in ("learning_rate", "batch_tokens", "encoder_rate")},
            "encoder_rate_steps": config.train.encoder_rate_steps,
        },
        "steps": [line["step"] for line in layers],
        "similarity": encoder["similarity"].round(4).tolist(),
        "gradient_ratio": (gradient[:, 0] / np.maximum(gradient[:, -1], 1e-30)).tolist(),
        "predicted_ratio": np.exp(-SUBLAYERS / 2 * np.log1p(encoder["branch"] ** 2).sum(1)).tolist(),
        "checkpoints": checkpoints,
        "drift": drift(config, workdir, model, checkpoints),
        "validated": [line["step"] for line in validations],
        "nll": [line["nll"] for line in validations],
        "source_gain": [line["source_gain"] for line in validations],
        "reads_from": reading[0] if reading else None,
        "bleu": score_of(workdir, "bleu") if (folder / "results.json").exists() else None,
        "status": json.loads((folder / "status.json").read_text())["status"],
    }


def spread(values: list[float], form: str) -> str:
    """Formats the mean over the seeds, with their range if there are several."""
    mean = format(sum(values) / len(values), form)
    low, high = format(min(values), form), format(max(values), form)
    return mean if low == high else f"{mean} ({low} to {high})"


def row(name: str, seeds: list[dict[str, Any]]) -> str:
    """Formats one line of the table: a setting and its seeds.

    "a to b" gives the extreme value of a quantity and its last value. A cell without a value is empty.
    """
    # The first line of layers.jsonl belongs to untrained parameters; the gradient ratio leaves it out.
    similarity = [np.array(run["similarity"])[:, -1] for run in seeds]
    ratio = [np.array(run["gradient_ratio"])[1:] for run in seeds]
    reads = sorted({str(run["reads_from"] or "never") for run in seeds}, key=lambda text: (text == "never", text))
    scores = [run["bleu"] for run in seeds if run["bleu"] is not None]
    drifts = [run["drift"] for run in seeds if run["drift"]]
    steps = sorted({run["validated"][-1] for run in seeds})
    cells = (
        name,
        str(len(seeds)),
        ", ".join(reads),
        spread([run["nll"][-1] for run in seeds], ".3f"),
        ", ".join(f"{step:,}" for step in steps),
        spread(scores, ".1f") if scores else "",
        f"{max(values.max() for values in similarity):.4f} to {max(values[-1] for values in similarity):.2f}",
        f"{min(values.min() for values in ratio):.1e} to {min(values[-1] for values in ratio):.1e}",
        f"{np.mean([run['predicted_ratio'][-1] for run in seeds]):.2g}",
        ", ".join(f"{np.mean([drift[which] for drift in drifts]):.2f}" for which in (0, -1)) if drifts else "",
    )
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    *("run", "seeds", "reads its source from update", "validation nll", "at update", "test BLEU"),
    *("similarity, highest to last", "gradient first / last layer, lowest to last", "predicted"),
    "drift, first and last checkpoint",
)

PANELS = (
    ("steps", "similarity", "token similarity of the encoder's output", "linear"),
    ("steps", "gradient_ratio", "encoder gradient, first layer / last layer", "log"),
    ("checkpoints", "drift", "drift of the encoder's matrices", "linear"),
    ("validated", "source_gain", "source gain (nats)", "linear"),
    ("validated", "nll", "validation nll (nats)", "log"),
)


def by_setting(runs: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Groups runs by setting. The runs of a setting differ only in the seed."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for name, run in runs.items():
        settings.setdefault(re.sub(r"-?seed=\d+", "", name), []).append(run)
    return settings


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Plots one panel per quantity, one line per run and one colour per setting."""
    pyplot = figures.pyplot()
    from matplotlib import ticker

    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for axis, (x, y, title, scale) in zip(axes.flat, PANELS, strict=False):
        for index, (name, seeds) in enumerate(by_setting(runs).items()):
            for seed, run in enumerate(seeds):
                values = np.array(run[y], float)
                values = values[:, -1] if values.ndim == 2 else values
                if scale == "log":
                    # Before the first update alpha and the gradients of BranchNorm's branches are 0.
                    values = np.where(values == 0, np.nan, values)
                axis.plot(run[x], values, **figures.line(index), label=None if seed else name)
        axis.set(title=title, xlabel="update", yscale=scale)
    nll = axes.flat[len(PANELS) - 1].yaxis
    nll.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    nll.set_major_formatter("{x:g}")
    nll.set_minor_formatter(ticker.NullFormatter())
    axes[1, 2].axis("off")
    axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Prints the table, draws the figure and saves the values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sweeps", type=Path, nargs="+", help="workdirs of sweeps; runs without a test score are included"
    )
    parser.add_argument("--name", default="collapse", help="name of the results file")
    arguments = parser.parse_args()
    runs = {}
    for sweep in arguments.sweeps:
        for status in sorted(sweep.glob("*/status.json")):
            if (name := status.parent.name) in runs:
                parser.error(f"{status.parent}: another sweep has a run of this name, too")
            runs[name] = read(status.parent)
    if not runs:
        parser.error("these folders have no runs of a sweep")
    print(f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), sep="\n")
    for name, seeds in by_setting(runs).items():
        print(row(name, seeds))
    draw(runs, arguments.sweeps[0] / "collapse.png")
    save(arguments.name, {"runs": [{"run": name, **run} for name, run in runs.items()]})


if __name__ == "__main__":
    main()

"""Collects how the residual weights of ReZero move in the runs of a sweep: Figure 6 of ReZero's paper.

    python -m benchmarks.residual_weights runs/sweep_lm

Writes benchmarks/results/residual_weights.csv: the columns of sweep.csv for each ReZero run that has ended, and, from
its layers.jsonl,

- weight_peak: the largest mean of |r| over all layers, and peak_update, the update in which it is reached;
- weight_end: this mean in the last line, divided by the peak;
- top_delay: updates until the upper third of the layers reaches 90 % of its own peak, divided by those of the lower
  third; below 1, the upper layers come first;
- weight_spread: largest |r| of a layer in the last line, divided by the smallest.

`--mode=analyze` draws the heat map of a run to factors.png.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import RESULTS
from branchnorm_jax.analysis.sweep_results import from_csv, to_csv
from branchnorm_jax.training.logs import read_lines

WEIGHTS = "factor/branch"
"""Name of r in layers.jsonl."""

NEAR = 0.9
"""Share of its peak at which a group of layers counts as grown."""


def measure(steps: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Returns the quantities above.

    Args:
      steps: the updates of the lines, [T].
      weights: |r| in these updates, [T, L].
    """
    mean = weights.mean(1)
    third = max(1, weights.shape[1] // 3)

    def grown(layers: np.ndarray) -> float:
        """The first update in which the mean of some layers, [T], is near its peak."""
        return float(steps[np.argmax(layers >= NEAR * layers.max())])

    lower, upper = grown(weights[:, :third].mean(1)), grown(weights[:, -third:].mean(1))
    return {
        "weight_peak": mean.max(),
        "peak_update": steps[mean.argmax()],
        "weight_end": mean[-1] / mean.max(),
        "top_delay": upper / lower,
        "weight_spread": weights[-1].max() / weights[-1].min(),
    }


def collect(sweep: Path) -> list[dict[str, Any]]:
    """Returns the rows of the ReZero runs of a sweep that have ended, with the quantities above."""
    rows = []
    for row in from_csv((sweep / "sweep.csv").read_text(encoding="utf-8")):
        if row["method"] != "rezero" or row["status"] != "done":
            continue
        lines = read_lines(sweep / row["run"] / "layers.jsonl", ("decoder",))
        steps = np.array([line["step"] for line in lines])
        rows.append(row | measure(steps, np.abs([line["decoder"][WEIGHTS] for line in lines])))
    return rows


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="workdirs of sweeps of language models")
    arguments = parser.parse_args()
    path = RESULTS / "residual_weights.csv"
    path.write_text(to_csv([row for sweep in arguments.sweeps for row in collect(sweep)]), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()

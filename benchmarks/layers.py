"""Collects layer statistics of the runs of a sweep: similarity of adjacent layers and sparsity of the activations.

    python main.py --mode=sweep --config=configs/sweep_methods.py --workdir=runs/methods
    python -m benchmarks.layers runs/methods

Writes benchmarks/results/layers.csv: the columns of sweep.csv, and for each stack the mean over its layers at the last
line of layers.jsonl, of the cosine between a layer's input and output (Figure 8 of the BranchNorm paper) and of the
fraction of hidden feed-forward units that are 0 (Figure 9).
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from branchnorm_jax.analysis.sweep_results import from_csv, to_csv
from branchnorm_jax.training.logs import read_lines

QUANTITIES = "cosine", "sparsity"


def measure(workdir: Path) -> dict[str, float]:
    """Returns the means over layers, such as "encoder_cosine", in the last line of a run's layers.jsonl."""
    *_, last = read_lines(workdir / "layers.jsonl", ())
    stacks = [stack for stack, values in last.items() if isinstance(values, dict)]
    return {f"{stack}_{name}": statistics.mean(last[stack][name]) for stack in stacks for name in QUANTITIES}


def collect(sweep: Path) -> list[dict[str, Any]]:
    """Returns the rows of a sweep that have ended, with their layer statistics."""
    rows = from_csv((sweep / "sweep.csv").read_text(encoding="utf-8"))
    return [row | measure(sweep / row["run"]) for row in rows if row["status"] == "done"]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="workdir of the sweep, or of its parts")
    parser.add_argument("--name", default="layers", help="name of the result file")
    arguments = parser.parse_args()
    path = RESULTS / f"{arguments.name}.csv"
    path.write_text(to_csv([row for sweep in arguments.sweeps for row in collect(sweep)]), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()

"""Gradient descent on a network with one neuron per layer (*ReZero is All You Need*, Section 3.1 and Figure 2).

    python -m experiments.toy --table=benchmarks/results/experiments_toy.csv

L layers that share one weight compute x_L = (1 + a w)^L x_0. The residual network fixes a = 1 and learns w, ReZero
starts with a = 0 and learns a and w; both start with w = 1. The cost is (x_L - y)^2 / 2 with x_0 = 1 and y = 2; the
copy of the paper that could be read lacks its formulas. Takes seconds on one CPU core.

The table has, for each method and depth, the fewest updates that reach a cost below 10^-6 among 241 learning rates
between 10^-60 and 1, and the learning rate with which they do. Both are empty if no rate does within 10,000 updates.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

DEPTHS = (2, 4, 8, 16, 32, 64)
RATES = np.logspace(-60, 0, 241)
UPDATES, TARGET, COST = 10_000, 2.0, 1e-6


def updates_needed(rezero: bool, depth: int, rates: np.ndarray) -> np.ndarray:
    """Returns the number of updates until the cost is below `COST`, for each learning rate [R]; infinity for never."""
    a, w = np.full_like(rates, 0.0 if rezero else 1.0), np.ones_like(rates)
    needed = np.full_like(rates, np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        for update in range(UPDATES + 1):
            error = (1 + a * w) ** depth - TARGET
            needed[(error**2 / 2 < COST) & np.isinf(needed)] = update
            slope = rates * error * depth * (1 + a * w) ** (depth - 1)
            a, w = (a - slope * w if rezero else a), w - slope * a
    return needed


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=Path("runs/toy.csv"), help="file of the results (runs/toy.csv)")
    table = parser.parse_args().table
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", "depth", "updates", "learning_rate"))
        for method in ("residual", "rezero"):
            for depth in DEPTHS:
                needed = updates_needed(method == "rezero", depth, RATES)
                best = int(np.argmin(needed))
                found = np.isfinite(needed[best])
                writer.writerow((method, depth, *((int(needed[best]), f"{RATES[best]:.3g}") if found else ("", ""))))
    print(table.read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()

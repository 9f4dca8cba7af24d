"""Finds the learning rate at which each run of a range test diverges.

    python -m benchmarks.divergence runs/divergence

Reads the runs of configs/sweep_divergence.py. A run diverges at the first update where the mean loss of the last ten
updates is not finite, or at least 1 nat above its previous minimum. The table also has the learning rate at that
minimum.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import save
from branchnorm_jax import config as configs
from branchnorm_jax.training.logs import read_lines

WINDOW, RISE = 10, 1.0
"""Number of updates in a mean loss, and the rise in nats that counts as divergence."""


def breaks(losses: np.ndarray, rates: np.ndarray) -> tuple[float | None, float]:
    """Returns the learning rates at which a run diverges (or None) and at which its loss is lowest."""
    means = np.convolve(np.where(np.isfinite(losses), losses, np.inf), np.ones(WINDOW) / WINDOW, "valid")
    rates = rates[WINDOW - 1 :]
    lowest = np.minimum.accumulate(means)
    broken = np.flatnonzero(~(means < lowest + RISE))
    end = broken[0] if broken.size else len(means)
    return float(rates[end]) if broken.size else None, float(rates[np.argmin(means[: end or 1])])


def main() -> None:
    """Prints the table and saves the values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="workdirs of sweeps")
    sweeps = parser.parse_args().sweeps
    runs: list[dict[str, Any]] = []
    print("| run | depth | lowest loss | at rate | diverges at rate |", "|---|---|---|---|---|", sep="\n")
    for sweep in sweeps:
        for path in sorted(sweep.glob("*/metrics.jsonl")):
            lines, model = read_lines(path, ("learning_rate",)), configs.load(path.parent / "config.json").model
            if len(lines) < WINDOW:
                parser.error(f"{path}: a run needs at least {WINDOW} logged updates")
            losses = np.array([math.nan if line["loss"] is None else line["loss"] for line in lines])
            rates = np.array([line["learning_rate"] for line in lines])
            rate, best = breaks(losses, rates)
            figures = {"breaks_at": rate, "rate_of_lowest_loss": best, "loss": losses.round(4).tolist()}
            runs.append({"run": path.parent.name, "depth": model.depth, **figures, "rate": rates.tolist()})
            shown = "none up to " + format(rates[-1], ".2g") if rate is None else format(rate, ".2e")
            print(f"| {path.parent.name} | {model.depth} | {np.nanmin(losses):.3f} | {best:.2e} | {shown} |")
    if not runs:
        parser.error("these folders have no runs of a sweep")
    save("divergence", {"runs": runs})


if __name__ == "__main__":
    main()

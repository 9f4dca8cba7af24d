r"""Counts the updates that the language models of a sweep need to reach a loss: Table 2 of ReZero's paper.

    python main.py --mode=sweep --config=configs/sweep_lm.py --workdir=runs/iterations --config.data.path=<folder> \
        --config.train.eval_every=50 --config.sweep.grid="method=pre_ln,rezero depth=12L"
    python -m benchmarks.iterations runs/iterations --bits=3

Writes benchmarks/results/iterations.csv: the columns of sweep.csv and `iterations`, the first validation at most at the
given bits per byte; no value if a run has not reached it.
"""

import argparse
import math
from pathlib import Path

from benchmarks.measure import RESULTS
from branchnorm_jax.analysis.sweep_results import from_csv, to_csv
from branchnorm_jax.training.logs import read_lines


def iterations(workdir: Path, bits: float) -> dict[str, int]:
    """Returns the first update whose validation has at most `bits` per byte of a byte vocabulary, as a column."""
    lines = read_lines(workdir / "validation.jsonl", ("nll",))
    reached = [line["step"] for line in lines if line["nll"] is not None and line["nll"] <= bits * math.log(2)]
    return {"iterations": reached[0]} if reached else {}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="workdir of the sweep")
    parser.add_argument("--bits", type=float, required=True, help="bits per byte")
    arguments = parser.parse_args()
    rows = from_csv((arguments.sweep / "sweep.csv").read_text(encoding="utf-8"))
    ended = [row for row in rows if row["status"] != "not run"]
    found = [row | iterations(arguments.sweep / row["run"], arguments.bits) for row in ended]
    path = RESULTS / "iterations.csv"
    path.write_text(to_csv(found), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()

r"""Draws the figure of a sweep from its table of results.

python -m benchmarks.sweep_figure benchmarks/results/sweep_methods.csv docs/sweep_methods.png
python -m benchmarks.sweep_figure benchmarks/results/sweep_lm.csv docs/sweep_lm.png --columns=train.learning_rate,depth
"""

import argparse
from pathlib import Path

from branchnorm_jax.analysis.sweep_figure import draw
from branchnorm_jax.analysis.sweep_results import from_csv


def main() -> None:
    """Reads the table and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="sweep.csv of a sweep")
    parser.add_argument("figure", type=Path, help="file of the figure, such as sweep.png")
    parser.add_argument("--columns", default="depth", help="see the option sweep.columns")
    arguments = parser.parse_args()
    draw(from_csv(arguments.table.read_text(encoding="utf-8")), arguments.columns.split(","), arguments.figure)


if __name__ == "__main__":
    main()

"""Merges the sweeps of one table of "Transformers without Tears" into a file of results, and prints the table.

    python -m benchmarks.tears table3 en-he=runs/tears_table3_en-he en-vi=runs/tears_table3_en-vi

The file is benchmarks/results/tears_<table>.csv: the rows of each sweep.csv with the language pair, and the smoothed
perplexities of the paper's Table 8. The perplexity of the training text is that of the last 100 updates, with dropout;
the other is that of the validation text at its lowest.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from branchnorm_jax.analysis.sweep import axes_of, from_csv, name_of, to_csv
from branchnorm_jax.training.logs import read_lines

UPDATES = 100
SCORES = {
    "bleu": (1, "test BLEU"),
    "train_perplexity": (1, "training perplexity"),
    "valid_perplexity": (1, "validation perplexity"),
}
"""Column of the file -> (decimals, title) of a column of the table."""


def rows_of(pair: str, folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a sweep. Runs that have not ended have no perplexities."""
    rows = []
    for row in from_csv((folder / "sweep.csv").read_text(encoding="utf-8")):
        perplexities = {}
        if row["status"] == "done":
            updates = read_lines(folder / row["run"] / "metrics.jsonl", ("loss",))
            last = [line["loss"] for line in updates if line["step"] >= updates[-1]["step"] - UPDATES]
            lowest = min(line["loss"] for line in read_lines(folder / row["run"] / "validation.jsonl", ("loss",)))
            perplexities = {"train_perplexity": math.exp(statistics.mean(last)), "valid_perplexity": math.exp(lowest)}
        rows.append({"pair": pair, **row, **perplexities})
    return rows


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table: mean over the seeds that have ended, range in brackets, and the p-values of the seeds."""
    titles = ["pair", "run", *(title for _, title in SCORES.values()), "p against the baseline", "seeds"]
    text = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["pair"], name_of(axes_of(row), " ")), []).append(row)
    for (pair, name), found in cells.items():
        ended = [row for row in found if row["status"] == "done" and row["bleu"] is not None]
        columns = [spread([row[score] for row in ended], digits) for score, (digits, _) in SCORES.items()]
        p_values = ", ".join(f"{float(row['p_value']):.3f}" for row in ended if row.get("p_value"))
        others = ", ".join(dict.fromkeys(row["status"] for row in found if row not in ended))
        seeds = f"{len(ended)} of {len(found)}" + (f", the others {others}" if others else "")
        text.append(f"| {' | '.join([pair, f'`{name}`', *columns, p_values, seeds])} |")
    return "\n".join(text) + "\n"


def spread(values: Sequence[float], digits: int) -> str:
    """Returns the mean of the values and their range; "" without values."""
    if not values:
        return ""
    ends = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{ends}"


def main() -> None:
    """Reads the sweeps, writes the file and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="name of the file, such as table3")
    parser.add_argument("sweeps", nargs="+", help="workdirs of sweeps, as pair=workdir")
    arguments = parser.parse_args()
    pairs = (sweep.partition("=") for sweep in arguments.sweeps)
    rows = [row for pair, _, folder in pairs for row in rows_of(pair, Path(folder))]
    path = RESULTS / f"tears_{arguments.table}.csv"
    path.write_text(to_csv(rows), encoding="utf-8")
    print(to_markdown(rows), path, sep="\n")


if __name__ == "__main__":
    main()

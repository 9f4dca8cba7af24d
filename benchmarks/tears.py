"""Merges the sweeps of one table of "Transformers without Tears" into a file of results, and prints the table.

    python -m benchmarks.tears table3 en-he=runs/tears_table3_en-he en-vi=runs/tears_table3_en-vi

The file is benchmarks/results/tears_<table>.csv. It has the rows of each sweep.csv with the pair, and the values below.
Rows of other language pairs, and of runs that have not ended in these sweeps, stay as they were.

- the smoothed perplexities of the paper's Table 8, of the training text in the last 100 updates, with dropout, and of
  the validation text at its lowest; the latter also at a quarter of the updates, for Figure 1;
- the gradient norm of Figure 2: its median after a quarter of the updates, and the ratio of its largest value to it;
- the learned g of ScaleNorm in Figures 3 and 4: of the last layer divided by that of the first one, the mean over the
  last layers of the decoder, and before the output layer.
"""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import RESULTS
from branchnorm_jax import config as configs
from branchnorm_jax.analysis.sweep import axes_of, name_of
from branchnorm_jax.analysis.sweep_results import from_csv, to_csv
from branchnorm_jax.training import trained
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.workdir import Workdir

UPDATES = 100
SCORES = {
    "bleu": (1, "test BLEU"),
    "train_perplexity": (1, "training perplexity"),
    "valid_perplexity": (1, "validation perplexity"),
}
"""Column of the file -> (decimals, title) of a column of the table."""


def rows_of(pair: str, folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a sweep. Runs that have not ended have no values of their own."""
    rows = []
    for row in from_csv((folder / "sweep.csv").read_text(encoding="utf-8")):
        workdir, measured = folder / row["run"], {}
        if row["status"] == "done":
            measured = curves(workdir)
            if row.get("model.norm") == "scale_norm":
                measured |= learned_gains(workdir)
        rows.append({"pair": pair, **row, **measured})
    return rows


def curves(workdir: Path) -> dict[str, float]:
    """Returns the perplexities and gradient norms of a run."""
    updates = read_lines(workdir / "metrics.jsonl", ("loss", "grad_norm"))
    validations = read_lines(workdir / "validation.jsonl", ("loss",))
    end = validations[-1]["step"]
    last = [line["loss"] for line in updates if line["step"] >= updates[-1]["step"] - UPDATES]
    norms = [line["grad_norm"] for line in updates if line["step"] >= end / 4]
    early = next(line["loss"] for line in validations if line["step"] >= end / 4)
    return {
        "train_perplexity": math.exp(statistics.mean(last)),
        "valid_perplexity": math.exp(min(line["loss"] for line in validations)),
        "early_perplexity": math.exp(early),
        "gradient_norm": statistics.median(norms),
        "gradient_spike": max(norms) / statistics.median(norms),
    }


def learned_gains(workdir: Path) -> dict[str, float]:
    """Returns the g of ScaleNorm at the end of a run: its growth with depth, and in the last layers."""
    run = Workdir.open(str(workdir))
    config = configs.load(run / "config.json")
    params = trained.restore_model(config, run, trained.network(config, run)[1], "last")[0]

    def gains(stack: str, *sublayers: str) -> Any:
        """Each layer's g, [L], the mean over sub-layers."""
        return np.mean([params[stack][f"{name}_pre_norm"]["scale"] for name in sublayers], axis=0)

    encoder, decoder = (gains(stack, "self", "ffn") for stack in ("encoder", "decoder"))
    cross = gains("decoder", "cross")
    return {
        "encoder_gain_growth": encoder[-1] / encoder[0],
        "decoder_gain_growth": decoder[-1] / decoder[0],
        "cross_gain_growth": cross[-1] / cross[0],
        "late_decoder_gain": decoder[len(decoder) // 2 :].mean(),
        "output_gain": float(params["decoder_norm"]["scale"]),
    }


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table: mean over the seeds that have ended, range in brackets, and the p-values of the seeds."""
    titles = ["pair", "run", *(title for _, title in SCORES.values()), "p against the baseline", "seeds"]
    text = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["pair"], name_of(axes_of(row), " ")), []).append(row)
    for (pair, name), found in cells.items():
        ended = [row for row in found if row["status"] == "done" and row["bleu"] is not None]
        columns = [spread([float(row[score]) for row in ended], digits) for score, (digits, _) in SCORES.items()]
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
    path = RESULTS / f"tears_{arguments.table}.csv"
    found = from_csv(path.read_text(encoding="utf-8")) if path.exists() else []
    for pair, _, folder in (sweep.partition("=") for sweep in arguments.sweeps):
        found += rows_of(pair, Path(folder))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in found:
        key = row["pair"], row["run"]
        if key not in rows or row["status"] in ("done", "diverged"):
            rows[key] = row
    path.write_text(to_csv(list(rows.values())), encoding="utf-8")
    print(to_markdown(list(rows.values())), path, sep="\n")


if __name__ == "__main__":
    main()

"""The results of a sweep: scores, differences from the baseline, and the table."""

import csv
import dataclasses
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from branchnorm_jax import config as configs
from branchnorm_jax.analysis.sweep import Run, axes_of, name_of
from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import sacrebleu_metric
from branchnorm_jax.evaluation.compare import SIGNIFICANT, paired_test
from branchnorm_jax.evaluation.evaluate import scoring_options
from branchnorm_jax.evaluation.text import compare_texts, read_losses
from branchnorm_jax.options import Config
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.workdir import Workdir

METRICS = {"bleu": ("chrf",), "bits_per_byte": ("perplexity",)}
"""Main score of a sweep -> further scores. Sweeps of language models have bits per byte."""

TITLES = {"bleu": "test BLEU", "bits_per_byte": "test bits per byte"}
DIGITS = {"bleu": (2, 1), "bits_per_byte": (3, 3)}
"""Decimals of a mean and of a spread."""


def ended(workdir: Workdir, config: Config) -> str:
    """Returns how the run with this config ended, "done" or "diverged"; "" if it has not ended.

    Its loops may differ: they depend on the device.
    """
    if not (workdir / "config.json").exists():
        return ""
    saved, wanted = configs.load(workdir / "config.json"), vars(config.model)
    loops = {name: wanted[name] for name in ("remat", "group", "unroll")}
    if dataclasses.replace(saved, model=dataclasses.replace(saved.model, **loops)) != config:
        return ""
    status = read_json(workdir / "status.json").get("status")
    return status if status == "diverged" or (status == "done" and evaluated(workdir, config)) else ""


def evaluated(workdir: Workdir, config: Config) -> bool:
    """Returns whether the scores of a run are those of its present state and of the options in `config`."""
    results, status, metric = workdir / "results.json", workdir / "status.json", main_metric(config)
    if score_of(workdir, metric) is None or (metric == "bleu" and texts_of(workdir) is None):
        return False
    run, wanted = read_json(results).get("run"), json.loads(json.dumps(scoring_options(config)))
    if not isinstance(run, dict) or any(name not in run or run[name] != value for name, value in wanted.items()):
        return False
    # Scores older than the status belong to a shorter run.
    return status.exists() and results.stat().st_mtime >= status.stat().st_mtime


def main_metric(config: Config) -> str:
    """Returns the score that the runs of a sweep are compared by."""
    return "bits_per_byte" if config.model.family == "decoder" else "bleu"


def metric_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the main score in the results of a sweep."""
    return next((metric for metric in METRICS if any(metric in row for row in rows)), "bleu")


def score_of(workdir: Workdir, metric: str) -> float | None:
    """Returns a score of the test set; None if the run has no readable score."""
    entry: Any = read_json(workdir / "results.json")
    for name in ("test", metric, "score"):
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry if isinstance(entry, float | int) else None


def texts_of(workdir: Workdir) -> tuple[list[str], list[str]] | None:
    """Returns references and hypotheses of the test set; None if they cannot be read or do not match."""
    try:
        # With several language pairs, the files are test.en-de.reference and so on.
        references, hypotheses = (
            [line for path in sorted((workdir / "evaluation").glob(f"test*.{side}")) for line in text_lines(path)]
            for side in ("reference", "hypothesis")
        )
    except UserError:
        return None
    return (references, hypotheses) if 0 < len(references) == len(hypotheses) else None


def collect(
    runs: Mapping[str, tuple[Run, Config]], folders: Mapping[str, tuple[Run, Workdir]], metric: str
) -> list[dict[str, Any]]:
    """Returns one row per run: axes, status, scores, cost. `metric` is the main score."""
    rows = []
    for name, (run, config) in runs.items():
        workdir = folders[name][1]
        status, scored = read_json(workdir / "status.json"), evaluated(workdir, config)
        validations = read_lines(workdir / "validation.jsonl", ("nll",))
        rows.append(
            {"run": name}
            | run
            | {
                "status": status.get("status", "not run"),
                **{name: score_of(workdir, name) if scored else None for name in (metric, *METRICS[metric])},
                "valid_nll": validations[-1]["nll"] if validations else None,
                "updates": status.get("step"),
                "train_seconds": status.get("train_seconds"),
            }
        )
    return rows


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns {} if the file is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def compare(rows: list[dict[str, Any]], folders: Mapping[str, tuple[Run, Workdir]], baseline: str, lang: str) -> None:
    """Adds to each row its difference from its baseline, and the p-value of the difference.

    The baseline of a run is the run of the method `baseline` that has the same values in all of its own axes. It may
    lack axes of the run, such as model.alpha_steps, so runs of the same method with further options have one too. Among
    several candidates, the one with the most axes counts, and one with a score before others with as many. If it has no
    score, the row has neither difference nor p-value.
    """
    metric = metric_of(rows)
    scored = {row["run"]: row[metric] for row in rows if row[metric] is not None}
    for row in rows:
        run, workdir = folders[row["run"]]
        method = run.get("method", "")
        partners = [
            (len(other), name in scored, name)
            for name, (other, _) in folders.items()
            if other.get("method") == baseline and axes_of(other) != axes_of(run)
            if (other | {"method": method}).items() <= run.items()
        ]
        row["difference"] = row["p_value"] = None
        *_, partner = max(partners, key=itemgetter(0, 1), default=("",))
        if row["run"] not in scored or partner not in scored:
            continue
        row["difference"] = row[metric] - scored[partner]
        if metric == "bits_per_byte":
            row["p_value"] = _p_value(folders[partner][1], workdir)
            continue
        ours, theirs = texts_of(workdir), texts_of(folders[partner][1])
        # With several language pairs, the table has their mean BLEU, for which there is no single corpus to resample.
        one_pair = (workdir / "evaluation" / "test.reference").exists()
        if ours and theirs and ours[0] == theirs[0] and one_pair:
            systems, bleu = {"baseline": theirs[1], "run": ours[1]}, {"bleu": sacrebleu_metric(lang)}
            # Not sacreBLEU's bootstrap, which counts one tail, so that too many differences seem significant.
            _, results = paired_test(systems, ours[0], bleu, "ar")["bleu"]
            row["p_value"] = results["run"].p_value


def _p_value(baseline: Workdir, workdir: Workdir) -> float | None:
    """Returns the p-value of the difference in bits per byte; None if a run was not evaluated, or the text is short."""
    try:
        paths = {name: each / "evaluation" / "test.lines.tsv" for name, each in (("a", baseline), ("b", workdir))}
        compared = compare_texts({name: read_losses(path) for name, path in paths.items()})
    except UserError:
        return None
    return cast(float | None, compared["systems"]["b"]["p_bootstrap"])


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the content of sweep.csv, one line per run."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def from_csv(text: str) -> list[dict[str, Any]]:
    """Returns the rows of a sweep.csv, without empty values; the main score is a number, or None if there is none."""
    rows: list[dict[str, Any]] = [
        {name: value for name, value in row.items() if value} for row in csv.DictReader(io.StringIO(text))
    ]
    metric = metric_of(rows)
    return [row | {metric: float(row[metric]) if metric in row else None} for row in rows]


def cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Groups rows by (row label, column label) of the table. Runs that differ only in the seed share a cell."""
    table: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        axes = axes_of(row)
        across = {axis: value for axis, value in axes.items() if axis in columns}
        down = {axis: value for axis, value in axes.items() if axis not in columns}
        table.setdefault((name_of(down, " "), name_of(across, " ")), []).append(row)
    return table


def to_markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], baseline: str) -> str:
    """Returns the content of sweep.md: the main score, mean over seeds and half their range.

    In brackets is how many of several seeds have a score, and the status of the others. A star marks cells in which
    every run differs significantly from the baseline, and all in the same direction.
    """
    table, metric = cells(rows, columns), metric_of(rows)
    digits, of_spread = DIGITS[metric]
    down, across = (list(dict.fromkeys(key[side] for key in table)) for side in (0, 1))

    def cell(found: Sequence[Mapping[str, Any]]) -> str:
        if not found:
            return ""
        scores = [row[metric] for row in found if row[metric] is not None]
        others = ", ".join(dict.fromkeys(row["status"] for row in found if row[metric] is None))
        if not scores:
            return others
        note = f" ({len(scores)} of {len(found)}, {others})" if others else ""
        better = {(row.get("difference") or 0.0) > 0 for row in found}
        significant = all((row.get("p_value") or 1.0) < SIGNIFICANT for row in found)
        star = "*" if significant and len(better) == 1 else ""
        spread = f" ± {(max(scores) - min(scores)) / 2:.{of_spread}f}" if len(scores) > 1 else ""
        return f"{statistics.mean(scores):.{digits}f}{spread}{star}{note}"

    text = [f"| {TITLES[metric]} | {' | '.join(name or 'score' for name in across)} |", "|---|" + "---|" * len(across)]
    text += [f"| {row} | {' | '.join(cell(table.get((row, column), [])) for column in across)} |" for row in down]
    if baseline:
        test = "paired bootstrap" if metric == "bits_per_byte" else "approximate randomisation"
        text += ["", f"\\* p < {SIGNIFICANT} against {baseline}, {test}."]
    return "\n".join(text) + "\n"

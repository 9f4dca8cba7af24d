"""Sweeps: a grid of runs written in one line, and their results as one table and one figure.

A grid is axes separated by spaces, each `name=value,value`, all combined with all; `|` adds another grid:

    method=post_ln,branchnorm depth=6L-6L,18L-18L | method=branchnorm depth=50L-50L train.seed=0,1

`method` and `depth` are short for the options that they set; any other axis is an option's full name.
"""

import csv
import dataclasses
import difflib
import hashlib
import io
import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import ml_collections

from branchnorm_jax import config as configs
from branchnorm_jax.analysis import figures
from branchnorm_jax.data.corpus import text_lines
from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation.bleu import sacrebleu_metric
from branchnorm_jax.evaluation.compare import SIGNIFICANT, paired_test
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.options import Config, SweepConfig, fields
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.workdir import Workdir

Run = dict[str, str]
"""One point of a grid: axis -> value, as written."""

SETS = {"method": {"model.method"}, "depth": {"model.encoder_layers", "model.decoder_layers"}}
"""The options that an axis sets, where it is not one itself."""

AXES = {*SETS, *(name for name, _ in fields() if name.split(".")[0] in ("model", "data", "train", "decode"))}
TRUTH = {"true": True, "false": False}


def parse_grid(text: str, baseline: str = "") -> list[Run]:
    """All runs of a grid, in its order, each once. Raises `UserError` for what is no grid, or lacks the baseline."""
    runs: list[Run] = []
    for part in text.split("|"):
        axes: dict[str, list[str]] = {}
        for word in part.split():
            name, equals, values = word.partition("=")
            if not equals or not all(values.split(",")):
                raise UserError(f"sweep.grid: {word!r} is not name=value,value")
            if name not in AXES:
                hint = next(iter(difflib.get_close_matches(name, AXES, 1)), configs.nearest_name(name))
                raise UserError(f"sweep.grid: no axis {name!r}" + (f"; did you mean {hint!r}?" if hint else ""))
            for other in axes:
                if SETS.get(name, {name}) & SETS.get(other, {other}):
                    raise UserError(
                        f"sweep.grid: {other} and {name} set the same option; write {other}=value,value, or separate "
                        "two grids with |"
                    )
            axes[name] = list(dict.fromkeys(values.split(",")))
        if not axes:
            where = f"; found none in {part.strip() or 'an empty part'!r} of {text!r}" if text.strip() else ""
            raise UserError(f"sweep.grid: give axes such as method=post_ln,branchnorm depth=6L-6L,18L-18L{where}")
        runs += [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    methods = dict.fromkeys(run["method"] for run in runs if "method" in run)
    if baseline and baseline not in methods:
        raise UserError(
            f"sweep.baseline: {baseline!r} is not among the grid's methods ({', '.join(methods) or 'none'})"
        )
    return [run for index, run in enumerate(runs) if run not in runs[:index]]


def name_of(run: Mapping[str, str], separator: str = "-") -> str:
    """Folder of a run, or label in a table: its values, with the names of options that do not speak for themselves."""
    return separator.join(v if k in ("method", "depth") else f"{k.split('.')[-1]}={v}" for k, v in run.items())


def folder_of(run: Mapping[str, str]) -> str:
    """Folder of a run: its name, where that can be one."""
    name = name_of(run)
    plain = re.sub(r"[^\w.,+=-]", "_", name)[:100].lstrip(".")
    return name if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def plan_runs(config: Config) -> dict[str, tuple[Run, Config]]:
    """Every run of the config's grid, by its folder. Raises `UserError` for a grid, or a run, that cannot be."""
    if "test" not in config.evaluate.split_names:
        raise UserError(f"evaluate.splits={config.evaluate.splits}: a sweep compares test scores; add test")
    grid, columns = parse_grid(config.sweep.grid, config.sweep.baseline), config.sweep.column_names
    runs: dict[str, tuple[Run, Config]] = {}
    for run in grid:
        try:
            chosen = configure(config, run)
        except UserError as error:
            raise UserError(f"sweep.grid: {name_of(run)}: {error}") from error
        for other, (_, there) in runs.items():
            if chosen == there:
                raise UserError(f"sweep.grid: {name_of(run)} and {other} are the same run")
        if folder_of(run) in runs:
            raise UserError(f"sweep.grid: two runs have the name {name_of(run)}; move one of them to another sweep")
        runs[folder_of(run)] = run, chosen
    axes = dict.fromkeys(axis for run in grid for axis in run)
    unknown = set(columns) - {*axes, "depth"}
    if unknown:
        raise UserError(
            f"sweep.columns: the grid has no axis {', '.join(sorted(unknown))}; its axes are {', '.join(axes)}"
        )
    return runs


def configure(config: Config, run: Run) -> Config:
    """The config of one run. Raises `UserError` for values that its options do not take."""
    options = configs.with_recommended(_options(config, run), recommended(config, run))
    # A run does not depend on the grid that it is in: a longer grid leaves the runs that are there as they are.
    return dataclasses.replace(configs.from_config_dict(options), sweep=SweepConfig())


def recommended(config: Config, run: Run) -> dict[str, Any]:
    """The options that a run takes from the authors of its method, if `sweep.recommended`: "section.name" -> value."""
    options = _options(config, run)
    found = get_recipe(options.model.method).recommended if config.sweep.recommended else {}
    return {name: value for name, value in found.items() if name not in configs.assigned(options)}


def _options(config: Config, run: Run) -> ml_collections.ConfigDict:
    """The sweep's options with the values of a run; what the user or the grid chose counts as assigned."""
    options = configs.default_config()
    defaults, chosen = configs.to_flat(Config()), config.sweep.chosen.split(",")
    for full, value in configs.to_flat(config).items():
        section, name = full.split(".")
        if value != defaults[full] or full in chosen:
            options[section][name] = value
    for axis, text in run.items():
        if axis == "depth":
            configs.set_depth(options, text)
            continue
        section, name = ("model", "method") if axis == "method" else axis.split(".")
        kind = type(options[section][name])
        try:
            options[section][name] = TRUTH[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError) as error:
            raise UserError(f"{axis}={text}: expected {kind.__name__}") from error
    return options


def ended(workdir: Workdir, config: Config) -> str:
    """How a run with this very config ended, "done" or "diverged"; "" if it is still to be trained or evaluated."""
    if not (workdir / "config.json").exists() or configs.load(workdir / "config.json") != config:
        return ""
    status = read_json(workdir / "status.json").get("status")
    # Scores that are older than the status are those of a shorter run, or of other options.
    results = workdir / "results.json"
    evaluated = (
        score_of(workdir, "bleu") is not None
        and texts_of(workdir) is not None
        and results.stat().st_mtime >= (workdir / "status.json").stat().st_mtime
    )
    return status if status == "diverged" or (status == "done" and evaluated) else ""


def score_of(workdir: Workdir, metric: str) -> float | None:
    """A score of the test set; None if the run has none that can be read."""
    entry: Any = read_json(workdir / "results.json")
    for name in ("test", metric, "score"):
        entry = entry.get(name) if isinstance(entry, dict) else None
    return entry if isinstance(entry, float | int) else None


def texts_of(workdir: Workdir) -> tuple[list[str], list[str]] | None:
    """References and hypotheses of the test set; None if they cannot be read, or do not belong together."""
    try:
        # Of several pairs of languages, test.en-de.reference and so on.
        references, hypotheses = (
            [line for path in sorted((workdir / "evaluation").glob(f"test*.{side}")) for line in text_lines(path)]
            for side in ("reference", "hypothesis")
        )
    except UserError:
        return None
    return (references, hypotheses) if 0 < len(references) == len(hypotheses) else None


def collect(folders: Mapping[str, tuple[Run, Workdir]]) -> list[dict[str, Any]]:
    """One row per run: its axes, how it ended, scores, what it cost."""
    rows = []
    for name, (run, workdir) in folders.items():
        status = read_json(workdir / "status.json")
        validations = read_lines(workdir / "validation.jsonl", ("nll",))
        rows.append(
            {"run": name}
            | run
            | {
                "status": status.get("status", "not run"),
                "bleu": score_of(workdir, "bleu"),
                "chrf": score_of(workdir, "chrf"),
                "valid_nll": validations[-1]["nll"] if validations else None,
                "updates": status.get("step"),
                "train_seconds": status.get("train_seconds"),
            }
        )
    return rows


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object; a missing or broken one is empty."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def compare(rows: list[dict[str, Any]], folders: Mapping[str, tuple[Run, Workdir]], baseline: str, lang: str) -> None:
    """Adds to each row the p-value of its difference from its baseline.

    That is the run of the method `baseline` with the same axes, or else, since options that only this run's grid names
    stand in no way (a T that the baseline does not know), with the most of them.
    """
    for row in rows:
        run, workdir = folders[row["run"]]
        method = run.get("method", "")
        partners = [
            (len(other), folder)
            for other, folder in folders.values()
            if other.get("method") == baseline != method and (other | {"method": method}).items() <= run.items()
        ]
        row["p_value"] = None
        ours = texts_of(workdir)
        theirs = texts_of(max(partners, key=itemgetter(0))[1]) if partners else None
        # Of several pairs of languages the table has the mean of their BLEU, which is no corpus to draw from.
        one_pair = (workdir / "evaluation" / "test.reference").exists()
        if ours and theirs and ours[0] == theirs[0] and one_pair:
            systems, bleu = {"baseline": theirs[1], "run": ours[1]}, {"bleu": sacrebleu_metric(lang)}
            _, results = paired_test(systems, ours[0], bleu, "bs")["bleu"]
            row["p_value"] = results["run"].p_value


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """sweep.csv: every run."""
    out = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    """Rows by (label of the line, label of the column); runs that differ in their seed alone share a cell."""
    table: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        axes = {axis: row[axis] for axis in row if axis in AXES and axis != "train.seed"}
        across = {axis: value for axis, value in axes.items() if axis in columns}
        down = {axis: value for axis, value in axes.items() if axis not in columns}
        table.setdefault((name_of(down, " "), name_of(across, " ")), []).append(row)
    return table


def to_markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], baseline: str) -> str:
    """sweep.md: BLEU, mean over seeds and half their range; a star where each run differs from the baseline's."""
    table = cells(rows, columns)
    down, across = (list(dict.fromkeys(key[side] for key in table)) for side in (0, 1))

    def cell(found: Sequence[Mapping[str, Any]]) -> str:
        if not found:
            return ""
        ended = [row["status"] for row in found if row["bleu"] is None]
        if ended:
            return ", ".join(dict.fromkeys(ended))
        scores = [row["bleu"] for row in found]
        star = "*" if all((row.get("p_value") or 1.0) < SIGNIFICANT for row in found) else ""
        spread = f" ± {(max(scores) - min(scores)) / 2:.1f}" if len(scores) > 1 else ""
        return f"{statistics.mean(scores):.2f}{spread}{star}"

    text = [f"| | {' | '.join(across)} |", "|---|" + "---|" * len(across)]
    text += [f"| {row} | {' | '.join(cell(table.get((row, column), [])) for column in across)} |" for row in down]
    if baseline:
        text += ["", f"\\* p < {SIGNIFICANT} against {baseline}, paired bootstrap."]
    return "\n".join(text) + "\n"


def draw(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """BLEU of every line of the table over its columns; runs without a score stand at the foot as crosses."""
    pyplot = figures.pyplot()

    table = cells(rows, columns)
    down, across = (list(dict.fromkeys(key[side] for key in table)) for side in (0, 1))
    figure, axes = pyplot.subplots(figsize=(2 + 1.6 * max(len(across), 3), 4.5), layout="constrained")
    for index, row in enumerate(down):
        points = [(x, found) for x, column in enumerate(across) if (found := table.get((row, column)))]
        lost = [x for x, found in points if any(run["bleu"] is None for run in found)]
        scored = [(x, statistics.mean(run["bleu"] for run in found)) for x, found in points if x not in lost]
        colour = f"C{index % 10}"
        axes.plot(
            [x for x, _ in scored], [y for _, y in scored], "o-" if scored else "x", color=colour, label=row or "all"
        )
        axes.plot(lost, [-1] * len(lost), "x", color=colour)
    axes.set(
        xticks=range(len(across)),
        xticklabels=[name.replace(" ", "\n") for name in across],
        ylabel="test BLEU",
        ylim=(-2, max(5.0, 1.05 * axes.get_ylim()[1])),
    )
    axes.legend(frameon=False, bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

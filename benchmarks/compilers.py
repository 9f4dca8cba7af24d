"""Asks the compilers of TPUs and GPUs about updates on devices that are absent, and compares the plan with them.

    python -m benchmarks.compilers v5e:1x1 6L-6L:none 6L-6L:full 50L-50L:full
    python -m benchmarks.compilers v5p:2x2x1 100L-100L:full --config.parallel.fsdp=4
    python -m benchmarks.compilers h100:1 12L:none 128L:full
    python -m benchmarks.compilers

Each program has width 512, a vocabulary of 32,000, bfloat16 products, a float16 residual stream and float32 Adam. A
depth such as 12L is a language model on rows of 512 tokens. More options of the project can follow. The results are
rows of benchmarks/results/compilers.csv, and the collectives of a program are rows of
benchmarks/results/collectives.csv. A program that is compiled again replaces its rows. A program takes minutes on two
cores. Without arguments, the command predicts the memory of all programs again, without compilers, and prints a table.
"""

import argparse
import csv
import dataclasses
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS
from branchnorm_jax import config as configs
from branchnorm_jax.analysis import collectives, compiled, estimate, program, topologies
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import Config
from branchnorm_jax.training.logs import git_revision

SHAPE = {
    "model.width": 512,
    "model.ffn_width": 2048,
    "model.heads": 8,
    "model.dtype": "bfloat16",
    "model.carry_dtype": "float16",
    "data.vocab_size": 32_000,
    "data.power_of_two_rows": "True",
    "train.batch_tokens": 16_384,
}

DECODER_ONLY = {
    "model.family": "decoder",
    "data.source": "documents",
    "data.context": 512,
    "train.label_smoothing": 0.0,
    "train.best_metric": "loss",
    "train.eval_bleu_sentences": 0,
    "decode.beam_size": 1,
}
"""Options of language models, in addition to `SHAPE`."""

KEY = ("target", "options", "depth", "remat")
"""Columns that identify a program."""

TABLE, COLLECTIVES = RESULTS / "compilers.csv", RESULTS / "collectives.csv"


def config_of(depth: str, remat: str, options: dict[str, str]) -> Config:
    """Returns the config of a program; `options` replace those of `SHAPE`."""
    values = configs.default_config(depth)
    family = {} if "-" in depth else DECODER_ONLY
    with values.unlocked():
        for name, text in {**SHAPE, **family, "model.remat": remat, **options}.items():
            section, option = name.split(".")
            kind = type(values[section][option])
            values[section][option] = text == "True" if kind is bool else kind(text)
    return configs.from_config_dict(values)


def on_target(config: Config, target: topologies.Target) -> Config:
    """Returns the config of the run on the devices of a target; needs no compiler."""
    parallel = config.parallel
    data = target.count // (parallel.fsdp * parallel.model)
    plan = dataclasses.replace(config.plan, device=target.device, devices=target.count)
    return dataclasses.replace(config, plan=plan, parallel=dataclasses.replace(parallel, data=data))


def predicted(config: Config, target: topologies.Target) -> float:
    """Returns the peak memory of each device according to the plan, in bytes."""
    return estimate.peak_bytes(on_target(config, target), target.count // config.parallel.model)


def compare(config: Config, target: topologies.Target) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Compiles a program; returns the row of the comparison, and the rows of the collectives."""
    config, absent = compiled.planned_for(config, target)
    report, text = compiled.compile_update(config, absent)
    return columns(report, predicted(config, target)), communication(text, absent.devices)


def columns(report: dict[str, Any], plan_bytes: float) -> dict[str, Any]:
    """Returns the columns of a program's row, from the report of its compiler."""
    peak, sums = report.get("peak_bytes"), report.get("collectives", {}).values()
    return {
        "tokens": report["rows"] * report["row_length"],
        "compiler_bytes": peak and round(peak),
        "plan_bytes": round(plan_bytes),
        "plan_over_compiler": peak and round(plan_bytes / peak, 4),
        "inside_bytes": round(sum(part["inside_bytes"] for part in sums)),
        "between_bytes": round(sum(part["between_bytes"] for part in sums)),
        "between_in_loops_bytes": round(report.get("between_in_loops_bytes", 0)),
        "cycles": report.get("cycles", 0),
        "error": report.get("error", ""),
        "seconds": round(report["seconds"]),
        "versions": " ".join(f"{name}={version}" for name, version in report["versions"].items()),
    }


def communication(text: str, devices: list[Any]) -> list[dict[str, Any]]:
    """Returns one row per kind of collective, loop, group and size of operand."""
    domains, equal = topologies.domains(devices), Counter[collectives.Collective]()
    for found in collectives.collectives(program.parse(text)):
        equal[found._replace(name="")] += 1
    return [
        {
            "loop": " in ".join(one.loops[::-1]),
            "kind": one.kind,
            "first_group": "between slices" if one.groups is None else " ".join(map(str, (one.groups or ((),))[0])),
            "number": number,
            "operand_bytes": one.payload,
            "executions": one.times,
            "inside_bytes": round(collectives.sent(one, domains).inside),
            "between_bytes": round(collectives.sent(one, domains).between),
        }
        for one, number in equal.items()
    ]


def read(table: Path) -> list[dict[str, Any]]:
    """Returns the rows of a table."""
    if not table.exists():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(table: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a table."""
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[-1]), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def replace(table: Path, key: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """Writes the rows of a program to a table, in place of earlier rows of the same program."""
    others = [old for old in read(table) if any(old[name] != key[name] for name in KEY)]
    write(table, [*others, *({**key, **row} for row in rows)])


def compile_and_add(target: topologies.Target, name: str, options: dict[str, str]) -> None:
    """Compiles the program `name`, depth:remat, and adds its rows to the tables."""
    depth, _, remat = name.partition(":")
    text = " ".join(f"{option}={value}" for option, value in options.items())
    key = {"target": target.text, "options": text, "depth": depth, "remat": remat}
    row, found = compare(config_of(depth, remat, options), target)
    replace(TABLE, key, [row | {"date": time.strftime("%Y-%m-%d"), "git_revision": git_revision()}])
    if found:
        replace(COLLECTIVES, key, found)
    print(key | row, flush=True)


def predict_again() -> None:
    """Predicts the memory of all programs of the table, and prints how the prediction compares."""
    rows = read(TABLE)
    print("| devices | program | options | compiler, GB | plan, GB | plan / compiler |\n|---|---|---|---|---|---|")
    for row in rows:
        options = dict(text.split("=", 1) for text in row["options"].split())
        config = config_of(row["depth"], row["remat"], options)
        plan, peak = predicted(config, topologies.parse(row["target"])), int(row["compiler_bytes"] or 0)
        row |= {"plan_bytes": round(plan), "plan_over_compiler": round(plan / peak, 4) if peak else ""}
        sizes = f"{peak / 1e9:,.3f} | {plan / 1e9:,.3f} | {row['plan_over_compiler']}"
        print(f"| {row['target']} | {row['depth']} {row['remat']} | {row['options']} | {sizes} |", flush=True)
    write(TABLE, rows)


def main() -> None:
    """Compiles the programs of the command line one after the other, or predicts those of the table again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="as in plan.compile")
    parser.add_argument("programs", nargs="*", help="depth:remat, such as 6L-6L:none")
    arguments, rest = parser.parse_known_args()
    if arguments.target is None:
        return predict_again()
    options = dict(text.removeprefix("--config.").split("=", 1) for text in rest)
    for name in arguments.programs:
        compile_and_add(topologies.parse(arguments.target), name, options)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"UserError: {error}") from error

"""Compares the plan's prediction of the peak memory with the compilers of TPUs and GPUs, without the hardware.

    python -m benchmarks.compilers v5e:1x1 6L-6L:none 6L-6L:full 50L-50L:full
    python -m benchmarks.compilers v5p:2x2x1 100L-100L:full --config.parallel.fsdp=4

Each program has width 512, a vocabulary of 32,000, bfloat16 products, a float16 residual stream and float32 Adam. More
options of the project can follow. The results are rows of benchmarks/results/compilers.csv; a program that is compiled
again replaces its row. A program takes minutes on two cores.
"""

import argparse
import csv
import time
from typing import Any

from benchmarks.measure import RESULTS
from branchnorm_jax import config as configs
from branchnorm_jax.analysis import compiled, estimate, topologies
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
    "train.batch_tokens": 16_384,
}

KEY = ("target", "options", "depth", "remat")
"""Columns that identify a program."""

TABLE = RESULTS / "compilers.csv"


def program(depth: str, remat: str, options: dict[str, str]) -> Config:
    """Returns the config of a program; `options` replace those of `SHAPE`."""
    values = configs.default_config(depth)
    with values.unlocked():
        for name, text in {**SHAPE, "model.remat": remat, **options}.items():
            section, option = name.split(".")
            values[section][option] = type(values[section][option])(text)
    return configs.from_config_dict(values)


def compare(config: Config, target: topologies.Target) -> dict[str, Any]:
    """Compiles a program; returns the peak memory that the compiler reports and the plan predicts."""
    config, absent = compiled.planned_for(config, target)
    rows, length = compiled.largest_batch(config)
    predicted = estimate.peak_bytes(config, absent.mesh.size // config.parallel.model)
    report, _ = compiled.compile_update(config, absent)
    peak = report.get("peak_bytes")
    sums = report.get("collectives", {}).values()
    return {
        "tokens": rows * length,
        "compiler_bytes": peak,
        "plan_bytes": round(predicted),
        "plan_over_compiler": peak and round(predicted / peak, 4),
        "inside_bytes": round(sum(part["inside_bytes"] for part in sums)),
        "between_bytes": round(sum(part["between_bytes"] for part in sums)),
        "error": report.get("error", ""),
        "seconds": round(report["seconds"]),
        "versions": " ".join(f"{name}={version}" for name, version in report["versions"].items()),
    }


def add(row: dict[str, Any]) -> None:
    """Adds a row to the table, in place of an earlier row of the same program."""
    rows = []
    if TABLE.exists():
        with TABLE.open(newline="", encoding="utf-8") as file:
            rows = [old for old in csv.DictReader(file) if any(old[name] != row[name] for name in KEY)]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])


def main() -> None:
    """Compiles the programs of the command line one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="as in plan.compile")
    parser.add_argument("programs", nargs="+", help="depth:remat, such as 6L-6L:none")
    arguments, rest = parser.parse_known_args()
    options = dict(text.removeprefix("--config.").split("=", 1) for text in rest)
    target = topologies.parse(arguments.target)
    for name in arguments.programs:
        depth, _, remat = name.partition(":")
        key = {"target": target.text, "options": " ".join(f"{k}={v}" for k, v in options.items())}
        result = compare(program(depth, remat, options), target)
        row = {**key, "depth": depth, "remat": remat, **result, "date": time.strftime("%Y-%m-%d")}
        add(row | {"git_revision": git_revision()})
        print(row, flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"UserError: {error}") from error

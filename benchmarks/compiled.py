"""Compiles the update for absent devices and reports its memory, traffic, kernels, estimated time and MFU.

    python -m benchmarks.compiled h200:1 6L-6L 100L-100L 500L-500L --state=kernels
    python -m benchmarks.compiled v5e:1x1 6L-6L:none --config.train.batch_tokens=16384 --config.model.kernels=plain
    python -m benchmarks.compiled --table

A program is a depth, and optionally one of `model.remat`; without it, `auto` chooses. Each has width 512, a vocabulary
of 32,000, bfloat16 products, a float16 residual stream, float32 Adam, and 65,536 tokens in rows of 32; `--row-length`
changes the rows, and more options of the project can follow. The results of one state of the code are
benchmarks/results/compiled_<state>.json, with the twenty kernels that take the most time.

Nothing is measured. The time on a GPU is a roofline, and the time on a TPU is its compiler's estimate in cycles; see
`analysis/roofline.py`. The time of communication between devices is not counted. MFU is 3 x the FLOPs of the forward
pass / (time x the peak FLOP/s of the device).
`--hlo FILE` reads the text of a program instead of compiling one, for example one of an earlier commit.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.compilers import config_of, on_target
from benchmarks.measure import RESULTS
from branchnorm_jax.analysis import compiled, devices, estimate, plan, program, roofline, topologies
from branchnorm_jax.data.packing import Shape
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import Config
from branchnorm_jax.training.logs import git_revision

SENTENCE = 32
"""Tokens of a sentence, for the FLOPs of the model."""

WORST = 20
"""Number of kernels that a result lists."""

KEY = ("target", "depth", "remat", "options", "row_length")
"""Values that identify a program."""


def planned(depth: str, remat: str, options: dict[str, str], target: topologies.Target) -> Config:
    """Returns the config of a program on one device of the target; `auto` is resolved as training would."""
    config = on_target(config_of(depth, remat, options), target)
    if remat == "auto":
        return plan.resolve_remat(config, devices.find(target.device).memory)
    return estimate.with_remat(config, remat)


def figures(text: str, config: Config, target: topologies.Target, shape: Shape) -> dict[str, Any]:
    """Returns the figures of an optimised program."""
    device = devices.DEVICES[target.device]
    found = sorted(roofline.kernels(program.parse(text)), key=lambda kernel: -kernel.seconds(device))
    seconds, traffic = (sum(values) for values in zip(*((k.seconds(device), k.traffic) for k in found), strict=True))
    forward = estimate.forward_flops(config, SENTENCE, SENTENCE, config.data.vocab_size)
    flops = 3 * shape.rows * shape.source * sum(forward.values())
    layers = config.model.encoder_layers + config.model.decoder_layers
    memory_bound = [k for k in found if k.memory_seconds(device) >= k.matrix_seconds(device)]
    # TPU compilers replace matrix products by convolutions, whose operations are not counted.
    products = {
        "flops": sum(kernel.times * kernel.flops for kernel in found),
        "memory_bound_share": round(sum(kernel.seconds(device) for kernel in memory_bound) / seconds, 4),
    }
    by_loop: dict[str, float] = defaultdict(float)
    for kernel in found:
        by_loop[" in ".join(kernel.loops[::-1]) or "no loop"] += kernel.seconds(device)
    return {
        "seconds": round(seconds, 5),
        "mfu": round(flops / (seconds * device.matrix * target.count), 4),
        "model_flops": flops,
        **({} if device.clock else products),
        "traffic_bytes": traffic,
        "traffic_bytes_per_layer": round(traffic / layers),
        "kernels": sum(kernel.times for kernel in found),
        "loop_seconds": {name: round(part, 5) for name, part in by_loop.items()},
        "worst": [worst(kernel, device) for kernel in found[:WORST]],
    }


def worst(kernel: roofline.Kernel, device: devices.Device) -> dict[str, Any]:
    """Returns the figures of one kernel."""
    return {
        "seconds": round(kernel.seconds(device), 6),
        "times": kernel.times,
        "read_mb": round(kernel.read / 1e6, 3),
        "written_mb": round(kernel.written / 1e6, 3),
        "gflop": round(kernel.flops / 1e9, 3),
        "result": kernel.result,
        "name": kernel.name,
        "op_name": kernel.op_name,
    }


def compile_one(key: dict[str, Any], options: dict[str, str], hlo: str) -> dict[str, Any]:
    """Compiles the program `key`, or reads it from the file `hlo`; returns its row."""
    target = topologies.parse(key["target"])
    if not hlo:
        topologies.prepare(target)
    config, length = planned(key["depth"], key["remat"], options, target), key["row_length"]
    shape = Shape(config.train.batch_tokens // length, length, length)
    if hlo:
        return key | figures(Path(hlo).read_text(encoding="utf-8"), config, target, shape)
    config, absent = compiled.planned_for(config, target)
    report, text = compiled.compile_update(config, absent, shape)
    row = key | {
        "date": time.strftime("%Y-%m-%d"),
        "git_revision": git_revision(),
        "chosen": {name: getattr(config.model, name) for name in ("remat", "group", "unroll")},
        "compile_seconds": round(report["seconds"]),
        **{name: report.get(name) for name in ("peak_bytes", "versions", "error")},
    }
    return row | (figures(text, config, target, shape) if text else {})


def save(state: str, row: dict[str, Any]) -> None:
    """Writes a row to the file of a state of the code, in place of an earlier row of the same program."""
    path = RESULTS / f"compiled_{state}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["programs"] if path.exists() else []
    rows = [*(other for other in old if any(other[name] != row[name] for name in KEY)), row]
    path.write_text(json.dumps({"programs": rows}, indent=1) + "\n", encoding="utf-8")


def show(row: dict[str, Any]) -> None:
    """Prints a row."""
    print(json.dumps({name: value for name, value in row.items() if name != "worst"}))
    for kernel in row.get("worst", []):
        sizes = f"{kernel['read_mb']:9.1f} + {kernel['written_mb']:8.1f} MB {kernel['gflop']:8.1f} GFLOP"
        names = f"{kernel['result'][:34]:34} {kernel['op_name'][-60:]}"
        print(f"{kernel['seconds'] * 1e3:9.3f} ms, {kernel['times']:6} runs of {sizes}  {names}", flush=True)


def table() -> None:
    """Prints all programs of all states."""
    print("| device | program | options | rows of | state | ms | MFU | GB per layer | kernels | peak, GB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    lines = []
    for path in RESULTS.glob("compiled_*.json"):
        state = json.loads(path.read_text(encoding="utf-8"))
        for row in state["programs"]:
            numbers = ["", "", "", ""]
            if "seconds" in row:
                per_layer = row["traffic_bytes_per_layer"] / 1e9
                numbers = [
                    f"{row['seconds'] * 1e3:,.0f}",
                    f"{row['mfu']:.1%}",
                    f"{per_layer:.2f}",
                    f"{row['kernels']:,}",
                ]
            peak = f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else ""
            first = [row["target"], f"{row['depth']} {row['remat']}", row["options"], str(row["row_length"])]
            lines.append((*first, row["date"], path.stem.removeprefix("compiled_"), *numbers, peak))
    for *first, _, state, ms, mfu, per_layer, kernels, peak in sorted(lines):
        print(f"| {' | '.join((*first, state, ms, mfu, per_layer, kernels, peak))} |")


def main() -> None:
    """Compiles the programs of the command line one after the other, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="h200:1", help="one device or several, as in plan.compile")
    parser.add_argument("programs", nargs="*", help="depth or depth:remat, such as 6L-6L:none")
    parser.add_argument("--state", default="latest", help="name of this state of the code")
    parser.add_argument("--row-length", type=int, default=32)
    parser.add_argument("--hlo", default="", help="text of an optimised program to read")
    parser.add_argument("--table", action="store_true", help="print all results")
    arguments, rest = parser.parse_known_args()
    if arguments.table:
        return table()
    options = {"train.batch_tokens": "65536"} | dict(text.removeprefix("--config.").split("=", 1) for text in rest)
    text = " ".join(f"{name}={value}" for name, value in options.items())
    for name in arguments.programs:
        depth, _, remat = name.partition(":")
        key = dict(zip(KEY, (arguments.target, depth, remat or "auto", text, arguments.row_length), strict=True))
        row = compile_one(key, options, arguments.hlo)
        save(arguments.state, row)
        show(row)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"UserError: {error}") from error

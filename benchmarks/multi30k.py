"""Trains and evaluates Multi30k English-German over several seeds.

    python benchmarks/multi30k.py --path=<folder with {train,valid,test}.{en,de}> --out=benchmarks/results/multi30k.json

Writes one JSON file with every score. Arguments after `--` go to main.py: `-- --config.train.steps=100`. The seeds
train concurrently, because one small model leaves a GPU partly idle. The seconds in the result are therefore measured
on a shared device.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def start(mode: str, workdir: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Starts one mode of main.py; its output goes to <workdir>.<mode>.log."""
    log = workdir.with_suffix(f".{mode}.log").open("wb")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, str(ROOT / "main.py"), f"--mode={mode}", f"--workdir={workdir}", *options]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)


def main() -> None:
    """Runs all seeds and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True, help="folder of the corpus")
    parser.add_argument("--out", required=True, type=Path, help="JSON to write")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--config", default="configs/multi30k_ende.py", help="config file, with the depth if any")
    parser.add_argument("options", nargs="*", help="options of main.py, after --")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        runs = {int(seed): Path(scratch, f"seed{seed}") for seed in arguments.seeds.split(",")}
        begin = time.perf_counter()
        for mode in ("train", "evaluate"):
            processes = {
                seed: start(
                    mode,
                    workdir,
                    [
                        f"--config={arguments.config}",
                        f"--config.data.path={arguments.path}",
                        f"--config.train.seed={seed}",
                        *arguments.options,
                    ],
                )
                for seed, workdir in runs.items()
            }
            for seed, process in processes.items():
                if process.wait():
                    print(runs[seed].with_suffix(f".{mode}.log").read_text()[-2000:], file=sys.stderr)
                    sys.exit(f"seed {seed}: --mode={mode} ended with {process.returncode}")
        results: dict[str, Any] = {
            "config": arguments.config,
            "options": arguments.options,
            "wall_seconds": time.perf_counter() - begin,
            "seeds": {},
        }
        for seed, workdir in runs.items():
            validation = [json.loads(line) for line in (workdir / "validation.jsonl").read_text().splitlines()]
            results["seeds"][seed] = {
                "results": json.loads((workdir / "results.json").read_text()),
                "status": json.loads((workdir / "status.json").read_text()),
                "validation": validation,
            }
        results["mean_and_deviation"] = {
            metric: [f(values) for f in (statistics.mean, lambda v: statistics.stdev(v) if len(v) > 1 else 0.0)]
            for metric in ("bleu", "chrf", "multi_bleu")
            if (values := [run["results"]["test"][metric]["score"] for run in results["seeds"].values()])
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    for metric, (mean, deviation) in results["mean_and_deviation"].items():
        print(f"{metric}: {mean:.2f} +- {deviation:.2f} over seeds {arguments.seeds}")


if __name__ == "__main__":
    main()

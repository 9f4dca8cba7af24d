"""Code shared by all benchmarks: alternating timings, and result files.

Each result file records the machine, the package versions and the commit.
"""

import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from branchnorm_jax.training.logs import environment

RESULTS = Path(__file__).resolve().parent / "results"


def seconds(call: Callable[[], Any]) -> float:
    """Returns the wall time of one call in seconds, until its results are ready."""
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def in_turn(calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Returns the seconds of each call in each round, after one warm-up call of each."""
    turns = tqdm([call for _ in range(1 + rounds) for call in calls], desc="timed calls")
    times = [seconds(call) for call in turns]
    return [times[len(calls) + which :: len(calls)] for which in range(len(calls))]


def alternate(first: Callable[[], Any], second: Callable[[], Any], pairs: int = 7) -> dict[str, Any]:
    """Times two calls alternately, as `in_turn`.

    Returns:
      `ratio`, the median over pairs of first / second, and all times in seconds.
    """
    ours, theirs = in_turn((first, second), pairs)
    return {
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "first_seconds": ours,
        "second_seconds": theirs,
    }


def processor() -> str:
    """Returns the model name of the CPU on Linux, or else what Python reports."""
    try:
        named = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        named = None
    return named[1] if named else platform.processor() or platform.machine()


def machine() -> dict[str, str]:
    """Returns the cores that this process may use, and the time."""
    cores = len(os.sched_getaffinity(0))
    return {"machine": f"{cores} cores of {processor()}", "date": time.strftime("%Y-%m-%d %H:%M")}


def write(name: str, results: Mapping[str, Any]) -> Path:
    """Writes benchmarks/results/<name>.json and returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**machine(), **environment(), **results}, indent=1) + "\n", encoding="utf-8")
    return path


def save(name: str, results: Mapping[str, Any]) -> None:
    """Writes benchmarks/results/<name>.json and prints one line per value, except for lists."""
    path = write(name, results)
    for key, value in results.items():
        if not isinstance(value, list):
            print(f"{key}: {value['ratio']:.4f}" if isinstance(value, dict) and "ratio" in value else f"{key}: {value}")
    print(path)

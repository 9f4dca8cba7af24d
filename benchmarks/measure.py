"""What every benchmark shares: two things timed alternately in one run, and results with machine, versions, commit."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from branchnorm_jax.training.logs import environment

RESULTS = Path(__file__).resolve().parent / "results"


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call, its results included."""
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def alternate(first: Callable[[], Any], second: Callable[[], Any], pairs: int = 7) -> dict[str, Any]:
    """Times `first` and `second` in turn, after one call of each that does not count.

    Returns:
      `ratio`, the median over the pairs of first / second, and every time in seconds.
    """
    seconds(first), seconds(second)
    times = [(seconds(first), seconds(second)) for _ in range(pairs)]
    return {
        "ratio": statistics.median(a / b for a, b in times),
        "first_seconds": [a for a, _ in times],
        "second_seconds": [b for _, b in times],
    }


def save(name: str, results: Mapping[str, Any]) -> None:
    """Writes benchmarks/results/<name>.json, and prints one line per figure; lists are for the file alone."""
    machine = {"machine": platform.processor() or platform.machine(), "date": time.strftime("%Y-%m-%d %H:%M")}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**machine, **environment(), **results}, indent=1) + "\n", encoding="utf-8")
    for key, value in results.items():
        if not isinstance(value, list):
            print(f"{key}: {value['ratio']:.4f}" if isinstance(value, dict) and "ratio" in value else f"{key}: {value}")
    print(path)

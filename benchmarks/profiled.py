"""Reads a profile of a GPU: how long it computed, and in which kernels.

    python -m benchmarks.gpu --part=6L --trace=runs/trace
    python -m benchmarks.profiled runs/trace gpu_6L_profile

The result, benchmarks/results/<name>.json, has times per update: of the whole, of all kernels, of the kernels by kind,
and of the twenty kernels that take the most time. The result of `benchmarks.gpu` names the machine and the versions.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from benchmarks.gpu import PROFILED
from benchmarks.measure import RESULTS

WORST = 20

KINDS = {
    "matrix products": ("nvjet", "gemm", "cutlass"),
    "Pallas kernels": ("attention", "residual_"),
    "copies": ("Mem",),
}
"""Kind of kernels -> parts of their names; all others are fusions of element-wise operations and reductions."""


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other fusions")


def summary(data: ProfileData) -> dict[str, Any]:
    """Returns the figures of the first GPU in a profile, in milliseconds per update."""
    gpu = next(plane for plane in data.planes if plane.name.startswith("/device:GPU:"))
    kernels = [event for line in gpu.lines for event in line.events]
    span = max(event.end_ns for event in kernels) - min(event.start_ns for event in kernels)
    by_name: Counter[str] = Counter()
    for event in kernels:
        by_name[event.name] += event.duration_ns
    by_kind: Counter[str] = Counter()
    for name, duration in by_name.items():
        by_kind[kind_of(name)] += duration
    runs = Counter(event.name for event in kernels)

    def per_update(nanoseconds: float) -> float:
        return round(1e-6 * nanoseconds / PROFILED, 3)

    return {
        "span_ms": per_update(span),
        "kernels_ms": per_update(by_name.total()),
        "kernels": round(len(kernels) / PROFILED),
        "by_kind_ms": {kind: per_update(duration) for kind, duration in by_kind.most_common()},
        "worst": [
            {"name": name, "runs": round(runs[name] / PROFILED), "ms": per_update(duration)}
            for name, duration in by_name.most_common(WORST)
        ],
    }


def main() -> None:
    """Writes the summary of a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", help="of the result")
    arguments = parser.parse_args()
    profile = next(arguments.folder.rglob("*.xplane.pb"), None)
    if profile is None:
        parser.error(
            f"{arguments.folder}: no profile; make one with benchmarks.gpu --part=6L --trace={arguments.folder}"
        )
    found = summary(ProfileData.from_file(str(profile)))
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found | {"worst": len(found["worst"])}))


if __name__ == "__main__":
    main()

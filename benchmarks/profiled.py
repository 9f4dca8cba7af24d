"""Reads a profile of a GPU: how long it computed, and in which kernels.

    python -m benchmarks.gpu --part=6L --trace=runs/trace
    python -m benchmarks.profiled runs/trace gpu_6L_profile

The profile covers the three updates of `benchmarks/gpu.py`. The result, benchmarks/results/<name>.json, has times per
update: of the whole, of the kernels, of the kernels by kind, and of the twenty kernels that take the most time.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from benchmarks.measure import RESULTS

UPDATES, WORST = 3, 20

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
        return round(1e-6 * nanoseconds / UPDATES, 3)

    return {
        "span_ms": per_update(span),
        "kernels_ms": per_update(by_name.total()),
        "kernels": round(len(kernels) / UPDATES),
        "by_kind_ms": {kind: per_update(duration) for kind, duration in by_kind.most_common()},
        "worst": [
            {"name": name, "runs": round(runs[name] / UPDATES), "ms": per_update(duration)}
            for name, duration in by_name.most_common(WORST)
        ],
    }


def main() -> None:
    """Writes the summary of a profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", help="of the result")
    arguments = parser.parse_args()
    found = summary(ProfileData.from_file(str(next(arguments.folder.rglob("*.xplane.pb")))))
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found | {"worst": len(found["worst"])}))


if __name__ == "__main__":
    main()

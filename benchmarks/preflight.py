"""Compares the verdicts of the preflight with the results of finished runs.

    python -m benchmarks.preflight sweep_depth sweep_robustness sweep_tuning

Each name is that of a config of a sweep, and of its table in benchmarks/results. A run learned if its test BLEU is
above 10. Otherwise it diverged, did not learn, or never read the source. The verdict should be "healthy" for runs that
learned, and only for them. Results: docs/results_system.md.
"""

import argparse
import collections
import importlib
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import RESULTS, save
from branchnorm_jax import config as configs
from branchnorm_jax.analysis import preflight, sweep, sweep_results
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.options import Config

LEARNED = 10.0
"""Threshold in BLEU. The runs of 600 updates score below 2 or above 37."""


def by_point(point: preflight.Point) -> dict[str, Any]:
    """Returns what the rules of a verdict depend on."""
    ends = {f"similarity_{stack}": float(values[-1]) for stack, values in point.similarity.items()}
    weakest = {
        f"weakest_{stack}": float(np.min(values) / np.max(values))
        for stack, values in point.gradient.items()
        if np.max(values)
    }
    return {"step": point.step, "alpha": point.alpha, "loss": point.loss[-1], **ends, **weakest}


def verdict_of(config: Config, folder: Path) -> tuple[preflight.Verdict, list[dict[str, Any]]]:
    """Returns the verdict of `--mode=preflight` on a config, and its points; `folder` keeps the tokenised text."""
    corpus = prepare(config.data, folder, lambda line: None)
    points = preflight.run_preflight(config, corpus, lambda done, total: None)[1]
    return preflight.judge(points), [by_point(point) for point in points]


def main() -> None:
    """Judges every run and counts the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", help="names of configs")
    runs: list[tuple[str, Config, dict[str, Any]]] = []
    for name in parser.parse_args().sweeps:
        table = {
            row["run"]: row for row in sweep_results.from_csv((RESULTS / f"{name}.csv").read_text(encoding="utf-8"))
        }
        config = configs.from_config_dict(importlib.import_module(f"configs.{name}").get_config())
        runs += [(f"{name}/{run}", each, table[run]) for run, (_, each) in sweep.plan_runs(config).items()]
    rows: list[dict[str, Any]] = []
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, config, row in runs:
            bleu = float(row["bleu"] or 0)
            (word, reason), points = verdict_of(config, Path(folder) / Path(name).parent)
            learned = bleu > LEARNED
            counts[f"{word}, {'learned' if learned else 'did not'}"] += 1
            agrees = (word == "healthy") == learned
            judged = {"verdict": word, "reason": reason, "agrees": agrees, "points": points}
            rows.append({"run": name, "bleu": bleu, **judged})
            print(f"{len(rows)}/{len(runs)} {name}, BLEU {bleu:.1f}: {word}, {reason}", flush=True)
            jax.clear_caches()
    agreement = sum(row["agrees"] for row in rows) / len(rows)
    save("preflight", {**counts, "runs": len(rows), "agreement": agreement, "rows": rows})


if __name__ == "__main__":
    main()

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

from benchmarks.measure import RESULTS, save
from branchnorm_jax import config as configs
from branchnorm_jax.analysis import preflight, sweep
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.options import Config

LEARNED = 10.0
"""Threshold in BLEU. The runs of 600 updates score below 2 or above 37."""


def verdict_of(config: Config, folder: Path) -> preflight.Verdict:
    """Returns the verdict of `--mode=preflight` on a config; `folder` keeps the tokenised text."""
    corpus = prepare(config.data, folder, lambda line: None)
    return preflight.judge(preflight.run_preflight(config, corpus, lambda done, total: None)[1])


def main() -> None:
    """Judges every run and counts the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", help="names of configs")
    runs: list[tuple[str, Config, dict[str, Any]]] = []
    for name in parser.parse_args().sweeps:
        table = {row["run"]: row for row in sweep.from_csv((RESULTS / f"{name}.csv").read_text(encoding="utf-8"))}
        config = configs.from_config_dict(importlib.import_module(f"configs.{name}").get_config())
        runs += [(f"{name}/{run}", each, table[run]) for run, (_, each) in sweep.plan_runs(config).items()]
    rows: list[dict[str, Any]] = []
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name, config, row in runs:
            bleu = float(row["bleu"] or 0)
            word, reason = verdict_of(config, Path(folder) / Path(name).parent)
            learned = bleu > LEARNED
            counts[f"{word}, {'learned' if learned else 'did not'}"] += 1
            agrees = (word == "healthy") == learned
            rows.append({"run": name, "verdict": word, "reason": reason, "bleu": bleu, "agrees": agrees})
            print(f"{len(rows)}/{len(runs)} {rows[-1]}", flush=True)
            jax.clear_caches()
    agreement = sum(row["agrees"] for row in rows) / len(rows)
    save("preflight", {**counts, "runs": len(rows), "agreement": agreement, "rows": rows})


if __name__ == "__main__":
    main()

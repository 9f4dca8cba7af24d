"""Compares the verdicts of the preflight with the results of finished runs.

    python -m benchmarks.preflight runs/sweep_depth runs/sweep_robustness runs/sweep_divergence

Prints a table of right and wrong verdicts. Each folder contains the runs of a sweep. A run learned if its test BLEU is
above 10. Otherwise it diverged, did not learn, or never read the source. The verdict should be "healthy" for runs that
learned, and only for them.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

from benchmarks.measure import save
from branchnorm_jax import config as configs
from branchnorm_jax.analysis import preflight, sweep
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.workdir import Workdir

LEARNED = 10.0
"""Threshold in BLEU. The runs of 600 updates score below 2 or above 37."""


def verdict_of(folder: Workdir) -> preflight.Verdict:
    """Returns the verdict of `--mode=preflight` on the config of a run."""
    config = configs.load(folder / "config.json")
    corpus = prepare(config.data, folder.path, lambda line: None)
    return preflight.judge(preflight.run_preflight(config, corpus, lambda done, total: None)[1])


def main() -> None:
    """Judges every run and counts the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweeps", nargs="+", type=Path, help="workdirs of finished sweeps")
    folders = [path.parent for sweep_ in parser.parse_args().sweeps for path in sorted(sweep_.glob("*/status.json"))]
    rows: list[dict[str, Any]] = []
    for folder in folders:
        workdir = Workdir(folder)
        word, reason = verdict_of(workdir)
        bleu, status = sweep.score_of(workdir, "bleu"), sweep.read_json(workdir / "status.json").get("status")
        learned = bleu is not None and bleu > LEARNED
        rows.append(
            {
                "run": f"{folder.parent.name}/{folder.name}",
                "verdict": word,
                "reason": reason,
                "status": status,
                "bleu": bleu,
                "agrees": (word == "healthy") == learned,
            }
        )
        print(f"{len(rows)}/{len(folders)} {rows[-1]}", flush=True)
        jax.clear_caches()
    table = {
        f"{verdict}, {outcome}": sum(
            row["verdict"] == verdict and (row["bleu"] is not None and row["bleu"] > LEARNED) == (outcome == "learned")
            for row in rows
        )
        for verdict in ("healthy", "vanishing", "collapsing", "diverging", "still")
        for outcome in ("learned", "did not")
    }
    save(
        "preflight", {**table, "runs": len(rows), "agreement": sum(r["agrees"] for r in rows) / len(rows), "rows": rows}
    )


if __name__ == "__main__":
    main()

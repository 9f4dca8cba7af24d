"""Linear against adaptive alpha at 50L-50L: with which do more layers learn?

    python main.py --mode=sweep --config=configs/sweep_adaptive.py --workdir=runs/sweep_adaptive
    python -m benchmarks.alive runs/sweep_adaptive

Runs three seeds of each on the corpus of sweep_depth.py. Alpha grows over the whole run (T = 800 of 800 updates).
Results: docs/results.md.
"""

import ml_collections

from configs import sweep_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The corpus, width and batches of `sweep_depth.py`, with T = 800."""
    config = sweep_depth.get_config(depth)
    config.model.alpha_steps = 800
    config.train.steps = 800
    config.train.watch_every = 10
    config.sweep.grid = "depth=50L-50L model.alpha_schedule=linear,adaptive train.seed=0,1,2"
    config.sweep.columns = "model.alpha_schedule"
    config.sweep.baseline = ""
    return config

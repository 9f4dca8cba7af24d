"""Six methods on real sentences at 6L-6L and 18L-18L with two seeds, at their best settings of configs/sweep_tuning.py.

    python main.py --mode=sweep --config=configs/sweep_tatoeba.py --workdir=runs/six --config.data.path=<folder>

Everything else is as in configs/tatoeba_ende.py. The methods are the five with the highest BLEU in
configs/sweep_methods.py, and BranchNorm as published, at a quarter of the learning rate, its best one. T of ProRes is
half of the run, as in the tuning. Results: docs/results.md.
"""

import ml_collections

from configs import tatoeba_ende


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The grid; `depth` replaces the two depths. The cheap runs come first."""
    config = tatoeba_ende.get_config()
    settings = (
        "method=branchnorm train.branch_update_power=2",
        "method=deepnorm,admin,pre_ln",
        "method=prores_pre_ln model.alpha_order=linear model.alpha_steps=1500",
        "method=branchnorm train.branch_update_power=0 train.learning_rate=7.5e-4",
    )
    depths = depth.split(",") if depth else ("6L-6L", "18L-18L")
    config.sweep.grid = " | ".join(
        f"{setting} depth={one} train.seed={seed}" for seed in (1, 2) for one in depths for setting in settings
    )
    config.sweep.columns = "depth"
    config.sweep.baseline = "deepnorm"
    return config

"""Ten methods at 6L-6L and 18L-18L with three seeds, each at its best setting of configs/sweep_tuning.py.

    python main.py --mode=sweep --config=configs/sweep_methods.py --workdir=runs/methods

The seeds differ from the seed of the tuning. Corpus, width, batches and the number of updates are the same. BranchNorm
has one more row, with its default T (the warm-up of the learning rate). Results: docs/results.md.
"""

import ml_collections

from configs import sweep_tuning


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The grid, with three seeds; `depth` replaces the two depths."""
    depths = depth or "18L-18L,6L-6L"
    config = sweep_tuning.get_config()
    # All but two have this rate; DeepNorm is every run's baseline, so it must not name one.
    config.train.learning_rate = 3e-3
    settings = (
        "method=branchnorm train.branch_update_power=2 model.alpha_steps=120,200",
        "method=branchnorm model.alpha_steps=120 train.branch_update_power=0 train.learning_rate=7.5e-4",
        "method=deepnorm,pre_ln,keel,admin,rezero",
        "method=post_ln train.learning_rate=7.5e-4",
        "method=prores_pre_ln model.alpha_order=linear model.alpha_steps=600",
        "method=prores_post_ln model.alpha_order=linear model.alpha_steps=600 train.learning_rate=7.5e-4",
    )
    runs = (f"{setting} depth={depths} train.seed={seed}" for seed in (1, 2, 3) for setting in settings)
    config.sweep.grid = " | ".join(runs)
    config.sweep.columns = "depth"
    return config

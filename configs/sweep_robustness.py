"""Learning rate and warm-up at 18L-18L, as in the BranchNorm paper's Figure 6.

    python main.py --mode=sweep --config=configs/sweep_robustness.py --workdir=runs/sweep_robustness

A small version of the figure: 1, 2 and 4 times the learning rate, and no warm-up.

Another depth: --config=configs/sweep_robustness.py:50L-50L. Measured like sweep_depth.py: 16 runs, 72 minutes of
updates. Results: docs/results.md.
"""

import ml_collections

from configs import sweep_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The runs of `sweep_depth.py` with other learning rates, and with one that starts at its peak."""
    config = sweep_depth.get_config(depth or "18L-18L")
    config.train.decay_steps = config.train.warmup_steps
    methods = "method=post_ln,deepnorm,branchnorm", "method=branchnorm model.alpha_steps=200"
    rates = "train.learning_rate=1.5e-3,3e-3,6e-3", "train.learning_rate=1.5e-3 train.schedule=inverse_sqrt_nowarmup"
    config.sweep.grid = " | ".join(f"{method} {rate}" for method in methods for rate in rates)
    config.sweep.columns = "train.learning_rate,train.schedule"
    return config

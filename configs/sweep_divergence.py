"""At which learning rate does a method break? One run per method, its rate rising from 1e-5 to 0.3.

    python main.py --mode=sweep --config=configs/sweep_divergence.py --workdir=runs/divergence
    python -m benchmarks.divergence runs/divergence

Deeper: --config=configs/sweep_divergence.py:50L-50L. Other methods: --config.sweep.grid="method=...". The corpus, width
and batches are those of sweep_depth.py. Keel's paper has a test of this kind at 512 layers. Results: docs/results.md.
"""

import ml_collections

from configs import sweep_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """A learning-rate range test over the whole run; no weight decay, so that only the gradient's updates count."""
    config = sweep_depth.get_config(depth or "6L-6L")
    config.data.row_multiple = 16
    config.model.alpha_steps = 100
    config.train.steps = 600
    config.train.schedule = "range_test"
    config.train.warmup_steps = 600
    config.train.warmup_init = 1e-5
    config.train.learning_rate = 0.3
    config.train.weight_decay = 0.0
    config.train.log_every = 1
    config.train.checkpoint_every = 0
    config.sweep.grid = (
        "method=post_ln,pre_ln,deepnorm,admin,rezero,keel,branchnorm,prores_post_ln"
        " | method=branchnorm train.branch_update_power=2"
    )
    config.sweep.columns = "depth"
    config.sweep.baseline = ""
    return config

"""The learning rate at which each method diverges, from 1e-5 to 0.3.

    python main.py --mode=sweep --config=configs/sweep_divergence.py --workdir=runs/divergence
    python -m benchmarks.divergence runs/divergence

One run per method; the learning rate rises during the run. Another depth:
--config=configs/sweep_divergence.py:50L-50L. Other methods: --config.sweep.grid="method=...". Corpus, width and batches
are as in sweep_depth.py. Keel's paper has a similar test at 512 layers.
"""

import ml_collections

from configs import sweep_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """A learning-rate range test over the whole run. Without weight decay, only gradients change the weights."""
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

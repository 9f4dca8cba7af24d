"""Figure 3 of the BranchNorm paper: gradient norm and loss in the first updates, on WMT17 English-German.

    python main.py --mode=sweep --config=configs/reproduce/branchnorm_figure3.py --workdir=runs/branchnorm_figure3 \
        --config.data.tfds_dir=<folder>

metrics.jsonl of each run has the norm of the gradient and the loss of every update. The text of the paper states
neither the data set of the figure nor the depth and the number of updates; these are our choice. Another depth:
--config=configs/reproduce/branchnorm_figure3.py:100L-100L
"""

import ml_collections

from configs import wmt17_ende


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The first 400 updates of 50L-50L."""
    config = wmt17_ende.get_config(depth or "50L-50L")
    config.train.steps = 400
    config.train.log_every = 1
    config.train.watch_every = 10
    config.train.checkpoint_every = 0
    config.train.eval_every = 0
    config.train.patience = 0
    config.sweep.grid = "method=post_ln,deepnorm,branchnorm"
    config.sweep.columns = "depth"
    return config

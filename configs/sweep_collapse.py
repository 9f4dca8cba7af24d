"""Why BranchNorm's encoder collapses at 18L-18L, and what prevents it.

    python main.py --mode=sweep --config=configs/sweep_collapse.py --workdir=runs/collapse
    python -m benchmarks.collapse runs/collapse

Layer statistics are logged every 20 updates, and a checkpoint is kept every 100 updates, so that the drift of the
weights can be measured afterwards. Results: docs/results.md.
"""

import ml_collections

from configs import numerals_deep


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The training of `numerals_deep.py`, with more frequent layer statistics and all checkpoints kept."""
    config = numerals_deep.get_config(depth or "18L-18L")
    config.train.steps = 1200
    config.train.watch_every = 20
    config.train.keep_last = 12
    config.sweep.grid = (
        "method=branchnorm train.branch_update_power=0,1,2 train.seed=0,1,2"
        " | method=deepnorm,post_ln,pre_ln train.seed=0,1,2"
    )
    config.sweep.columns = "train.seed"
    config.sweep.baseline = "deepnorm"
    return config

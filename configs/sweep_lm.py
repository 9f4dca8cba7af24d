"""Decoder-only language models by method and depth, with everything else equal.

    python main.py --mode=sweep --config=configs/sweep_lm.py --workdir=runs/sweep_lm --config.data.path=<folder>

The folder contains train.txt, valid.txt and test.txt, for example those of WikiText-2. The methods are those of the
language models in ReZero's paper, and DeepNorm and BranchNorm. The vocabulary is the 256 bytes. On one core of an AMD
EPYC, the updates of a run take 1 minute at 12L and 5 to 25 at 64L. Results: docs/results.md.
"""

import ml_collections

from configs import lm


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Narrow models, which take minutes on a CPU core at 12L."""
    config = lm.get_config(depth)
    config.model.width = 64
    config.model.ffn_width = 256
    config.model.remat = "full"
    config.data.context = 128
    config.train.steps = 1000
    config.train.batch_tokens = 1024
    config.train.learning_rate = 3e-3
    config.train.warmup_steps = 300
    config.train.eval_every = 0
    config.train.checkpoint_every = 250
    config.evaluate.stride = 128
    config.decode.batch_tokens = 8192
    ours = "method=branchnorm train.branch_update_power=0,2"  # as published, and with this project's default
    others = "method=pre_ln,deepnorm,rezero,post_ln"
    config.sweep.grid = (
        f"{others},gpt2norm,rezero_one depth=12L train.seed=0,1,2 | {ours} depth=12L train.seed=0,1,2"
        f" | {ours} depth=64L | {others} depth=64L"
    )
    config.sweep.columns = "depth"
    config.sweep.baseline = "pre_ln"
    return config

"""Decoder-only language models by method and depth, with everything else equal.

    python main.py --mode=sweep --config=configs/sweep_lm.py --workdir=runs/sweep_lm --config.data.path=<folder>
    python main.py --mode=sweep --config=configs/sweep_lm.py:64L --workdir=runs/sweep_lm_64L --config.data.path=<folder>

The folder contains train.txt, valid.txt and test.txt, for example those of WikiText-2. The methods are those of the
language models in ReZero's paper, DeepNorm, BranchNorm, and methods of 2026. The vocabulary is the 256 bytes.

At 12L each method has the same four learning rates, and then two more seeds at the best one; BranchNorm as published
and ReZero with r = 1 at the start do not train here and have no more seeds. At other depths each method has three seeds
at a rate that was good at 64L. On one core of an AMD EPYC, the updates of a run take 1 minute at 12L and 6 to 10 at
64L; those of block_attnres and mhc take 2.4 and 4.5 times as long. Evaluation takes 2 seconds per 100,000 bytes at 12L.

Results: docs/results_lm.md.
"""

import ml_collections

from configs import lm

RATES = {
    "method=pre_ln": ("1.2e-2", "3e-3"),
    "method=deepnorm": ("6e-3", "3e-3"),
    "method=rezero": ("6e-3", "6e-3"),
    "method=post_ln": ("1.5e-3", "1.5e-3"),
    "method=gpt2norm": ("6e-3", "6e-3"),
    "method=prores_pre_ln": ("3e-3", "3e-3"),
    "method=branchnorm train.branch_update_power=2": ("3e-3", "1.5e-3"),  # with the default
    "method=gpas": ("6e-3", "6e-3"),
    "method=siamese_norm": ("6e-3", "6e-3"),
    "method=keel": ("1.2e-2", "1.2e-2"),
    "method=deepnorm_deeploop": ("3e-3", "3e-3"),
    "method=completep": ("6e-3", "6e-3"),
    "method=depth_mup": ("1.2e-2", "1.2e-2"),
    "method=block_attnres": ("6e-3", "6e-3"),
    "method=mhc": ("6e-3", "6e-3"),
    "method=pre_ln model.value_residual=True": ("6e-3", "6e-3"),
    "method=pre_ln model.norm=derf": ("3e-3", "3e-3"),
    "method=pre_ln train.optimizer=muon": ("1.2e-2", "1.2e-2"),
}
"""Setting -> learning rate with the lowest validation loss at 12L of the four, and the best of those tried at 64L."""

NOT_TRAINING = ("method=rezero_one", "method=branchnorm train.branch_update_power=0")


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
    config.model.alpha_steps = 300  # At 64L the default of BranchNorm has been longer since these runs.
    config.train.eval_every = 0
    config.train.checkpoint_every = 250
    config.evaluate.stride = 128
    config.decode.batch_tokens = 8192
    if depth in ("", "12L"):
        points = "depth=12L train.learning_rate=1.5e-3,3e-3,6e-3,1.2e-2 train.seed=0"
        tuned = [f"{s} {points}" for s in (*RATES, *NOT_TRAINING)]
        seeds = [f"{s} depth=12L train.learning_rate={rate} train.seed=1,2" for s, (rate, _) in RATES.items()]
        config.sweep.grid = " | ".join(tuned + seeds)
        config.sweep.baseline = "pre_ln"
    else:
        deep = [f"{s} depth={depth} train.learning_rate={rate} train.seed=0,1,2" for s, (_, rate) in RATES.items()]
        config.sweep.grid = " | ".join(deep)
    config.sweep.columns = "train.learning_rate,depth"
    return config

"""Decoder-only language models by method and depth, with everything else equal.

    python main.py --mode=sweep --config=configs/sweep_lm.py --workdir=runs/sweep_lm --config.data.path=<folder>

The folder contains train.txt, valid.txt and test.txt, for example those of WikiText-2. The methods are those of the
language models in ReZero's paper, DeepNorm, BranchNorm, and methods of 2026, each with the same four learning rates.
The vocabulary is the 256 bytes. On one core of an AMD EPYC, the updates of a run take 1 minute at 12L and 5 at 64L;
those of block_attnres and mhc take 2.5 and 4.5 times as long. Evaluation takes 2 seconds per 100,000 bytes at 12L.
Deeper:

    --config.sweep.grid="method=pre_ln,deepnorm,rezero depth=64L train.learning_rate=6e-3"

Results: docs/results.md.
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
    points = "depth=12L train.learning_rate=1.5e-3,3e-3,6e-3,1.2e-2"
    config.sweep.grid = (
        f"method=pre_ln,deepnorm,rezero,post_ln,gpt2norm,rezero_one,prores_pre_ln {points}"
        f" | method=branchnorm train.branch_update_power=0,2 {points}"  # as published, and with the default
        f" | method=gpas,siamese_norm,keel,deepnorm_deeploop,completep,depth_mup,block_attnres,mhc {points}"
        f" | method=pre_ln model.value_residual=True {points} | method=pre_ln model.norm=derf {points}"
        f" | method=pre_ln train.optimizer=muon {points}"
    )
    config.sweep.columns = "train.learning_rate,depth"
    config.sweep.baseline = "pre_ln"
    return config

"""Methods by depth on the built-in corpus, with everything else equal.

    python main.py --mode=sweep --config=configs/sweep_depth.py --workdir=runs/sweep_depth

The tables have the shape of the papers' Tables 1 and 2.

Another grid: --config.sweep.grid="method=post_ln,branchnorm depth=6L-6L train.seed=0,1,2"
The sweep ignores the options that the authors of a method recommend; --config.sweep.recommended=True applies them.
Measured on 2 cores of an AMD EPYC with jax 0.10.2: 22 runs, each on one core, 96 minutes of updates without compilation
and evaluation. Results: docs/results.md.
"""

import ml_collections

from configs import numerals


def narrow(depth: str = "") -> ml_collections.ConfigDict:
    """The corpus of the quickstart with a narrow model; all runs together take hours on two CPU cores."""
    config = numerals.get_config(depth)
    config.model.width = 64
    config.model.ffn_width = 128
    config.model.dropout = 0.0
    # At this width storing activations takes longer than recomputing them (docs/results.md).
    config.model.remat = "full"
    config.train.steps = 600
    config.train.batch_tokens = 1024
    config.train.learning_rate = 1.5e-3
    config.train.warmup_steps = 200
    config.train.schedule = "inverse_sqrt"
    config.train.eval_every = 0
    config.train.eval_bleu_sentences = 0
    config.train.best_metric = "loss"
    config.train.checkpoint_every = 200
    return config


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Methods and depths; alpha grows over the whole run unless the grid says otherwise."""
    config = narrow(depth)
    config.model.alpha_steps = 600
    config.sweep.grid = (
        "method=post_ln,pre_ln,deepnorm,branchnorm,rezero,sub_ln,t_fixup,admin depth=6L-6L,18L-18L"
        # T = 600 spans the run; T = 200 ends with the warm-up, as the paper's 4000 does.
        " | method=branchnorm depth=6L-6L,18L-18L,50L-50L model.alpha_steps=200"
        " | method=post_ln,deepnorm,branchnorm depth=50L-50L"
    )
    config.sweep.baseline = "deepnorm"
    return config

"""Methods by depth on the built-in corpus, everything else equal: the shape of the papers' Tables 1 and 2.

    python main.py --mode=sweep --config=configs/sweep_depth.py --workdir=runs/sweep

Another grid: --config.sweep.grid="method=post_ln,branchnorm depth=6L-6L train.learning_rate=1e-3,2e-3"
with --config.sweep.columns=train.learning_rate. The options that a method's authors recommend are not taken here.
"""

import ml_collections

from configs import numerals


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The quickstart's run at width 64."""
    config = numerals.get_config(depth)
    config.model.width = 64
    config.model.ffn_width = 128
    config.train.eval_every = 0
    config.train.checkpoint_every = 300
    config.sweep.grid = (
        "method=post_ln,pre_ln,deepnorm,branchnorm,rezero,sub_ln,t_fixup,admin depth=6L-6L,18L-18L"
        " | method=post_ln,deepnorm,branchnorm depth=50L-50L"
    )
    config.sweep.baseline = "deepnorm"
    return config

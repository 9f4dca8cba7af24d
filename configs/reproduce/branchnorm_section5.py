"""Section 5 of the BranchNorm paper, Figures 6 to 9: 100L-100L on WMT14 English-French.

    python main.py --mode=sweep --config=configs/reproduce/branchnorm_section5.py --workdir=runs/branchnorm_section5 \
        --config.data.tfds_dir=<folder>
    python main.py --mode=analyze --workdir=runs/branchnorm_section5/<run>

The grid has learning rates and a run without warm-up (Figure 6; the text of the paper does not state the rates), the
four values of T (Section 5.1) and the three growth strategies of alpha (Figure 7). layers.jsonl of each run has the
cosine of the input and output of every layer (Figure 8) and the share of hidden feed-forward units that are 0 (Figure
9). --mode=analyze draws them.
"""

import ml_collections

from configs import wmt14_enfr


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """DeepNorm and BranchNorm as published."""
    config = wmt14_enfr.get_config(depth or "100L-100L")
    config.train.watch_every = 1000
    methods = "method=deepnorm,branchnorm"
    config.sweep.grid = (
        f"{methods} train.learning_rate=5e-4,1e-3,2e-3"
        f" | {methods} train.schedule=inverse_sqrt_nowarmup"
        " | method=branchnorm model.alpha_steps=100,400,20000"
        " | method=branchnorm model.alpha_schedule=exp,sigmoid"
    )
    config.sweep.columns = "depth"
    return config

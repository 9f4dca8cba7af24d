"""Table 3 of "Transformers without Tears": Post-LN, Pre-LN, FixNorm and ScaleNorm.

    python main.py --mode=sweep --config=configs/reproduce/tears_table3.py --workdir=runs/tears_table3 \
        --config.data.path=<folder> --config.data.source_lang=en --config.data.target_lang=he

All rows have the paper's small initialisation except the last, Post-LN with Xavier. The paper's test BLEU (multi-bleu,
en-he): Post-LN 27.85, Pre-LN 28.13, with FixNorm 28.39, with FixNorm and ScaleNorm 28.44. Table 8, the smoothed
perplexities of LayerNorm and ScaleNorm, comes from the same runs.
"""

import ml_collections

from configs.reproduce import tears


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Four methods as in the paper, and Post-LN with Xavier: 15 runs, compared with Post-LN of the same seed."""
    rows = ["method=post_ln,pre_ln", tears.FIX_NORM, tears.SCALE_NORM, "method=post_ln model.init=xavier_normal"]
    return tears.sweep(rows, baseline="post_ln", depth=depth)

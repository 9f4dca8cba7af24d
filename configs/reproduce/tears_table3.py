"""Table 3 of "Transformers without Tears": Post-LN, Pre-LN, FixNorm and ScaleNorm.

    python main.py --mode=sweep --config=configs/reproduce/tears_table3.py --workdir=runs/tears_table3 \
        --config.data.path=<folder> --config.data.source_lang=en --config.data.target_lang=he

All rows have the paper's small initialisation except Post-LN with Xavier. The last two rows come from Table 4: no
warm-up, and twice the learning rate. They are here to be compared with Post-LN, too. The paper's test BLEU (multi-bleu,
en-he): Post-LN 27.85, Pre-LN 28.13, with FixNorm 28.39, with FixNorm and ScaleNorm 28.44. Table 8, the smoothed
perplexities of LayerNorm and ScaleNorm, comes from the same runs.
"""

import ml_collections

from configs.reproduce import tears


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Four methods of the paper, Post-LN with Xavier, two rows of Table 4: 21 runs. The baseline is Post-LN."""
    rows = ["method=post_ln,pre_ln", tears.FIX_NORM, tears.SCALE_NORM, "method=post_ln model.init=xavier_normal"]
    rows += [f"{tears.SCALE_NORM} {tears.NO_WARMUP}", f"{tears.SCALE_NORM} train.learning_rate=8e-3"]
    return tears.sweep(rows, baseline="post_ln", depth=depth)

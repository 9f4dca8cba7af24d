"""Table 2 of "Transformers without Tears": Xavier and small initialisation, three lengths of warm-up.

    python main.py --mode=sweep --config=configs/reproduce/tears_table2.py --workdir=runs/tears_table2 \
        --config.data.path=<folder> --config.data.source_lang=en --config.data.target_lang=he

The warm-ups are half, once and twice that of the other tables, as in the paper. The paper's validation BLEU (en-vi):
Post-LN with Xavier fails twice and has 5.76 with the longest warm-up; the other rows have 28.17 to 28.73.
"""

import ml_collections

from configs.reproduce import tears


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Two methods, two initialisations and three warm-ups: 36 runs."""
    inits = [
        f"method=post_ln,pre_ln model.init={init} train.warmup_steps=200,400,800" for init in ("xavier_normal", "small")
    ]
    return tears.sweep(inits, columns="train.warmup_steps", depth=depth)

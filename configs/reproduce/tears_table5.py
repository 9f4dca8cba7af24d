"""Table 5 of "Transformers without Tears": Post-LN and Pre-LN without warm-up, by depth.

    python main.py --mode=sweep --config=configs/reproduce/tears_table5.py --workdir=runs/tears_table5 \
        --config.data.path=<folder> --config.data.source_lang=en --config.data.target_lang=he

The paper's depths, 4 to 6 layers, and a greater one, because narrow models fail later. The paper's validation BLEU
(en-vi) at 4, 5 and 6 layers: Post-LN 18.31, fails, fails; Pre-LN 28.33, 28.13, 28.32.
"""

import ml_collections

from configs.reproduce import tears


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Two methods and four depths: 24 runs. The grid sets the depths."""
    depths = "depth=4L-4L,5L-5L,6L-6L,12L-12L"
    return tears.sweep([f"method=post_ln,pre_ln {tears.NO_WARMUP} {depths}"], depth=depth)

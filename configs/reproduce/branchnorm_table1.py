"""Table 1 and Figure 4 of the BranchNorm paper: methods by depth on WMT17 English-German.

    python main.py --mode=sweep --config=configs/reproduce/branchnorm_table1.py --workdir=runs/branchnorm_table1 \
        --config.data.tfds_dir=<folder>

configs/wmt17_ende.py says how to prepare the text, and lists the differences from the paper. Figure 4 is the validation
BLEU of the 50L-50L runs over the updates, in their validation.jsonl.
"""

import ml_collections

from configs import wmt17_ende

OURS = "method=branchnorm train.branch_update_power=2 model.alpha_end=7/cbrt(n)"
"""BranchNorm with this project's defaults. In a grid, `method=branchnorm` alone is the method as published."""


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """All methods of the table, and BranchNorm with this project's defaults. The grid sets the depths."""
    config = wmt17_ende.get_config(depth)
    methods = "post_ln,ds_init,admin,rezero,fixup,t_fixup,pre_ln,dlcl,normformer,sub_ln,deepnorm,branchnorm"
    depths = "depth=6L-6L,18L-18L,50L-50L,100L-100L,250L-250L"
    config.sweep.grid = f"method={methods} {depths} | {OURS} {depths}"
    config.sweep.baseline = "deepnorm"
    return config

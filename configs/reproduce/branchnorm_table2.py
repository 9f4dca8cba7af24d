"""Table 2 and Figure 1 of the BranchNorm paper: methods by depth on WMT14 English-French.

    python main.py --mode=sweep --config=configs/reproduce/branchnorm_table2.py --workdir=runs/branchnorm_table2 \
        --config.data.tfds_dir=<folder>

configs/wmt14_enfr.py says how to prepare the text. The paper does not define its MixNorm; docs/methods.md has our
interpretation. Figure 1 compares Post-LN and DeepNorm where both converge.
"""

import ml_collections

from configs import wmt14_enfr
from configs.reproduce import branchnorm_table1


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """All methods of the table, and BranchNorm with this project's defaults. The grid sets the depths."""
    config = wmt14_enfr.get_config(depth)
    methods = "post_ln,pre_ln,dlcl,sub_ln,deepnorm,mixnorm,branchnorm"
    depths = "depth=6L-6L,18L-18L,50L-50L,100L-100L,250L-250L,500L-500L"
    config.sweep.grid = f"method={methods} {depths} | {branchnorm_table1.OURS} {depths}"
    config.sweep.baseline = "deepnorm"
    return config

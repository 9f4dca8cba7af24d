"""Figure 5 of the BranchNorm paper, its smallest data set: IWSLT14 German-English by depth.

    python main.py --mode=sweep --config=configs/reproduce/branchnorm_figure5.py --workdir=runs/branchnorm_figure5 \
        --config.data.path=<folder>

configs/iwslt14_deen.py describes the folder. The curves of WMT17 and WMT14 are the rows of branchnorm_table1.py and
branchnorm_table2.py.
"""

import ml_collections

from configs import iwslt14_deen
from configs.reproduce import branchnorm_table1


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """DeepNorm and BranchNorm. The grid sets the depths."""
    config = iwslt14_deen.get_config(depth)
    depths = "depth=6L-6L,18L-18L,50L-50L,100L-100L,250L-250L"
    config.sweep.grid = f"method=deepnorm,branchnorm {depths} | {branchnorm_table1.OURS} {depths}"
    config.sweep.baseline = "deepnorm"
    return config

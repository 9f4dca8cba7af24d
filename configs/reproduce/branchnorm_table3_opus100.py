"""Table 3 of the BranchNorm paper, left half: OPUS-100.

    python main.py --mode=sweep --config=configs/reproduce/branchnorm_table3_opus100.py \
        --workdir=runs/branchnorm_table3_opus100 --config.data.path=<folder>

configs/opus100.py describes the folder. The right half of the table is branchnorm_table3_multiun.py. The paper cites
the rows of 12 to 48 layers from Zhang et al. (2020).
"""

import ml_collections

from configs import opus100
from configs.reproduce import branchnorm_table1

DEPTHS = "depth=100L-100L,500L-500L"
GRID = f"method=pre_ln,deepnorm,branchnorm {DEPTHS} | {branchnorm_table1.OURS} {DEPTHS}"


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Three methods and two depths. The grid sets the depths."""
    config = opus100.get_config(depth)
    config.sweep.grid = GRID
    return config

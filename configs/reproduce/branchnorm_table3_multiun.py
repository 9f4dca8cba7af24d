"""Table 3 of the BranchNorm paper, right half: MultiUN.

    python main.py --mode=sweep --config=configs/reproduce/branchnorm_table3_multiun.py \
        --workdir=runs/branchnorm_table3_multiun --config.data.path=<folder>

configs/multiun.py describes the folder.
"""

import ml_collections

from configs import multiun
from configs.reproduce import branchnorm_table3_opus100


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Three methods and two depths. The grid sets the depths."""
    config = multiun.get_config(depth)
    config.sweep.grid = branchnorm_table3_opus100.GRID
    return config

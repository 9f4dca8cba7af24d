"""Figure 4 of "Transformers without Tears": the learned g of ScaleNorm by depth, with and without label smoothing.

    python main.py --mode=sweep --config=configs/reproduce/tears_figure4.py --workdir=runs/tears_figure4 \
        --config.data.path=<folder> --config.data.source_lang=en --config.data.target_lang=he

The runs with label smoothing are those of Figure 3.
"""

import ml_collections

from configs.reproduce import tears


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Pre-LN with FixNorm and ScaleNorm at the paper's depth: 6 runs."""
    return tears.sweep([f"{tears.SCALE_NORM} train.label_smoothing=0.1,0.0"], depth=depth or "6L-6L")

"""Table 7 of "Transformers without Tears": RMSNorm, and ScaleNorm with learned or fixed g.

    python main.py --mode=sweep --config=configs/reproduce/tears_table7.py --workdir=runs/tears_table7 \
        --config.data.path=<folder> --config.data.source_lang=en --config.data.target_lang=he

With fixed g (scale_norm_fixed), only the norm after the decoder learns its g. The paper's test BLEU (en-he): RMSNorm
28.29, ScaleNorm 28.44, fixed g 28.19, fixed g with ValDecay 27.97, and with twice the learning rate 25.00.
"""

import ml_collections

from configs.reproduce import tears


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Three norms with the schedule of the other tables, and two further schedules for fixed g: 15 runs."""
    rows = [
        f"{tears.FIX_NORM} model.norm=rms_norm,scale_norm,scale_norm_fixed",
        f"{tears.FIX_NORM} model.norm=scale_norm_fixed train.schedule=val_decay train.learning_rate=4e-3,8e-3",
    ]
    return tears.sweep(rows, depth=depth)

"""Table 4 of "Transformers without Tears": five learning-rate schedules for Pre-LN with FixNorm and ScaleNorm.

    python main.py --mode=sweep --config=configs/reproduce/tears_table4.py --workdir=runs/tears_table4 \
        --config.data.path=<folder> --config.data.source_lang=en --config.data.target_lang=he

The paper's validation BLEU (en-he): NoWarmup 30.33, InvSqrtDecay 30.30, ValDecay 30.69, InvSqrtDecay with twice the
learning rate 30.50, ValDecay with twice the learning rate 30.13.
"""

import ml_collections

from configs.reproduce import tears


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """NoWarmup, and two schedules with two learning rates: 15 runs."""
    schedules = [tears.NO_WARMUP, "train.schedule=inverse_sqrt,val_decay train.learning_rate=4e-3,8e-3"]
    return tears.sweep([f"{tears.SCALE_NORM} {schedule}" for schedule in schedules], depth=depth)

"""A small grid: the best learning rate and T of each method at 18L-18L.

    python main.py --mode=sweep --config=configs/sweep_tuning.py --workdir=runs/tuning

The grid has three learning rates, two values of T for methods with a growing branch (a tenth and half of the run), and
two values of train.branch_update_power for BranchNorm. Corpus, width and batches are as in numerals_deep.py.
"""

import ml_collections

from configs import numerals_deep


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The grid, with 1200 updates per run and one seed."""
    config = numerals_deep.get_config(depth or "18L-18L")
    config.train.steps = 1200
    rates = "train.learning_rate=3e-3,1.5e-3,7.5e-4"
    lengths = f"{rates} model.alpha_steps=120,600"
    config.sweep.grid = (
        f"method=branchnorm train.branch_update_power=0,2 {lengths}"
        f" | method=deepnorm,pre_ln,keel,admin,rezero,post_ln {rates}"
        f" | method=prores_post_ln,prores_pre_ln model.alpha_order=linear {lengths}"
    )
    config.sweep.columns = "train.learning_rate"
    config.sweep.baseline = "deepnorm"
    return config

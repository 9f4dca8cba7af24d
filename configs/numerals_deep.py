"""A Transformer of 200 layers that translates, trained on a CPU: 100L-100L on the built-in corpus.

    python main.py --config=configs/numerals_deep.py --workdir=runs/numerals_deep
    python main.py --mode=evaluate --workdir=runs/numerals_deep

Measured on one core of an AMD EPYC with jax 0.10.2, at commit 1ef1dc1: test sacreBLEU 97.7,
nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. 1700 updates with validation take 74 minutes.

Another depth, encoder-decoder: --config=configs/numerals_deep.py:50L-50L
"""

import ml_collections

from configs import sweep_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The narrow model of `sweep_depth.py`, and alpha that ends with the warm-up as in the paper."""
    config = sweep_depth.get_config(depth or "100L-100L")
    config.model.alpha_steps = config.train.warmup_steps
    # Rows of 64 positions instead of 128: at width 64 attention is most of the work.
    config.data.row_multiple = 16
    config.train.steps = 1700
    config.train.watch_every = 50
    config.train.eval_every = 100
    config.train.checkpoint_every = 100
    config.train.keep_last = 2
    config.sweep.grid = ""
    config.sweep.baseline = ""
    return config

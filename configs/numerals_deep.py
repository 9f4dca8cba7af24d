"""Transformers of 200 and 1000 layers on the built-in corpus, on one CPU core.

    python main.py --config=configs/numerals_deep.py --workdir=runs/numerals_deep
    python main.py --mode=evaluate --workdir=runs/numerals_deep

Measured on one core with jax 0.10.2, English-German, after 1700 updates
(nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0):

- 100L-100L, width 64: test sacreBLEU 99.2 with the best checkpoint, of update 1600. The updates took 46 minutes on an
  Intel Xeon (commit 64d69c2, with the present defaults given as options).
- 500L-500L, width 32 (`numerals_deep.py:500L-500L`): test sacreBLEU 62.9. The updates took 119 minutes on an Intel Xeon
  next to other work (commit e99b1b0).

Another depth, encoder-decoder: --config=configs/numerals_deep.py:50L-50L
"""

import ml_collections

from configs import sweep_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The narrow model of `sweep_depth.py`; half as wide from 250 layers per stack on."""
    config = sweep_depth.narrow(depth or "100L-100L")
    if max(config.model.encoder_layers, config.model.decoder_layers) >= 250:
        # So that one core makes the 1700 updates within an hour.
        config.model.width, config.model.ffn_width, config.model.heads = 32, 64, 2
    # Rows of 64 positions instead of 128: at width 64 attention is most of the work.
    config.data.row_multiple = 16
    config.train.steps = 1700
    config.train.watch_every = 50
    config.train.eval_every = 100
    config.train.checkpoint_every = 100
    config.train.keep_last = 2
    return config

"""Multi30k English-German: a tiny Transformer with heavy regularisation.

    python main.py --config=configs/multi30k_ende.py --workdir=runs/multi30k --config.data.path=<folder>

The corpus has 29,000 image captions. It is in https://github.com/multi30k/dataset under data/task1/raw: train.en.gz,
val.en.gz and test_2016_flickr.en.gz, and the same in German. The folder contains {train,valid,test}.{en,de}, plain or
compressed. The default folder is $BRANCHNORM_DATA/multi30k; if the variable is not set, data/multi30k.

Measured on 2 cores of an AMD EPYC with jax 0.10.2 at commit 265c0a8: 8000 updates (31 epochs) with validation and
evaluation take 27 minutes. Test (test_2016) sacreBLEU 37.2, nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0;
multi-bleu on Moses tokens 37.2.
"""

import os

import ml_collections

from branchnorm_jax.config import default_config, set_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """4L-4L, width 128, as in the Multi30k literature's text-only baselines."""
    config = default_config()
    config.model.encoder_layers = 4
    config.model.decoder_layers = 4
    config.model.width = 128
    config.model.ffn_width = 256
    config.model.heads = 4
    config.model.dropout = 0.3
    config.model.alpha_steps = 2000
    config.data.source = "text"
    config.data.path = os.path.join(os.environ.get("BRANCHNORM_DATA", "data"), "multi30k")
    config.data.source_lang = "en"
    config.data.target_lang = "de"
    config.data.vocab_size = 6000
    config.data.max_length = 64
    config.train.steps = 8000
    config.train.batch_tokens = 2048
    config.train.learning_rate = 1e-3
    config.train.branch_update_power = 0.0  # the score above is from plain updates
    config.train.warmup_steps = 1000
    config.train.eval_every = 2000
    config.train.checkpoint_every = 2000
    config.decode.beam_size = 5
    config.decode.max_length_a = 1.2
    config.decode.max_length_b = 10
    config.decode.length_penalty = 1.0
    set_depth(config, depth)
    return config

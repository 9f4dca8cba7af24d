"""Short everyday sentences, English-German, to compare depths at one small width.

    python main.py --config=configs/tatoeba_ende.py:18L-18L --workdir=runs/tatoeba_18L --config.data.path=<folder>
    python main.py --mode=evaluate --workdir=runs/tatoeba_18L

The corpus has 156,355 training pairs (156,344 of at most 64 tokens) of seven words on average, from tatoeba.org: the
German-English pairs that manythings.org had in May 2018. 1.2 % of the English sentences, with all of their
translations, are the validation text, and 1.2 % the test text; training pairs whose German side is in either are left
out. (Another split of these pairs gives similar scores, not the same.) The folder contains {train,valid,test}.{en,de},
plain or compressed. The default folder is $BRANCHNORM_DATA/tatoeba_en-de; if the variable is not set,
data/tatoeba_en-de.

Measured on an H200 with jax 0.11.2 at commit e99b1b0, eleven runs at a time: test sacreBLEU 27.9 at 6L-6L (1 minute of
updates), 31.0 at 18L-18L (3 minutes) and 32.2 at 50L-50L (7 minutes), each with --config.train.seed=1;
nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0. On one core of an AMD EPYC the updates take 7, 18 and 54
minutes; 50L-50L with seed 0 has 31.5. Results, also for half the learning rate and for other methods: docs/results.md.
"""

import os

import ml_collections

from branchnorm_jax.config import default_config, set_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Width 64 and no dropout, so that updates are cheap and more layers are the only way to a larger model."""
    config = default_config()
    config.model.width = 64
    config.model.ffn_width = 128
    config.model.heads = 4
    config.model.dropout = 0.0
    config.model.remat = "full"  # faster than storing activations at this width
    config.data.source = "text"
    config.data.path = os.path.join(os.environ.get("BRANCHNORM_DATA", "data"), "tatoeba_en-de")
    config.data.source_lang = "en"
    config.data.target_lang = "de"
    config.data.vocab_size = 4000
    config.data.max_length = 64
    config.data.row_multiple = 16
    config.train.steps = 3000
    config.train.batch_tokens = 2048
    config.train.learning_rate = 3e-3
    config.train.warmup_steps = 300
    config.train.eval_every = 300
    config.train.checkpoint_every = 300
    config.train.eval_bleu_sentences = 0
    config.train.best_metric = "loss"
    config.train.watch_every = 50
    set_depth(config, depth or "18L-18L")
    return config

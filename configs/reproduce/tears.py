"""The experiments of "Transformers without Tears" (arXiv 1910.05895) on a corpus of some thousand short sentences.

    python main.py --config=configs/reproduce/tears.py:4L-4L --workdir=runs/tears --config.data.path=<folder> \
        --config.data.source_lang=en --config.data.target_lang=he

The folder contains {train,valid,test}.{en,he}, plain or compressed. This file has the options that the paper's tables
share; tears_table2.py and the files after it are sweeps over it. It is configs/ted.py for one CPU core: width 64,
batches of 1024 tokens, 2,000 updates, and a learning rate that fits them. The paper chooses checkpoints by validation
BLEU; this config takes the validation loss, which needs no translations.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import ted

NO_WARMUP = "train.schedule=val_decay train.warmup_steps=0 train.learning_rate=2.4e-3"
"""The paper's NoWarmup: the learning rate is 0.6 of the peak of the other schedules, 4e-3."""

FIX_NORM = "method=pre_ln model.embedding=fixnorm"
SCALE_NORM = f"{FIX_NORM} model.norm=scale_norm"


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Pre-LN with the paper's initialisation, without FixNorm and ScaleNorm."""
    config = ted.get_config()
    config.model.method = "pre_ln"
    config.model.init = "small"
    config.model.width = 64
    config.model.ffn_width = 256
    config.model.heads = 4
    config.model.dropout = 0.1
    config.model.attention_dropout = 0.1
    config.model.activation_dropout = 0.1
    config.model.remat = "full"  # Faster than storing activations at this width.
    config.data.source = "text"
    config.data.path = ""
    config.data.valid_split = "valid"
    config.data.source_lang = "en"
    config.data.target_lang = "he"
    config.data.vocab_size = 3000
    config.data.max_length = 64
    config.data.row_multiple = 16
    config.train.steps = 2000
    config.train.batch_tokens = 1024
    config.train.learning_rate = 4e-3
    config.train.warmup_steps = 400
    config.train.warmup_init = 0.0
    config.train.min_learning_rate = 1e-5
    config.train.patience = 0
    config.train.eval_every = 100
    config.train.checkpoint_every = 500
    config.train.eval_bleu_sentences = 0
    config.train.best_metric = "loss"
    set_depth(config, depth or "4L-4L")
    return config


def sweep(rows: list[str], baseline: str = "", columns: str = "depth", depth: str = "") -> ml_collections.ConfigDict:
    """Returns the config of a table: each row of a grid with three seeds. All rows have one seed before the next."""
    config = get_config(depth)
    config.sweep.grid = " | ".join(f"{row} train.seed={seed}" for seed in (0, 1, 2) for row in rows)
    config.sweep.baseline = baseline
    config.sweep.columns = columns
    return config

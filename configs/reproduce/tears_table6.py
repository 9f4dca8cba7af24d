"""Table 6 of "Transformers without Tears": WMT14 English-German, a setting with much data.

    python main.py --mode=sweep --config=configs/reproduce/tears_table6.py --workdir=runs/tears_table6 \
        --config.data.tfds_dir=<folder>

configs/wmt17_ende.py says how to prepare the text; this table needs wmt14_translate/de-en. The options are those of the
fairseq command in the paper's appendix C: at most 40 epochs, 10 x 8192 tokens per update and device (here one device).
The paper scores tokenised BLEU with compound splitting, which --mode=evaluate reports as compound_split_bleu.
"""

import ml_collections

from configs import wmt17_ende


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Pre-LN and Post-LN, each with LayerNorm, and with FixNorm and ScaleNorm."""
    config = wmt17_ende.get_config(depth)
    config.model.dropout = 0.1
    config.model.attention_dropout = 0.1
    config.model.activation_dropout = 0.1
    config.data.path = "wmt14_translate/de-en"
    config.data.valid_split = "validation"  # newstest2013
    config.data.test_split = "test"  # newstest2014
    config.data.vocab_size = 32_000
    config.train.steps = 0
    config.train.epochs = 40
    config.train.batch_tokens = 10 * 8192
    config.train.accumulation = 1
    config.train.learning_rate = 1e-3
    config.train.weight_decay = 0.0
    config.train.clip_norm = 1.0
    config.train.patience = 0
    methods = "method=pre_ln,post_ln"
    config.sweep.grid = f"{methods} | {methods} model.norm=scale_norm model.embedding=fixnorm"
    return config

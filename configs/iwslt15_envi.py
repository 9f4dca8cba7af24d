"""IWSLT15 English-Vietnamese, 133,000 pairs, as in "Transformers without Tears".

    python main.py --config=configs/iwslt15_envi.py:6L-6L --workdir=runs/en-vi --config.data.path=<folder>

The folder contains train.{en,vi}, tst2012.{en,vi} (validation) and tst2013.{en,vi} (test) from Stanford's NMT page,
already tokenised. Undo Moses's escapes (&apos; and others) first, because `multi_bleu` tokenises again.

This config has not been trained here. The setting is that of the paper's Tables 1 and 3. Its test BLEU (multi-bleu)
is 32.79, and 31.94 with Post-LN. configs/ted.py describes the schedules and the differences from the paper.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import ted


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """As the TED pairs, on text files."""
    config = ted.get_config()
    config.data.source = "text"
    config.data.path = ""
    config.data.source_lang = "en"
    config.data.target_lang = "vi"
    config.data.valid_split = "tst2012"
    config.data.test_split = "tst2013"
    config.train.steps = 300_000
    config.train.eval_every = 1500
    config.train.checkpoint_every = 1500
    set_depth(config, depth)
    return config

"""IWSLT15 English-Vietnamese, 133,000 pairs: "Transformers without Tears", Tables 1 and 3.

    python main.py --config=configs/iwslt15_envi.py:6L-6L --workdir=runs/en-vi --config.data.path=<folder>

The folder holds train.{en,vi}, tst2012.{en,vi} (validation) and tst2013.{en,vi} (test), as Stanford's NMT page gives
them, already tokenised; undo Moses's escapes (&apos; and the like) first, for `multi_bleu` tokenises again. Not trained
here; the paper's test BLEU (multi-bleu): 32.79, Post-LN 31.94. Schedules and differences as in configs/ted.py.
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

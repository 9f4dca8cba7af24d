"""IWSLT14 German-English, 160,000 pairs: the BranchNorm paper's third bilingual set, with its Table 4's options.

    python main.py --config=configs/iwslt14_deen.py:18L-18L --workdir=runs/iwslt14 --config.data.path=<folder>

The folder holds {train,valid,test}.{de,en}, as fairseq's prepare-iwslt14.sh leaves them in its folder tmp: 160,239
training, 7,283 validation and 6,750 test pairs, tokenised and in lower case. Published scores are of those tokens. Undo
Moses's escapes (&apos; and the like, deescape-special-chars.perl) before training: `multi_bleu` tokenises again, and
would count each of them as several words.

The paper's batch, 524,288 tokens, is an eighth of this corpus; on one device 4096 are usual:
--config.train.batch_tokens=4096 --config.train.accumulation=1 --config.data.row_multiple=8 --config.model.dropout=0.3
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import wmt17_ende


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """As WMT17, on text files."""
    config = wmt17_ende.get_config()
    config.data.source = "text"
    config.data.path = ""
    config.data.source_lang = "de"
    config.data.target_lang = "en"
    config.data.valid_split = "valid"
    config.data.test_split = "test"
    config.data.vocab_size = 10_000
    config.data.max_length = 175
    set_depth(config, depth)
    return config

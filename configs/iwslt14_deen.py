"""IWSLT14 German-English, 160,000 pairs, with the options of the BranchNorm paper.

    python main.py --config=configs/iwslt14_deen.py:18L-18L --workdir=runs/iwslt14 --config.data.path=<folder>

The options are those of the paper's Table 4. The folder contains {train,valid,test}.{de,en}, as fairseq's
prepare-iwslt14.sh writes them to its folder tmp: 160,239 training, 7,283 validation and 6,750 test pairs, tokenised and
in lower case. Published scores are computed on these tokens. Undo Moses's escapes (&apos; and others, with
deescape-special-chars.perl) before training, because `multi_bleu` tokenises again and would count each escape as
several words.

The paper's batch of 524,288 tokens is an eighth of this corpus. On one device, 4096 tokens are usual:
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

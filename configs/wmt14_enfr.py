r"""WMT14 English-French: Table 2 of the BranchNorm paper.

    python main.py --config=configs/wmt14_enfr.py:100L-100L --workdir=runs/wmt14 --config.data.tfds_dir=<folder>

The options are those of the paper's Table 4.

Prepare the text once (41 million pairs; tens of gigabytes), with the same <folder>:

    python -c "import tensorflow_datasets as tfds, tensorflow_datasets.translate; \
        tfds.builder('wmt14_translate/fr-en', data_dir='<folder>', file_format='array_record').download_and_prepare()"

Hardware, positions and epsilon are as in configs/wmt17_ende.py. This config has not been trained here. The paper's BLEU
(multi-bleu) is 41.67 at 6L-6L, 43.53 at 18L-18L, 44.20 at 100L-100L and 44.27 at 500L-500L.

The paper uses fairseq's prepare-wmt14en2fr.sh. The script tokenises with Moses and learns 40,000 BPE merges; here
SentencePiece learns 40,000 BPE pieces. The script validates on every 1333rd training pair, this config on newstest2013.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import wmt17_ende


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """As WMT17, with less dropout and without early stopping."""
    config = wmt17_ende.get_config()
    config.model.dropout = 0.2
    config.data.path = "wmt14_translate/fr-en"
    config.data.source_lang = "en"
    config.data.target_lang = "fr"
    config.data.valid_split = "validation"  # newstest2013
    config.data.test_split = "test"  # newstest2014
    config.train.patience = 0
    set_depth(config, depth)
    return config

"""WMT14 English-French: the BranchNorm paper's Table 2, up to 500L-500L, with its Table 4's options.

    python main.py --config=configs/wmt14_enfr.py:100L-100L --workdir=runs/wmt14 --config.data.tfds_dir=<folder>

Prepare the text once (41 million pairs; tens of gigabytes), <folder> as above:

    python -c "import tensorflow_datasets as tfds, tensorflow_datasets.translate;
        tfds.builder('wmt14_translate/fr-en', data_dir='<folder>', file_format='array_record').download_and_prepare()"

Hardware as in configs/wmt17_ende.py. Not trained here; the paper's BLEU (multi-bleu): 41.67 at 6L-6L, 43.53 at 18L-18L,
44.20 at 100L-100L, 44.27 at 500L-500L.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import wmt17_ende


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """As WMT17, with less dropout."""
    config = wmt17_ende.get_config()
    config.model.dropout = 0.2
    config.data.path = "wmt14_translate/fr-en"
    config.data.source_lang = "en"
    config.data.target_lang = "fr"
    config.data.valid_split = "validation"  # newstest2013
    config.data.test_split = "test"  # newstest2014
    set_depth(config, depth)
    return config

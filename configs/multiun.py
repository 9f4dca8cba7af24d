"""MultiUN, the six languages of the United Nations: the BranchNorm paper's Table 3.

    python main.py --config=configs/multiun.py:100L-100L --workdir=runs/multiun --config.data.path=<folder>

The folder holds {train,valid,test}.{pair}.{lang}, as train.ar-en.ar and train.ar-en.en, of the pairs with English (Gu
et al., 2019): cut the MultiUN corpus of OPUS. The other directions are asked for without having been trained:
--mode=evaluate --config.evaluate.pairs=ar+es+fr+ru+zh

Hardware, positions and epsilon as in configs/wmt17_ende.py; not trained here. The paper's BLEU is sacreBLEU without
case.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import opus100


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """As OPUS-100, with pairs of like size: no temperature."""
    config = opus100.get_config()
    config.data.files = "{split}.{pair}.{lang}"
    config.data.pairs = "en-ar+es+fr+ru+zh,ar+es+fr+ru+zh-en"
    config.data.valid_pairs = ""
    config.data.temperature = 1.0
    config.data.valid_split = "valid"
    config.data.vocab_size = 40_000
    set_depth(config, depth)
    return config

"""MultiUN, the six UN languages: Table 3 of the BranchNorm paper.

    python main.py --config=configs/multiun.py:100L-100L --workdir=runs/multiun --config.data.path=<folder>

The folder contains {train,valid,test}.{pair}.{lang}, such as train.ar-en.ar and train.ar-en.en, for the pairs with
English (Gu et al., 2019); split the MultiUN corpus of OPUS. To evaluate the other directions, which are not trained:
--mode=evaluate --config.evaluate.pairs=ar+es+fr+ru+zh

Hardware, positions and epsilon are as in configs/wmt17_ende.py. This config has not been trained here. The paper's BLEU
is sacreBLEU, not cased.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import opus100


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """As OPUS-100, but without a sampling temperature, because the pairs have similar sizes."""
    config = opus100.get_config()
    config.data.files = "{split}.{pair}.{lang}"
    config.data.pairs = "en-ar+es+fr+ru+zh,ar+es+fr+ru+zh-en"
    config.data.valid_pairs = ""
    config.data.temperature = 1.0
    config.data.valid_split = "valid"
    config.data.vocab_size = 40_000
    set_depth(config, depth)
    return config

"""OPUS-100, English and 94 other languages: Table 3 of the BranchNorm paper.

    python main.py --config=configs/opus100.py:100L-100L --workdir=runs/opus100 --config.data.path=<folder>

The folder is the corpus of Zhang et al. (2020) as its authors distribute it, opus-100-corpus/v1.0:
supervised/de-en/opus.de-en-train.de and so on, up to a million pairs each. Five of its languages (an, dz, hy, mn, yo)
have neither validation nor test text and are left out. To evaluate the directions that have only test text:
--config.evaluate.pairs=de-fr with --config.data.files="zero-shot/{pair}/opus.{pair}-{split}.{lang}".

Hardware, positions and epsilon are as in configs/wmt17_ende.py. This config has not been trained here. The paper's
average BLEU (sacreBLEU) is 31.4 at 100L-100L and 32.3 at 500L-500L. Validation covers four directions, and evaluation
all 188.

The vocabulary has 64,000 BPE pieces, as in Zhang et al. With it 100L-100L has 768 million parameters. The paper's
Table 3 says 863 million, and 3.8 billion at 500L-500L. A shared embedding table of 250,000 rows gives both numbers
(--config.data.vocab_size=250000), but the paper does not state the size of its vocabulary.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import wmt17_ende

LANGUAGES = (
    "af am ar as az be bg bn br bs ca cs cy da de el eo es et eu fa fi fr fy ga gd gl gu ha he hi hr hu id ig is it ja "
    "ka kk km kn ko ku ky li lt lv mg mk ml mr ms mt my nb ne nl nn no oc or pa pl ps pt ro ru rw se sh si sk sl sq sr "
    "sv ta te tg th tk tr tt ug uk ur uz vi wa xh yi zh zu"
)


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """To and from English, with the target language's tag before the source; temperature 5, vocabulary 64,000."""
    config = wmt17_ende.get_config()
    others = "+".join(LANGUAGES.split())
    config.model.dropout = 0.1
    config.data.source = "text"
    config.data.path = ""
    config.data.files = "supervised/{pair}/opus.{pair}-{split}.{lang}"
    config.data.pairs = f"en-{others},{others}-en"
    config.data.valid_pairs = "en-de+zh,de+zh-en"
    config.data.temperature = 5.0
    config.data.valid_split = "dev"
    config.data.test_split = "test"
    config.data.vocab_size = 64_000
    config.data.max_ratio = 0.0
    config.train.patience = 0
    set_depth(config, depth)
    return config

"""Your own parallel text, with the Transformer base of the papers.

    python main.py --config=configs/text.py:6L-6L --workdir=runs/mine --config.data.path=<folder> \
        --config.data.source_lang=en --config.data.target_lang=de

The folder contains {train,valid,test}.{en,de}, plain or compressed. The defaults (width 512, 100,000 updates of 4096
tokens on the longer side) suit a GPU and a corpus of a million pairs. For a small corpus use a smaller width, fewer
updates and more dropout, as in configs/multi30k_ende.py.
"""

import ml_collections

from branchnorm_jax.config import default_config, set_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The defaults of `branchnorm_jax/options.py`, with text files as the corpus."""
    config = default_config()
    config.data.source = "text"
    set_depth(config, depth)
    return config

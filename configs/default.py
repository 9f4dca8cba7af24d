"""Every option at its default: 6L-6L, width 512, the built-in corpus.

    python main.py --config=configs/default.py:12L-12L --config.data.source=text --config.data.path=my/text

This config is a starting point for your own text. For a first run use configs/numerals.py, which is small.
"""

import ml_collections

from branchnorm_jax.config import default_config, set_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The defaults."""
    config = default_config()
    set_depth(config, depth)
    return config

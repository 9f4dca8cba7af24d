"""enwik8: the first 10^8 bytes of English Wikipedia, as bytes. ReZero's paper trains 12L to 128L on it.

    curl -O http://mattmahoney.net/dc/enwik8.zip && unzip enwik8.zip -d data
    python main.py --config=configs/enwik8.py:12L --workdir=runs/enwik8 --config.data.path=data
    python main.py --mode=evaluate --workdir=runs/enwik8

The splits are the usual ones: 90, 5 and 5 million bytes. For text8 (http://mattmahoney.net/dc/text8.zip), add
--config.data.files=text8. The size of the model and of the batches (1080 sequences of 512 characters) are those of the
language models in ReZero's paper, appendix A; the paper's learning rate could not be read, so this one is our choice.
For a GPU or a TPU; not trained here.
"""

import ml_collections

from branchnorm_jax.config import set_depth
from configs import lm


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Width 512, rows of 512 bytes."""
    config = lm.get_config()
    config.model.width = 512
    config.model.ffn_width = 2048
    config.model.heads = 2
    config.model.activation = "gelu"
    config.model.dropout = 0.2
    config.data.files = "enwik8"
    config.data.context = 512
    config.train.steps = 100_000
    config.train.batch_tokens = 1080 * 512
    config.train.warmup_steps = 4000
    config.train.eval_every = 1000
    config.train.checkpoint_every = 1000
    set_depth(config, depth)
    return config

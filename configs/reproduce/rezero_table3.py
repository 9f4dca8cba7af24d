"""Table 3 and Figure 6 of ReZero's paper: language models of 12, 64 and 128 layers on enwik8.

    python main.py --mode=sweep --config=configs/reproduce/rezero_table3.py --workdir=runs/rezero_table3 \
        --config.data.path=<folder>

The options are those of rezero_table2.py. At 64 and 128 layers, as in the paper's appendix B, the width is 256, and a
batch has 304 and 144 sequences. The learning rate is 0.0005 times the square root of the sequences of a batch, which
agrees with the rate of rezero_table2.py; the text of the paper at hand lacks the rates. 100 epochs are 16,000 to
122,000 updates.
"""

import ml_collections

from configs.reproduce import rezero_table2

DEEP = "model.width=256 model.ffn_width=1024"
AT_64 = f"depth=64L {DEEP} train.batch_tokens=155648 train.learning_rate=8.7e-3 train.steps=57000"
AT_128 = f"depth=128L {DEEP} train.batch_tokens=73728 train.learning_rate=6e-3 train.steps=122000"


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The rows of the table that are not cited. The grid sets the depths."""
    config = rezero_table2.get_config(depth)
    config.train.steps = 16_000
    config.train.eval_every = 1000
    config.sweep.grid = (
        "method=post_ln depth=12L train.warmup_steps=100 | method=rezero_one,rezero depth=12L"
        f" | method=post_ln {AT_64} train.warmup_steps=0,100 | method=rezero_one,rezero {AT_64}"
        f" | method=rezero {AT_128}"
    )
    return config

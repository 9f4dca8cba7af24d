"""Table 2 of ReZero's paper: updates until a model of 12 layers reaches 1.2 bits per byte on enwik8.

    python main.py --mode=sweep --config=configs/reproduce/rezero_table2.py --workdir=runs/rezero_table2 \
        --config.data.path=<folder>

configs/enwik8.py says where to get the text. validation.jsonl of each run has the nll in nats per byte every 100
updates; 1.2 bits are 0.832 nats. The paper trains with LAMB at a constant learning rate and, with one exception,
without warm-up (its appendix A). The text of the paper at hand lacks the rate. A secondary source gives 0.016.
"""

import ml_collections

from configs import enwik8


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """The six rows of the table."""
    config = enwik8.get_config(depth or "12L")
    config.model.attention_dropout = 0.2
    config.train.optimizer = "lamb"
    config.train.schedule = "constant"
    config.train.learning_rate = 0.016
    config.train.warmup_steps = 0
    config.train.steps = 25_000
    config.train.eval_every = 100
    config.sweep.grid = "method=post_ln,pre_ln,gpt2norm,rezero_one,rezero | method=post_ln train.warmup_steps=100"
    config.sweep.columns = "depth"
    return config

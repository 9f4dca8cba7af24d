"""Decoder-only language models of any depth, on plain text.

    python main.py --config=configs/lm.py:12L --workdir=runs/lm --config.data.path=<folder>
    python main.py --mode=evaluate --workdir=runs/lm
    python main.py --mode=generate --workdir=runs/lm <<< "The "

The folder contains train.txt, valid.txt and test.txt, plain or compressed. A single text is divided 90:5:5 if its name
is given without {split}: --config.data.files=enwik8. The vocabulary is the 256 bytes; for word pieces use
--config.data.vocab_type=unigram --config.data.vocab_size=8000. The defaults have not been run to the end;
docs/results_lm.md has results of narrower models, see configs/sweep_lm.py.
"""

import ml_collections

from branchnorm_jax.config import default_config, set_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """A language model on bytes, of width 128."""
    config = default_config()
    config.model.family = "decoder"
    config.model.encoder_layers = 0
    config.model.decoder_layers = 12
    config.model.width = 128
    config.model.ffn_width = 512
    config.model.heads = 4
    config.model.dropout = 0.0
    config.data.source = "documents"
    config.data.files = "{split}.txt"
    config.data.vocab_type = "bytes"
    config.data.vocab_size = 259
    config.data.context = 256
    config.train.steps = 2000
    config.train.batch_tokens = 4096
    config.train.learning_rate = 1e-3
    config.train.warmup_steps = 200
    config.train.schedule = "polynomial"
    config.train.decay_steps = 0  # the length of the run
    config.train.label_smoothing = 0.0
    config.train.best_metric = "loss"
    config.train.eval_bleu_sentences = 0
    config.decode.beam_size = 1
    config.decode.temperature = 0.8
    config.export.format = "huggingface"
    config.train.eval_every = 500
    config.train.checkpoint_every = 500
    set_depth(config, depth)
    return config

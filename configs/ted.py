r"""TED talks, low-resource pairs, as in "Transformers without Tears".

    python main.py --config=configs/ted.py:6L-6L --workdir=runs/sk-en --config.data.tfds_dir=<folder>

The pairs are those of the paper's Tables 1 and 3: sk-en (the default), ar-en, en-he and gl-en. Another pair:
--config.data.source_lang=ar --config.data.target_lang=en --config.train.eval_every=2000
--config.train.checkpoint_every=2000 --config.train.steps=400000. Galician (10,000 pairs), as in the paper:
configs/ted.py:4L-4L --config.data.source_lang=gl --config.model.heads=4 --config.model.dropout=0.4
--config.model.attention_dropout=0.4 --config.model.activation_dropout=0.4 --config.data.vocab_size=3000
--config.train.eval_every=100 --config.train.checkpoint_every=100 --config.train.steps=100000 --config.train.patience=50

Prepare the text once, with the same <folder>:

    python -c "import tensorflow_datasets as tfds; \
        tfds.builder('ted_multi_translate', data_dir='<folder>', file_format='array_record').download_and_prepare()"

This config has not been trained here. The paper's test BLEU (multi-bleu):

    Pre-LN with ScaleNorm and FixNorm: gl-en 20.91, sk-en 30.25, en-he 28.44, ar-en 34.15
    Post-LN (--config.model.method=post_ln): 18.47, 29.37, 27.85, 33.39

The paper used the schedule InvSqrtDecay for these scores (equation 7, lambda = 1, 8,000 updates of warm-up). Table 4
compares it with two other schedules by the validation BLEU of sk-en; InvSqrtDecay has 29.08:

    ValDecay, 29.46: --config.train.schedule=val_decay
    NoWarmup, 28.92: --config.train.schedule=val_decay --config.train.warmup_steps=0 --config.train.learning_rate=3e-4

Differences from the paper: SentencePiece learns 8,000 BPE pieces, whereas the paper counts merges of fastBPE. The
authors' public code, a reimplementation, also has a bias of the logits (--config.model.output_bias=True) and language
embeddings, which the paper does not mention.
"""

import ml_collections

from branchnorm_jax.config import default_config, set_depth


def get_config(depth: str = "") -> ml_collections.ConfigDict:
    """Slovak-English with the options of the paper's Appendix A."""
    config = default_config()
    config.model.method = "pre_scale_norm"
    config.model.dropout = 0.3
    config.model.attention_dropout = 0.3
    config.model.activation_dropout = 0.3
    config.model.word_dropout = 0.1
    config.model.mask_unused = True
    config.data.source = "tfds"
    config.data.path = "ted_multi_translate"
    config.data.source_lang = "sk"
    config.data.target_lang = "en"
    config.data.valid_split = "validation"
    config.data.vocab_size = 8000
    config.data.vocab_type = "bpe"
    config.data.max_length = 200
    config.train.steps = 120_000
    config.train.batch_tokens = 4096
    config.train.adam_b2 = 0.999
    config.train.weight_decay = 0.0
    config.train.clip_norm = 1.0
    # Equation 7 with lambda = 1: the peak is (512 x 8000)^-0.5, the first rate 512^-0.5 8000^-1.5.
    config.train.learning_rate = 4.94e-4
    config.train.schedule = "inverse_sqrt"
    config.train.warmup_steps = 8000
    config.train.warmup_init = 6.2e-8
    config.train.min_learning_rate = 1e-6
    config.train.decay_factor = 0.8
    config.train.decay_patience = 3
    config.train.eval_every = 600
    config.train.checkpoint_every = 600
    config.train.eval_bleu_sentences = 100_000  # All of them.
    config.train.patience = 20
    config.decode.beam_size = 4
    config.decode.length_penalty = 0.6
    config.decode.length_penalty_kind = "gnmt"
    config.decode.max_length_a = 1.0
    config.decode.max_length_b = 50
    set_depth(config, depth)
    return config

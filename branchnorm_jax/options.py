"""All options, as frozen dataclasses with defaults, units, ranges and help texts. `config.py` validates them."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    free: bool = False,
    common: bool = False,
) -> Any:
    """Returns a dataclass field with the metadata of an option.

    `free`: the option may change when a run is resumed, because it does not affect the trained parameters (reactions to
    trouble excepted). `common`: many users set the option, so `--mode=help` lists it first. Whole numbers are at most
    2^31 - 1 unless `maximum` says otherwise, because they become sizes and counts in int32.
    """
    if type(default) is int and maximum is None:
        maximum = 2**31 - 1
    metadata = dict(help=help, unit=unit, choices=choices, minimum=minimum, maximum=maximum, free=free, common=common)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Network."""

    family: str = option(
        "encoder_decoder",
        "encoder_decoder: translation; decoder: language models, which have no encoder and no cross-attention",
        choices=("encoder_decoder", "decoder"),
    )
    method: str = option(
        "branchnorm", "residual and normalisation method; --mode=methods lists all methods", common=True
    )
    encoder_layers: int = option(
        6, "depth of the encoder; 0 in the family decoder", unit="layers", minimum=0, maximum=1_000_000, common=True
    )
    decoder_layers: int = option(6, "depth of the decoder", unit="layers", minimum=1, maximum=1_000_000, common=True)
    width: int = option(512, "model dimension", unit="features", minimum=4, common=True)
    ffn_width: int = option(
        2048, "hidden dimension of the feed-forward sub-layers", unit="features", minimum=1, common=True
    )
    heads: int = option(8, "attention heads; must divide width unless head_width is set", minimum=1, common=True)
    head_width: int = option(0, "width of each attention head; 0: width / heads", unit="features", minimum=0)
    activation: str = option(
        "relu",
        "feed-forward activation; gated: swiglu, and geglu_tanh with GELU's tanh approximation (T5 v1.1)",
        choices=("relu", "gelu", "swish", "swiglu", "geglu_tanh"),
    )
    biases: bool = option(True, "the matrices have biases, unless the method has none; T5 has none")
    shared_embeddings: str = option(
        "all",
        "which embedding tables are shared: source, target and output (all), target and output (decoder), source and "
        "target (inputs), or none",
        choices=("all", "decoder", "inputs", "none"),
    )
    positions: str = option(
        "marian",
        "sinusoids: marian (10000^(-2j/d) from position 0, as in Hugging Face's Marian), tensor2tensor "
        "(10000^(-j/(d/2-1)) from position 0, as in Marian itself) or fairseq (the same from position 2); learned: a "
        "table for each stack, as in BART and mBART; relative: a learned bias of self-attention for each head and "
        "distance, as in T5; rotary: queries and keys are rotated, as in RoFormer",
        choices=("marian", "tensor2tensor", "fairseq", "learned", "relative", "rotary"),
    )
    max_positions: int = option(
        1024, "positions=learned: length of the longest sentence, language tag included", unit="tokens", minimum=4
    )
    relative_buckets: int = option(
        32, "relative: learned numbers per head; even, the encoder has half of them for each side", minimum=4
    )
    relative_distance: int = option(128, "relative: all larger distances share a number", unit="tokens", minimum=3)
    embedding_norm: bool = option(False, "a norm follows the embeddings of each stack, as in BART and mBART")
    dropout: float = option(
        0.1, "dropout of the embeddings and of every branch", unit="probability", minimum=0, maximum=0.99, common=True
    )
    attention_dropout: float = option(
        0.0, "dropout of the attention weights", unit="probability", minimum=0, maximum=0.99
    )
    activation_dropout: float = option(
        0.0, "dropout after the feed-forward activation", unit="probability", minimum=0, maximum=0.99
    )
    alpha_steps: int = option(
        4000,
        "T: the update at which alpha reaches its end in every layer; unless you set it, train.warmup_steps, or later "
        "in deep models of branchnorm",
        unit="updates",
        minimum=1,
        maximum=1e9,
        common=True,
    )
    alpha_schedule: str = option(
        "linear",
        "curve of alpha in methods with a growing branch (branchnorm, mixnorm, prores_*); adaptive: linear, but paused "
        "while a layer's gradient is below alpha_floor",
        choices=("linear", "exp", "sigmoid", "adaptive"),
    )
    alpha_order: str = option(
        "equal",
        "order in which the layers grow: all together (equal: BranchNorm), an order of ProRes, or one layer after "
        "another with alpha_stagger (bottom_up, top_down, progressive); branches with alpha = 0 are not computed",
        choices=(
            *("equal", "linear", "linear_sqrt", "linear_square", "reverse"),
            *("stagewise_0", "stagewise_L", "stagewise_sqrt_L", "stagewise_sqrt_l"),
            *("fix_L", "fix_sqrt_L", "fix_sqrt_l"),
            *("bottom_up", "top_down", "progressive"),
        ),
    )
    alpha_start: str = option(
        "",
        "alpha at update 0: a number, a rule of depth such as 1/sqrt(n) (n sub-layers, L layers, l the layer), or "
        "deepnorm (DeepNorm's ratio of branch to skip); empty: the default of the order, 0 for equal",
    )
    alpha_end: str = option(
        "",
        "alpha from update T on, see alpha_start; empty: the default of the order, 1 for equal; the constant orders "
        "fix_* ignore alpha_start and alpha_end",
    )
    alpha_stagger: float = option(
        0.5, "bottom_up, top_down, progressive: fraction of T when the last layer starts", minimum=0, maximum=0.99
    )
    grown_from: str = option(
        "",
        "depth of the shallower model that the run was made of, such as 6L-6L (train.deepen_from): its layers have "
        "alpha 1 from the start",
    )
    alpha_floor: float = option(
        1e-3,
        "adaptive: pause if a layer's gradient norm is below this fraction of the largest in its stack",
        minimum=0,
        maximum=1,
    )
    alpha_hold: int = option(20, "adaptive: length of a pause of alpha", unit="updates", minimum=1)
    base_layers: int = option(
        2,
        "completep, depth_mup: depth at which the options of training were tuned, the same for both stacks",
        unit="layers",
        minimum=1,
    )
    value_residual: bool = option(
        False,
        "self-attention mixes the values of a stack's first layer into its own, with two learned factors per layer",
    )
    norm: str = option(
        "layer_norm",
        "kind of all norms of the method; scale_norm_fixed learns a single g, in the norm after the decoder",
        choices=("layer_norm", "rms_norm", "scale_norm", "scale_norm_fixed", "dyt", "derf", "none"),
    )
    embedding: str = option(
        "standard", "embedding tables: unchanged, or with rows of norm 1 (fixnorm)", choices=("standard", "fixnorm")
    )
    decoder_start: str = option(
        "eos",
        "the embedding of the decoder's first input: that of EOS (eos), of padding (pad: T5) or of the unknown piece "
        "(unk: MADLAD-400), or zeros (zero: Marian)",
        choices=("eos", "pad", "unk", "zero"),
    )
    output_bias: bool = option(False, "learn a bias of the output logits")
    mask_unused: bool = option(
        False, "give probability 0 to pieces that never occur on the target side of the training text"
    )
    word_dropout: float = option(
        0.0, "word dropout: replaces input tokens of both sides by <unk>", unit="probability", minimum=0, maximum=0.99
    )
    init: str = option("", "base initialisation, see branchnorm_jax/model/initializers.py; empty: the method's own")
    dtype: str = option("float32", "data type of the matrix products", choices=("float32", "bfloat16"), common=True)
    carry_dtype: str = option(
        "float32", "data type of the residual stream between sub-layers", choices=("float32", "float16", "bfloat16")
    )
    remat: str = option(
        "auto",
        "what the backward pass recomputes to save memory: nothing (none); scores and hidden feed-forward layers "
        "(save_branches: 1/2 of the memory, 1/10 more time); all but the stream between groups of layers, once (full: "
        "1/3 more time) or twice (nested: 2/3 more time; dlcl: as full); auto: the fastest that fits into memory",
        choices=("none", "save_branches", "full", "nested", "auto"),
        free=True,
        common=True,
    )
    group: int = option(
        0,
        "layers per group of remat=full and nested; 0: for full about 5 on GPUs and TPUs and 1 on CPUs, for nested the "
        "size that needs the least memory",
        minimum=0,
        free=True,
    )
    kernels: str = option(
        "auto",
        "fused kernels written in Pallas: on a single TPU or large GPU (auto); never (plain); interpreted, for tests "
        "(interpret)",
        choices=("auto", "plain", "interpret"),
        free=True,
    )
    logits_mb: int = option(512, "largest block of logits in the loss, per device", unit="MB", minimum=1, free=True)
    unroll: int = option(
        0,
        "layers per iteration of lax.scan; with the full depth there is no loop: faster, but slower to compile; 0: the "
        "full depth on GPUs and TPUs if remat is none or save_branches and no stack has more than 24 layers, else 1",
        unit="layers",
        minimum=0,
        free=True,
    )

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the model's stacks of layers."""
        return ("decoder",) if self.family == "decoder" else ("encoder", "decoder")

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stack."""
        return (self.decoder_layers,) if self.family == "decoder" else (self.encoder_layers, self.decoder_layers)

    @property
    def sequence(self) -> str:
        """What messages call tokens that attend to each other."""
        return "row" if self.family == "decoder" else "sentence"

    @property
    def depth(self) -> str:
        """The depth in the papers' notation, such as 6L-6L, or 12L for a decoder-only model."""
        return "-".join(f"{layers}L" for layers in self.layers)

    @property
    def longest(self) -> int | None:
        """Length of the longest sentence in tokens, with EOS and language tag; None if there is no limit."""
        return self.max_positions if self.positions == "learned" else None

    @property
    def key_width(self) -> int:
        """K: the width of each attention head."""
        return self.head_width or self.width // self.heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward sub-layers have a gate, a third matrix."""
        return self.activation in ("swiglu", "geglu_tanh")


def parse_depth(text: str) -> tuple[int, int] | None:
    """Returns the depths of encoder and decoder from text such as "18L-18L"; None if it is something else.

    A single number, such as "18L", is the depth of a decoder-only model, with an encoder of 0 layers.
    """
    match = re.fullmatch(r"(?:(\d+)L?-)?(\d+)L?", text)
    return (int(match[1] or 0), int(match[2])) if match else None


NORMALIZATIONS = ("nmt_nfkc", "nfkc", "nfc", "identity")
"""Rules of `data/normalization.py`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text, vocabulary and batches."""

    source: str = option(
        "numerals",
        "corpus: built in, text files, or a TFDS builder; documents: plain text for model.family=decoder",
        choices=("numerals", "text", "tfds", "documents"),
        common=True,
    )
    path: str = option(
        "",
        "text: the folder of the files, or its URL; tfds: builder name such as wmt17_translate/de-en or .../{pair}",
        free=True,
        common=True,
    )
    files: str = option(
        "{split}.{lang}",
        "text: file name or glob under path; {pair} is en-de or de-en; without {lang}: files of both sides, .tsv, "
        ".jsonl or .tmx; also with .gz, .zst, .xz or .bz2; documents: without {split}, the text is divided 90:5:5",
        free=True,
    )
    tfds_dir: str = option("", "tfds: folder of the prepared data sets; empty: the default of TFDS", free=True)
    source_lang: str = option("en", "source language", common=True)
    target_lang: str = option("de", "target language", common=True)
    pairs: str = option(
        "",
        "several pairs instead of one: en-de,fr-de,...; en-de+fr means en-de,en-fr; en+de+fr means all six directions",
    )
    valid_pairs: str = option("", "pairs: the pairs to validate; empty: all")
    tags: str = option(
        "source",
        "pairs: sides to which the tag of the target language, such as >>de<<, is prepended; each: the tag of the "
        "source language to the source, and of the target language to the target (M2M-100, NLLB, mBART-50)",
        choices=("none", "source", "target", "both", "each"),
    )
    temperature: float = option(
        1.0,
        "pairs: each pair's share of an epoch is proportional to size^(1/temperature); 1: every sentence once",
        minimum=1,
        maximum=1000,
    )
    train_split: str = option(
        "train",
        "name of the training split; tfds: or another builder's, as name/de-en:test; several corpora with weights: "
        "news:2,web:1",
    )
    valid_split: str = option("valid", "name of the validation split")
    test_split: str = option("test", "name of the test split", free=True)
    numerals_pairs: int = option(40_000, "numerals: training pairs to generate", unit="pairs", minimum=100)
    vocab_size: int = option(
        8000, "SentencePiece vocabulary, special symbols included", unit="pieces", minimum=16, common=True
    )
    vocab_type: str = option(
        "unigram",
        "type of the SentencePiece model; bytes: the 256 bytes, for documents (data.vocab_size=259)",
        choices=("unigram", "bpe", "bytes"),
    )
    shared_vocab: bool = option(True, "one vocabulary for both languages; needed for shared_embeddings=all and inputs")
    byte_fallback: bool = option(False, "spell unknown characters as bytes instead of <unk>")
    source_normalization: str = option(
        "nmt_nfkc",
        "what changes in source text before it is split into pieces, see branchnorm_jax/data/normalization.py",
        choices=NORMALIZATIONS,
    )
    target_normalization: str = option(
        "nfc",
        "the same for target text, and so for translations",
        choices=NORMALIZATIONS,
    )
    vocab_sentences: int = option(
        2_000_000, "maximum number of sentences to train the vocabulary on", unit="sentences", minimum=100
    )
    subword_samples: int = option(
        0,
        "subword regularisation: number of sampled tokenisations of the training text; 0: the most probable one",
        unit="times",
        minimum=0,
        maximum=1000,
    )
    subword_alpha: float = option(
        0.2, "sample segmentations of a word by P(segmentation)^alpha (Marian: sentencepiece-alphas)", minimum=0
    )
    max_length: int = option(
        256, "leave out training and validation pairs with a longer side; EOS included", unit="tokens", minimum=4
    )
    max_ratio: float = option(0.0, "leave out training pairs with a larger length ratio; 0: keep all", minimum=0)
    document: str = option(
        "file",
        "documents: what a document is: a file, or a line (in a .jsonl file, the field text of a line)",
        choices=("file", "line"),
    )
    context: int = option(256, "documents: length of a row of a batch", unit="tokens", minimum=2, common=True)
    rows: str = option(
        "stream",
        "documents: cut all text into rows of data.context tokens (stream), or pack whole documents into rows, and "
        "divide only longer ones (packed); attention never crosses the border of a document",
        choices=("stream", "packed"),
    )
    batch_shapes: int = option(
        4,
        "maximum number of static batch shapes, each compiled once; each has half as many rows as the one before",
        unit="shapes",
        minimum=1,
        maximum=64,
    )
    row_multiple: int = option(
        8,
        "the number of rows of a batch is a multiple of this; use a multiple of data-parallel devices x accumulation",
        unit="rows",
        minimum=1,
    )

    power_of_two_rows: bool = option(
        False,
        "row lengths are powers of two, the same on both sides, as the fused kernels of GPUs and TPUs need; the rows "
        "are a few percent emptier",
    )

    def language_pairs(self, pairs: str = "") -> list[tuple[str, str]]:
        """Returns source and target language of each direction of `pairs` (default: the run's)."""
        if not (pairs := pairs or self.pairs):
            return [(self.source_lang, self.target_lang)]
        # A dictionary, because a model of 200 languages has 40,000 directions.
        found: dict[tuple[str, str], None] = {}
        for item in filter(None, map(str.strip, pairs.split(","))):
            sources, _, targets = item.partition("-")
            named = itertools.product(sources.split("+"), (targets or sources).split("+"))
            found |= dict.fromkeys(pair for pair in named if pair[0] != pair[1] or "+" not in item)
        return list(found)

    def directions(self, pairs: str = "") -> "list[DataConfig]":
        """Returns one config per language pair of `pairs` (default: the run's), or [self] without pairs."""
        if not (pairs or self.pairs):
            return [self]
        return [
            dataclasses.replace(self, source_lang=source, target_lang=target, pairs="")
            for source, target in self.language_pairs(pairs)
        ]

    def corpora(self) -> "list[tuple[DataConfig, float]]":
        """Returns one config per corpus of `train_split`, and its weight, 1 unless given."""
        found = []
        for item in map(str.strip, self.train_split.split(",")):
            name, colon, weight = item.rpartition(":")
            try:
                found.append((name, float(weight)) if colon else (item, 1.0))
            except ValueError:  # no weight; TFDS has names such as wmt14_translate/de-en:test and train[:50%]
                found.append((item, 1.0))
        return [(dataclasses.replace(self, train_split=name), weight) for name, weight in found]

    @property
    def tokenisations(self) -> int:
        """Number of tokenisations of the training text; a pass of the batch plan reads all of them."""
        return max(1, self.subword_samples)

    def validated(self) -> "list[DataConfig]":
        """Returns the directions to validate."""
        return self.directions(self.valid_pairs)

    @property
    def languages(self) -> list[str]:
        """All languages of the run, sources and targets."""
        return sorted({*self.sources, *self.targets})

    @property
    def sources(self) -> list[str]:
        """Source languages of the run."""
        return sorted({source for source, _ in self.language_pairs()})

    @property
    def targets(self) -> list[str]:
        """Target languages of the run."""
        return sorted({target for _, target in self.language_pairs()})

    @property
    def tagged(self) -> list[str]:
        """Languages that have a tag."""
        if not self.pairs or self.tags == "none":
            return []
        return self.languages if self.tags == "each" else self.targets

    @property
    def pair(self) -> str:
        """A single direction, such as en-de."""
        return f"{self.source_lang}-{self.target_lang}"

    @property
    def either_pair(self) -> tuple[str, str]:
        """A single direction in both orders, such as en-de and de-en; a data set may be named either way."""
        return self.pair, f"{self.target_lang}-{self.source_lang}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training."""

    steps: int = option(
        100_000, "length of the run; 0: see epochs", unit="updates", minimum=0, maximum=1e9, free=True, common=True
    )
    epochs: float = option(0.0, "length of the run instead of steps", unit="epochs", minimum=0, maximum=1e6, free=True)
    seed: int = option(0, "seed of initialisation, batches and dropout", minimum=0, maximum=2**32 - 1, common=True)
    finetune_from: str = option(
        "",
        "fine-tuning: workdir or workdir:checkpoint of the parent run, which gives vocabulary, parameters and alpha; "
        "needs the same model",
    )
    deepen_from: str = option(
        "",
        "deepening: as finetune_from, but this model is deeper; needs model.grown_from, and method branchnorm "
        "(Post-LN) or prores_pre_ln (Pre-LN)",
    )
    parent_rate: float = option(
        1.0, "factor on the learning rate of old layers and embeddings; 0 freezes them", minimum=0
    )
    freeze: str = option(
        "", "comma-separated parts that training does not change: encoder, decoder, embedding (all tables)"
    )
    batch_tokens: int = option(
        4096,
        "positions per update on the larger of the two sides (fairseq's max-tokens x workers x accumulation)",
        unit="tokens",
        minimum=8,
        common=True,
    )
    accumulation: int = option(1, "number of parts that the batch of an update is split into", unit="parts", minimum=1)
    optimizer: str = option("adamw", "optimiser: adamw, adam, radam, lamb, muon, sgd or adagrad")
    adam_b1: float = option(0.9, "decay of the first moment", minimum=0, maximum=0.99999)
    adam_b2: float = option(0.98, "decay of the second moment", minimum=0, maximum=0.99999)
    adam_eps: float = option(1e-8, "epsilon of Adam", minimum=0)
    adam_eps_mode: str = option(
        "optax",
        "Adam, also that of lamb and muon, adds epsilon after (optax) or before (fairseq) the bias correction",
        choices=("optax", "fairseq"),
    )
    weight_decay: float = option(
        1e-4,
        "weight decay of all parameters; decoupled in adamw, radam, lamb and muon, else part of the gradient",
        minimum=0,
    )
    branch_update_power: float = option(
        0.0,
        "p: the update of each layer is multiplied by alpha^p, in methods with a growing branch; 0: plain updates",
        minimum=0,
    )
    encoder_rate: float = option(1.0, "factor on the updates of the encoder's layers; 0 freezes them", minimum=0)
    encoder_rate_steps: int = option(
        0, "number of updates that encoder_rate applies to; 0: all", unit="updates", minimum=0, maximum=1e9
    )
    clip_norm: float = option(
        0.0, "maximum gradient norm of what train.freeze does not name; 0: no clipping", minimum=0
    )
    learning_rate: float = option(5e-4, "peak learning rate (noam: the factor)", minimum=0, common=True)
    schedule: str = option("inverse_sqrt", "learning-rate schedule, see branchnorm_jax/training/schedules.py")
    warmup_steps: int = option(
        4000, "updates until the peak learning rate", unit="updates", minimum=0, maximum=1e9, common=True
    )
    warmup_init: float = option(1e-7, "learning rate of the first update", minimum=0)
    decay_steps: int = option(
        4000,
        "inverse_sqrt_nowarmup: P in sqrt(P / (P + step)); polynomial: update at which the decay ends; "
        "0: the length of the run",
        unit="updates",
        minimum=0,
        maximum=1e9,
    )
    decay_power: float = option(1.0, "polynomial: exponent of the decay", minimum=0)
    end_learning_rate: float = option(0.0, "polynomial: learning rate after the decay", minimum=0)
    decay_factor: float = option(
        0.8, "val_decay: factor of each decay of the learning rate, after the warm-up", minimum=0, maximum=1
    )
    decay_patience: int = option(3, "val_decay: decay if a score is below each of this many previous scores", minimum=1)
    min_learning_rate: float = option(
        0.0,
        "stop at a validation after the warm-up if the learning rate is below this; 0: never",
        minimum=0,
        free=True,
    )
    update_in_backward: bool = option(
        False,
        "update each layer during the backward pass and drop its gradient: a quarter less memory for parameters, "
        "moments and gradients; needs model.remat=full, nested or auto, and no clipping, accumulation or skipping",
        free=True,
    )
    nonfinite: str = option(
        "stop",
        "if the loss, a gradient or an update is not finite: end the run, skip the update, or return to a checkpoint",
        choices=("stop", "skip", "rollback"),
        free=True,
    )
    spike: str = option(
        "log",
        "if the loss or the update is far above the recent ones: report it, end the run, skip the update, or return to "
        "a checkpoint",
        choices=("log", "stop", "skip", "rollback"),
        free=True,
    )
    spike_deviations: float = option(
        8.0,
        "spike: an update or loss further above the recent mean counts as a spike",
        unit="standard deviations",
        minimum=1,
        maximum=1e6,
        free=True,
    )
    rollback: str = option(
        "batches",
        "change after a rollback: leave out the batches up to the trouble (batches), or pause alpha (alpha)",
        choices=("batches", "alpha"),
        free=True,
    )
    rollback_updates: int = option(
        20,
        "batches: number of batches to leave out, up to the trouble; alpha: length of the pause after the trouble",
        unit="updates",
        minimum=1,
        free=True,
    )
    label_smoothing: float = option(0.1, "probability mass for all tokens except the target", minimum=0, maximum=0.99)
    ema_decay: float = option(
        0.0,
        "decay of an exponential moving average of the parameters, for example 0.9999; validation, translation and "
        "export use the average; 0: no average",
        minimum=0,
        maximum=0.99999,
    )
    log_every: int = option(10, "interval of metrics.jsonl lines; 0: never", unit="updates", minimum=0, free=True)
    watch_every: int = option(
        100,
        "interval of layers.jsonl lines, the statistics of every layer; 0: never",
        unit="updates",
        minimum=0,
        free=True,
    )
    eval_every: int = option(
        1000, "interval of validations; 0: only at the end", unit="updates", minimum=0, free=True, common=True
    )
    eval_bleu_sentences: int = option(
        200, "validation sentences translated for BLEU; 0: no BLEU", unit="sentences", minimum=0, free=True
    )
    checkpoint_every: int = option(
        1000, "interval of checkpoints; 0: only at the end", unit="updates", minimum=0, free=True
    )
    on_save_failure: str = option(
        "stop",
        "if a checkpoint cannot be written: end the run (stop) or train on until the next one (warn); the last one, or "
        "any in a run of several processes, always ends it",
        choices=("stop", "warn"),
        free=True,
    )
    step_timeout: float = option(
        20.0,
        "end the run if an update takes this many times the usual (median) time, and at least 5 minutes; the same for "
        "the first updates and, from the second one on, validations and saves, but at least an hour; 0: never",
        unit="usual durations",
        minimum=0,
        maximum=1e6,
        free=True,
    )
    keep_last: int = option(2, "number of newest checkpoints to keep", minimum=1, free=True)
    keep_best: int = option(1, "number of best checkpoints to keep", minimum=0, free=True)
    best_metric: str = option(
        "bleu",
        "validation metric of the best checkpoint; comet uses the model evaluate.comet",
        choices=("bleu", "chrf", "comet", "loss"),
    )
    patience: int = option(
        0, "stop after this many validations without a better one; 0: never", unit="validations", minimum=0, free=True
    )

    @property
    def may_roll_back(self) -> bool:
        """Whether trouble may take the run back to a checkpoint."""
        return "rollback" in (self.nonfinite, self.spike)

    @property
    def parent(self) -> str:
        """The parent run, "workdir" or "workdir:checkpoint"; empty without one."""
        return self.finetune_from or self.deepen_from

    @property
    def frozen(self) -> list[str]:
        """`freeze` as a list."""
        return [name.strip() for name in self.freeze.split(",") if name.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices."""

    data: int = option(0, "size of the mesh axis that splits batches; 0: the rest of the devices", minimum=0, free=True)
    fsdp: int = option(
        1, "size of the mesh axis that splits batches, and also parameters and optimiser state", minimum=1, free=True
    )
    model: int = option(1, "size of the mesh axis that splits matrices", minimum=1, free=True)
    distributed: bool = option(False, "start jax.distributed even if no launcher is detected", free=True)
    start_timeout: int = option(
        300,
        "how long process 0 waits for the others at the start, and each of them for process 0",
        unit="s",
        minimum=1,
        free=True,
    )
    heartbeat_timeout: int = option(
        60, "a process that has been silent for this long counts as lost", unit="s", minimum=5, free=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Translation."""

    checkpoint: str = option("best", "which checkpoint: best, last, a step, or average (see --mode=average)", free=True)
    ensemble: str = option(
        "",
        "further models, comma-separated as workdir or workdir:checkpoint, to average probabilities with; they need "
        "the same vocabulary",
        free=True,
    )
    source_lang: str = option(
        "", "pairs: source language, for a model with several that needs to know it (data.tags=each)", free=True
    )
    target_lang: str = option(
        "", "pairs: target language of lines that do not begin with a tag such as >>de<<", free=True
    )
    input: str = option("", "translate, score, generate: file to read, plain or compressed; empty: stdin", free=True)
    output: str = option("", "translate: file to write; a restart continues it; empty: stdout", free=True)
    format: str = option(
        "text",
        "translate, score, generate: print lines of text or of JSON objects",
        choices=("text", "jsonl"),
        free=True,
    )
    beam_size: int = option(
        4, "hypotheses per sentence; 1: greedy search", minimum=1, maximum=1000, free=True, common=True
    )
    length_penalty: float = option(0.6, "strength of the length penalty", minimum=-5, maximum=5, free=True, common=True)
    length_penalty_kind: str = option(
        "fairseq",
        "score / L^p (fairseq, used by the papers) or score / ((5+L)/6)^p (gnmt); L counts EOS, but no prompt",
        choices=("fairseq", "gnmt"),
        free=True,
    )
    max_new_tokens: int = option(
        200,
        "generate: maximum length of a continuation; it fits into data.context with the prompt",
        unit="tokens",
        minimum=1,
        free=True,
    )
    max_length_a: float = option(
        2.0, "a in the maximum translation length a*x+b, x source tokens with EOS", minimum=0, maximum=100, free=True
    )
    max_length_b: int = option(
        20, "b in the maximum translation length a*x+b", unit="tokens", minimum=1, maximum=100_000, free=True
    )
    min_length: int = option(
        1, "minimum translation length, without language tags", unit="tokens", minimum=0, maximum=1e6, free=True
    )
    max_input_length: int = option(
        1024,
        "limit of an input line, see split; score has no limit",
        unit="tokens",
        minimum=4,
        maximum=100_000,
        free=True,
    )
    split: str = option(
        "auto",
        "auto: translate a line of more than max_input_length or data.max_length tokens sentence by sentence, and join "
        "the translations; sentences: every line; none: no line, and cut it off at max_input_length, with a warning",
        choices=("auto", "sentences", "none"),
        free=True,
    )
    no_repeat_ngram: int = option(
        0, "no sequence of this many tokens occurs twice; 0: no limit", unit="tokens", minimum=0, maximum=100, free=True
    )
    target_prefix: bool = option(False, "translate: lines are source<TAB>beginning of the translation", free=True)
    glossary: str = option(
        "",
        "file of lines term<TAB>translation; a translation contains the translations of all terms in its source",
        free=True,
    )
    constraints: bool = option(
        False, "translate: lines are source<TAB>phrase<TAB>phrase ...; the translation contains all phrases", free=True
    )
    temperature: float = option(
        0.0,
        "0: beam search; above 0: sample beam_size translations from softmax(logits / temperature) and print the nbest "
        "with the highest scores; beam_size=1: plain sampling",
        minimum=0,
        maximum=100,
        free=True,
    )
    top_k: int = option(0, "sample from this many most probable tokens; 0: all", unit="tokens", minimum=0, free=True)
    top_p: float = option(
        1.0, "sample from the most probable tokens with this total probability", minimum=1e-6, maximum=1, free=True
    )
    seed: int = option(
        0,
        "seed of sampling; a translation depends on it and on the number of its line",
        minimum=0,
        maximum=2**31 - 1,
        free=True,
    )
    nbest: int = option(
        1, "hypotheses printed per line; more than 1 prints `line ||| text ||| score`", minimum=1, free=True
    )
    token_scores: bool = option(
        False, "translate: print the pieces of each translation with their log-probabilities", free=True
    )
    alignments: bool = option(
        False, "translate: print the source piece with the largest attention weight per piece: 0-0 2-1 ...", free=True
    )
    alignment_layer: int = option(
        0,
        "alignments: decoder layer, from 1, whose cross-attention is used, averaged over heads; 0: all layers",
        minimum=0,
        free=True,
    )
    batch_tokens: int = option(
        4096,
        "size of a batch: source positions x beam; of generate: positions x beam",
        unit="tokens",
        minimum=1,
        free=True,
    )
    dtype: str = option(
        "auto",
        "type of the matrices while translating or generating: model (as model.dtype), bfloat16 (half the bytes, twice "
        "the speed of products on CPUs with AVX512-BF16 or AMX; results stay float32), or auto: bfloat16 on such CPUs "
        "for models of width 128 and above, if a beam search computes at least 64 hypotheses at once",
        choices=("auto", "model", "bfloat16"),
        free=True,
    )
    streams: int = option(
        0,
        "batches decoded concurrently; 0: two on a single CPU device, one elsewhere",
        unit="batches",
        minimum=0,
        free=True,
    )
    unroll: int = option(
        0,
        "decoders of up to this many layers run without a loop: faster, but slower to compile; 0: up to 12 layers, and "
        "on CPUs any number if the input is long enough",
        unit="layers",
        minimum=0,
        free=True,
    )

    @property
    def search(self) -> dict[str, Any]:
        """Options that a translation depends on, by name: all except paths and options that only affect speed."""
        excluded = "checkpoint", "ensemble", "input", "output", "batch_tokens", "streams", "unroll", "max_new_tokens"
        return {name: value for name, value in vars(self).items() if name not in excluded}


TERM_CHARACTERS = 200
"""Maximum number of characters of a term, or of its translation, in a request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Translation over HTTP."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of this machine", free=True)
    port: int = option(8000, "port to listen on; 0: any free port", minimum=0, maximum=65535, free=True)
    token_file: str = option(
        "", "file with one token per line; requests need `Authorization: Bearer <token>`; empty: no token", free=True
    )
    names: str = option(
        "",
        "comma-separated names by which browsers call the server, in addition to localhost, IP addresses and the name "
        "of this machine; *: any",
        free=True,
    )
    drain_seconds: int = option(
        60, "after a signal, wait at most this long for answers in progress", unit="s", minimum=1, free=True
    )
    max_lines: int = option(100, "maximum number of lines of a request", unit="lines", minimum=1, free=True)
    max_characters: int = option(
        5000, "maximum number of characters of a line", unit="characters", minimum=1, free=True
    )
    max_terms: int = option(100, "maximum number of terms of a request's glossary", unit="terms", minimum=0, free=True)
    max_term_tokens: int = option(
        32,
        "maximum number of tokens of all terms of a request's glossary that occur in one line; each is one more "
        "hypothesis of the beam",
        unit="tokens",
        minimum=1,
        maximum=1024,
        free=True,
    )
    max_waiting: int = option(
        256, "maximum number of waiting requests; further ones get status 503", unit="requests", minimum=1, free=True
    )
    batch_lines: int = option(64, "combine waiting requests up to this many lines", unit="lines", minimum=1, free=True)
    batch_wait_ms: float = option(
        5.0, "how long a request waits for others to join its batch", unit="ms", minimum=0, maximum=60_000, free=True
    )
    warm_up_length: int = option(
        32, "compile the programs for lines of up to this many tokens at the start", unit="tokens", minimum=0, free=True
    )

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a body within the limits, in bytes. JSON may escape a character as two 6-byte sequences."""
        terms = 2 * self.max_terms * (12 * TERM_CHARACTERS + 16)
        return self.max_lines * (12 * self.max_characters + 16) + terms + 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Evaluation."""

    splits: str = option("test", "comma-separated: valid, test", free=True)
    stride: int = option(
        0,
        "language models: number of tokens that each window of data.context tokens predicts; the others are context; "
        "0: half of the window",
        unit="tokens",
        minimum=0,
        free=True,
    )
    pairs: str = option("", "directions to translate, in the form of data.pairs; empty: those of the run", free=True)
    comet: str = option(
        "", "also score with this COMET model, a file or a name such as Unbabel/wmt22-comet-da", free=True
    )

    @property
    def split_names(self) -> list[str]:
        """`splits` as a list, without repetitions."""
        return [*dict.fromkeys(name.strip() for name in self.splits.split(","))]

    def stride_in(self, context: int) -> int:
        """Returns `stride`, or half of the context if it is 0."""
        return self.stride or max(1, context // 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """Averaging of checkpoints."""

    checkpoints: str = option(
        "last:2", "checkpoints to average: last:n, best:n, or steps such as 1000,2000,3000", free=True
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Comparison of systems."""

    systems: str = option(
        "",
        "comma-separated workdirs or files of translations, each as path or name=path; the first is the baseline",
        free=True,
    )
    reference: str = option("", "file of references; empty: the references in the first workdir", free=True)
    split: str = option("test", "split to compare, for systems that are workdirs", free=True)
    target_lang: str = option("", "language of the translations; needed if all systems are files", free=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Export to other engines."""

    format: str = option("ctranslate2", "format to write", choices=("ctranslate2", "huggingface"), free=True)
    quantization: str = option(
        "",
        "ctranslate2: data type of the stored matrices; empty: float32",
        choices=("", "int8", "int8_float16", "int16", "float16", "bfloat16"),
        free=True,
    )
    path: str = option(
        "",
        "folder to write, new or empty; default: <workdir>/export/<format>[-<quantization>], which is replaced",
        free=True,
    )
    check_lines: int = option(
        100,
        "number of validation pairs on which the exported model's log-probabilities are checked; 0: no check",
        unit="pairs",
        minimum=0,
        free=True,
    )

    @property
    def name(self) -> str:
        """Name of the folder if `path` is empty."""
        return "-".join(filter(None, (self.format, self.quantization)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Import of models that other toolkits trained."""

    path: str = option(
        "",
        "import: folder of a model of Marian or fairseq, or of Hugging Face (Marian, M2M-100, NLLB, mBART-50, T5)",
        free=True,
    )
    check_sentences: int = option(
        20,
        "number of random sentences on which the log-probabilities are compared with the other library, if it is "
        "installed; 0: no check",
        unit="sentences",
        minimum=0,
        free=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """Cleaning of a corpus."""

    path: str = option("", "folder to write, new or empty; default: <workdir>/clean, which is replaced", free=True)
    drop: str = option(
        "empty,copy,duplicate,length,long,letters,script,language,characters,held_out",
        "faults of the training pairs to remove, see branchnorm_jax/data/quality.py; held_out: also in another split",
        free=True,
    )
    unescape: bool = option(True, "replace entities such as &quot; by their characters", free=True)
    filters: str = option(
        "",
        "YAML file with a list of filters of OpusFilter, which remove more pairs; needs the extra [clean]",
        free=True,
    )
    score_with: str = option(
        "",
        "workdir or workdir:checkpoint of a model for these languages; removes pairs whose source does not help it to "
        "predict the target",
        free=True,
    )
    min_gain: float = option(
        0.1,
        "score_with: smallest log-probability of the target given its source, minus the mean given two other sources",
        unit="nats per token",
        free=True,
    )

    @property
    def dropped(self) -> list[str]:
        """`drop` as a list."""
        return [name.strip() for name in self.drop.split(",") if name.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalyzeConfig:
    """Analysis of a run, or of untrained models."""

    methods: str = option("", "comma-separated methods to compare untrained; empty: model.method", free=True)

    def names(self, method: str) -> list[str]:
        """Returns `methods` as a list, or [method] if `methods` is empty."""
        names = (name.strip() for name in self.methods.split(","))
        return list(dict.fromkeys(name for name in names if name)) or [method]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Predicted cost of a run."""

    device: str = option(
        "", "device to plan for, see branchnorm_jax/analysis/devices.py; empty: this machine's", free=True
    )
    devices: int = option(0, "number of devices; 0: all of this machine", minimum=0, free=True)
    sentence_length: int = option(
        32, "average length of a sentence, both sides", unit="tokens", minimum=2, maximum=100_000, free=True
    )
    compile: str = option(
        "here",
        "compile the update for this machine (here), not at all (none), or for absent devices: v5p:4x4x4 (TPU chips), "
        "v5e:4x4:x2 (two slices), h200:8 (GPUs), h100:2x8 (hosts x GPUs); reports the compiler's peak memory",
        free=True,
    )
    program: str = option("", "file for the program that is compiled for absent devices (HLO text)", free=True)
    calibrate: bool = option(False, "predict times by timing shallow models of the same width here", free=True)
    refuse: bool = option(
        True,
        "do not train if parameters, optimiser state and gradients alone exceed the device's memory",
        free=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Sweeps over a grid of runs."""

    grid: str = option(
        "",
        "runs, as axis=value,value axis=value | ...; axes: method, depth, any option of model, data, train, decode",
        free=True,
    )
    columns: str = option(
        "depth", "comma-separated axes of the table's columns; the other axes label its rows", free=True
    )
    baseline: str = option("", "method to test the other methods against; empty: no test", free=True)
    recommended: bool = option(
        False,
        "each run takes the options that its method recommends, unless config file, command line or grid set them; "
        "otherwise only the options of the grid differ",
        free=True,
    )
    chosen: str = option(
        "",
        "options that no recommended value and no usual T replaces; filled in automatically, for a resume",
        free=True,
    )

    @property
    def column_names(self) -> list[str]:
        """`columns` as a list."""
        return [name.strip() for name in self.columns.split(",") if name.strip()]


@dataclasses.dataclass(frozen=True)
class Config:
    """All options. Create it with `config.from_config_dict`, which validates them."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    serve: ServeConfig = dataclasses.field(default_factory=ServeConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    average: AverageConfig = dataclasses.field(default_factory=AverageConfig)
    compare: CompareConfig = dataclasses.field(default_factory=CompareConfig)
    export: ExportConfig = dataclasses.field(default_factory=ExportConfig)
    import_: ImportConfig = dataclasses.field(default_factory=ImportConfig)
    clean: CleanConfig = dataclasses.field(default_factory=CleanConfig)
    analyze: AnalyzeConfig = dataclasses.field(default_factory=AnalyzeConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    sweep: SweepConfig = dataclasses.field(default_factory=SweepConfig)


def sections(config: Config) -> dict[str, Any]:
    """Returns the sections of a config by the names of the command line.

    "import" is a keyword of Python, so in code the section is `import_`.
    """
    return {name.rstrip("_"): section for name, section in vars(config).items()}


def fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yields every option as ("section.name", dataclass field), in the order of this file."""
    for section, value in sections(Config()).items():
        for field in dataclasses.fields(value):
            yield f"{section}.{field.name}", field

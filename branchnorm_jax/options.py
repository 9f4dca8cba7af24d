"""The one list of options: frozen dataclasses with defaults, units, ranges and help. `config.py` checks them."""

import dataclasses
import itertools
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
    """A documented dataclass field.

    `free`: may change when a run is resumed: no trained number depends on it, until there is trouble to react to.
    `common`: many users set it; `--mode=help` lists it first.
    """
    metadata = dict(help=help, unit=unit, choices=choices, minimum=minimum, maximum=maximum, free=free, common=common)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The network."""

    method: str = option(
        "branchnorm", "residual and normalisation method, see branchnorm_jax/model/methods.py", common=True
    )
    encoder_layers: int = option(6, "depth of the encoder", unit="layers", minimum=1, common=True)
    decoder_layers: int = option(6, "depth of the decoder", unit="layers", minimum=1, common=True)
    width: int = option(512, "model dimension", unit="features", minimum=4, common=True)
    ffn_width: int = option(
        2048, "hidden dimension of the feed-forward sub-layers", unit="features", minimum=1, common=True
    )
    heads: int = option(8, "attention heads; must divide width", minimum=1, common=True)
    activation: str = option("relu", "feed-forward activation", choices=("relu", "gelu", "swiglu"))
    shared_embeddings: str = option(
        "all",
        "which embedding tables are one: source, target and output (all), target and output (decoder), or none",
        choices=("all", "decoder", "none"),
    )
    positions: str = option(
        "marian",
        "sinusoids: 10000^(-2j/d) from position 0 (marian: exports to Hugging Face), or fairseq's, from 2",
        choices=("marian", "fairseq"),
    )
    dropout: float = option(
        0.1, "dropout of the embeddings and of every branch", unit="probability", minimum=0, maximum=0.99, common=True
    )
    attention_dropout: float = option(
        0.0, "dropout of the attention probabilities", unit="probability", minimum=0, maximum=0.99
    )
    activation_dropout: float = option(
        0.0, "dropout after the feed-forward activation", unit="probability", minimum=0, maximum=0.99
    )
    alpha_steps: int = option(
        4000,
        "T: the update at which every alpha reaches its end; if it is not set, train.warmup_steps",
        unit="updates",
        minimum=1,
        common=True,
    )
    alpha_schedule: str = option(
        "linear",
        "how alpha rises in methods with a growing branch (branchnorm, mixnorm, prores_*); adaptive: linear, but it "
        "pauses while a layer's gradient is below alpha_floor",
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
        "alpha from update T on, see alpha_start; empty: the default of the order, 1 for equal; the orders fix_* are "
        "constant, and ignore both",
    )
    alpha_stagger: float = option(
        0.5, "bottom_up, top_down, progressive: share of T after which the last layer starts", minimum=0, maximum=0.99
    )
    alpha_floor: float = option(
        1e-3, "adaptive: share of the strongest layer's gradient that the weakest one needs", minimum=0, maximum=1
    )
    alpha_hold: int = option(20, "adaptive: length of a pause of alpha", unit="updates", minimum=1)
    norm: str = option(
        "layer_norm",
        "kind of all norms of the method; scale_norm_fixed learns a single g, in the norm after the decoder",
        choices=("layer_norm", "rms_norm", "scale_norm", "scale_norm_fixed", "dyt", "none"),
    )
    embedding: str = option(
        "standard", "embedding tables: as they are, or rows of length 1 (fixnorm)", choices=("standard", "fixnorm")
    )
    output_bias: bool = option(False, "learn a bias of the output logits")
    mask_unused: bool = option(
        False, "give probability 0 to pieces that never occur on the target side of the training text"
    )
    word_dropout: float = option(
        0.0, "input words replaced by <unk> in training, both sides", unit="probability", minimum=0, maximum=0.99
    )
    init: str = option("", "base initialisation, see branchnorm_jax/model/initializers.py; empty: that of the method")
    dtype: str = option("float32", "data type of the matrix products", choices=("float32", "bfloat16"), common=True)
    carry_dtype: str = option(
        "float32", "data type of the residual stream between sub-layers", choices=("float32", "float16", "bfloat16")
    )
    remat: str = option(
        "none",
        "what the backward pass recomputes to save memory: nothing (none); scores and hidden feed-forward layers "
        "(save_branches: 1/2 of the memory, 1/10 more time); all but the stream between layers (full: 1/3 more time) "
        "or between groups of layers (nested: 2/3 more time; dlcl: as full); auto: the first that fits",
        choices=("none", "save_branches", "full", "nested", "auto"),
        free=True,
        common=True,
    )
    group: int = option(
        0, "layers per group of remat=nested; 0: the size that needs the least memory", minimum=0, free=True
    )
    logits_mb: int = option(
        128, "largest block of float32 logits in the loss, per device", unit="MB", minimum=1, free=True
    )
    unroll: int = option(
        1,
        "layers per iteration of lax.scan; the depth: no loop, which is faster, but slower to compile",
        unit="layers",
        minimum=1,
        free=True,
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text."""

    source: str = option(
        "numerals",
        "corpus: built in, parallel text files, or a TFDS builder",
        choices=("numerals", "text", "tfds"),
        common=True,
    )
    path: str = option(
        "",
        "text: the folder of the files; tfds: builder name such as wmt17_translate/de-en or .../{pair}",
        free=True,
        common=True,
    )
    files: str = option(
        "{split}.{lang}",
        "text: file name or glob under path; {pair} is en-de or de-en; also with .gz, .zst or .xz",
        free=True,
    )
    tfds_dir: str = option("", "tfds: folder of the prepared data sets; empty: the default of TFDS", free=True)
    source_lang: str = option("en", "source language", common=True)
    target_lang: str = option("de", "target language", common=True)
    pairs: str = option(
        "",
        "several pairs in one run instead: en-de,fr-de,...; en-de+fr is en-de,en-fr; en+de+fr is all six directions",
    )
    valid_pairs: str = option("", "pairs: the pairs to validate; empty: all")
    tags: str = option(
        "source",
        "pairs: the tag of the target language, as >>de<<, comes before the source, the target, or both",
        choices=("none", "source", "target", "both"),
    )
    temperature: float = option(
        1.0,
        "pairs: the share of a pair in an epoch ~ size^(1/temperature); 1: every sentence once",
        minimum=1,
        maximum=1000,
    )
    train_split: str = option("train", "name of the training split; tfds: also of another builder, as name/de-en:test")
    valid_split: str = option("valid", "name of the validation split")
    test_split: str = option("test", "name of the test split", free=True)
    numerals_pairs: int = option(40_000, "numerals: training pairs to generate", unit="pairs", minimum=100)
    vocab_size: int = option(
        8000, "SentencePiece vocabulary, special symbols included", unit="pieces", minimum=16, common=True
    )
    vocab_type: str = option("unigram", "SentencePiece model", choices=("unigram", "bpe"))
    shared_vocab: bool = option(True, "one vocabulary for both languages; needed for shared_embeddings=all")
    byte_fallback: bool = option(False, "spell unknown characters as bytes instead of <unk>")
    vocab_sentences: int = option(
        2_000_000, "largest number of sentences to train the vocabulary on", unit="sentences", minimum=100
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
    max_length: int = option(256, "drop and count longer training pairs; EOS included", unit="tokens", minimum=4)
    max_ratio: float = option(0.0, "drop and count training pairs with a larger length ratio; 0: keep all", minimum=0)
    batch_shapes: int = option(
        4,
        "most static batch shapes, each compiled once; each has half the rows of the one before",
        unit="shapes",
        minimum=1,
        maximum=64,
    )
    row_multiple: int = option(
        8,
        "the number of rows of a batch is a multiple of this, and this is a multiple of the number of devices",
        unit="rows",
        minimum=1,
    )

    def directions(self, pairs: str = "") -> "list[DataConfig]":
        """One config for each of `pairs` (default: those of the run), or the one of source_lang and target_lang."""
        if not (pairs := pairs or self.pairs):
            return [self]
        found = {}
        for item in filter(None, map(str.strip, pairs.split(","))):
            sources, _, targets = item.partition("-")
            for source, target in itertools.product(sources.split("+"), (targets or sources).split("+")):
                if source != target or "+" not in item:
                    found[source, target] = dataclasses.replace(self, source_lang=source, target_lang=target, pairs="")
        return list(found.values())

    @property
    def tokenisations(self) -> int:
        """Number of tokenisations of the training text; a pass of the batch plan reads all of them."""
        return max(1, self.subword_samples)

    def validated(self) -> "list[DataConfig]":
        """The directions to validate."""
        return self.directions(self.valid_pairs)

    @property
    def languages(self) -> list[str]:
        """All languages of the run, sources and targets."""
        return sorted({lang for found in self.directions() for lang in (found.source_lang, found.target_lang)})

    @property
    def pair(self) -> str:
        """A single direction, such as en-de."""
        return f"{self.source_lang}-{self.target_lang}"


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One update, then many."""

    steps: int = option(
        100_000, "length of the run; 0: see epochs", unit="updates", minimum=0, maximum=1e9, free=True, common=True
    )
    epochs: float = option(0.0, "length of the run instead of steps", unit="epochs", minimum=0, maximum=1e6, free=True)
    seed: int = option(0, "seed of initialisation, batches and dropout", minimum=0, common=True)
    finetune_from: str = option(
        "",
        "workdir, or workdir:checkpoint, of the run to start from: takes its vocabulary, parameters and alpha, "
        "and needs the same model",
    )
    batch_tokens: int = option(
        4096,
        "positions per update on the larger of the two sides (fairseq's max-tokens x workers x accumulation)",
        unit="tokens",
        minimum=8,
        common=True,
    )
    accumulation: int = option(1, "number of parts that the batch of an update is split into", unit="parts", minimum=1)
    optimizer: str = option("adamw", "optimiser, see branchnorm_jax/training/optimizer.py")
    adam_b1: float = option(0.9, "decay of the first moment", minimum=0, maximum=0.99999)
    adam_b2: float = option(0.98, "decay of the second moment", minimum=0, maximum=0.99999)
    adam_eps: float = option(1e-8, "epsilon of Adam", minimum=0)
    adam_eps_mode: str = option(
        "optax", "where epsilon is added: bias-corrected (optax, torch) or raw (fairseq)", choices=("optax", "fairseq")
    )
    weight_decay: float = option(1e-4, "decoupled weight decay of all parameters", minimum=0)
    branch_update_power: float = option(
        0.0,
        "p: multiplies the update of each layer by its alpha^p, in methods with a growing branch; 0: plain updates",
        minimum=0,
    )
    encoder_rate: float = option(1.0, "factor on the updates of the encoder's layers; 0 freezes them", minimum=0)
    encoder_rate_steps: int = option(
        0, "number of updates that encoder_rate applies to; 0: all", unit="updates", minimum=0
    )
    clip_norm: float = option(0.0, "largest global gradient norm; 0: no clipping", minimum=0)
    learning_rate: float = option(5e-4, "peak learning rate (noam: the factor)", minimum=0, common=True)
    schedule: str = option("inverse_sqrt", "learning-rate schedule, see branchnorm_jax/training/schedules.py")
    warmup_steps: int = option(4000, "updates until the peak learning rate", unit="updates", minimum=0, common=True)
    warmup_init: float = option(1e-7, "learning rate of the first update", minimum=0)
    decay_steps: int = option(
        4000,
        "inverse_sqrt_nowarmup: P of sqrt(P / (P + step)); polynomial: update that it ends at",
        unit="updates",
        minimum=1,
    )
    decay_power: float = option(1.0, "polynomial: power", minimum=0)
    end_learning_rate: float = option(0.0, "polynomial: learning rate at its end", minimum=0)
    decay_factor: float = option(
        0.8, "val_decay: factor on the learning rate, once the warm-up has ended", minimum=0, maximum=1
    )
    decay_patience: int = option(3, "val_decay: decay when a score is below all of this many earlier ones", minimum=1)
    min_learning_rate: float = option(
        0.0,
        "stop at a validation after the warm-up if the learning rate is below this; 0: never",
        minimum=0,
        free=True,
    )
    update_in_backward: bool = option(
        False,
        "update each layer during the backward pass and drop its gradient: a quarter less memory for parameters, "
        "moments and gradients; needs model.remat=full or nested, and no clipping, accumulation or skipping",
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
        "spike: how far above the mean of the recent updates",
        unit="standard deviations",
        minimum=1,
        maximum=1e6,
        free=True,
    )
    rollback: str = option(
        "batches",
        "what changes after a rollback: the batches before the trouble are left out, or alpha pauses",
        choices=("batches", "alpha"),
        free=True,
    )
    rollback_updates: int = option(
        20,
        "batches: how many are left out, up to the last in trouble; alpha: length of the pause after the trouble",
        unit="updates",
        minimum=1,
        free=True,
    )
    label_smoothing: float = option(0.1, "probability mass of the other words", minimum=0, maximum=0.99)
    ema_decay: float = option(
        0.0,
        "decay of an exponential moving average of the parameters, for example 0.9999; validation, translation and "
        "export use the average; 0: no average",
        minimum=0,
        maximum=0.999999,
    )
    log_every: int = option(10, "interval of metrics.jsonl lines; 0: never", unit="updates", minimum=0, free=True)
    watch_every: int = option(
        100,
        "interval of layers.jsonl lines, the statistics of every layer; 0: none",
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
    keep_last: int = option(2, "newest checkpoints to keep", minimum=1, free=True)
    keep_best: int = option(1, "best checkpoints to keep", minimum=0, free=True)
    best_metric: str = option("bleu", "validation metric of the best checkpoint", choices=("bleu", "loss"))
    patience: int = option(
        0, "stop after this many validations without a better one; 0: never", unit="validations", minimum=0, free=True
    )


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The devices."""

    data: int = option(0, "size of the mesh axis that splits batches; 0: all other devices", minimum=0, free=True)
    model: int = option(1, "size of the mesh axis that splits matrices", minimum=1, free=True)
    distributed: bool = option(False, "start jax.distributed even if no launcher is detected", free=True)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Translation."""

    checkpoint: str = option("best", "which checkpoint: best, last, a step, or average (see --mode=average)", free=True)
    ensemble: str = option(
        "",
        "comma-separated workdirs, or workdir:checkpoint, of models to average with; the vocabulary must be the same",
        free=True,
    )
    target_lang: str = option(
        "", "pairs: target language of lines that do not begin with a tag such as >>de<<", free=True
    )
    input: str = option("", "translate, score: file to read; empty: stdin", free=True)
    output: str = option("", "translate: file to write; a restart continues it; empty: stdout", free=True)
    beam_size: int = option(
        4, "hypotheses per sentence; 1: greedy search", minimum=1, maximum=1000, free=True, common=True
    )
    length_penalty: float = option(0.6, "strength of the length penalty", free=True, common=True)
    length_penalty_kind: str = option(
        "fairseq",
        "score / L^p (fairseq, used by the papers) or score / ((5+L)/6)^p (gnmt); L counts EOS",
        choices=("fairseq", "gnmt"),
        free=True,
    )
    max_length_a: float = option(
        2.0, "a of the longest translation a*x+b, x source tokens with EOS", minimum=0, maximum=100, free=True
    )
    max_length_b: int = option(
        20, "b of the longest translation a*x+b", unit="tokens", minimum=1, maximum=100_000, free=True
    )
    min_length: int = option(1, "shortest translation, without language tags", unit="tokens", minimum=0, free=True)
    max_input_length: int = option(
        1024,
        "cut longer input lines, with a warning; score does not cut",
        unit="tokens",
        minimum=4,
        maximum=100_000,
        free=True,
    )
    no_repeat_ngram: int = option(
        0, "no sequence of this many tokens occurs twice; 0: no limit", unit="tokens", minimum=0, maximum=100, free=True
    )
    target_prefix: bool = option(False, "translate: lines are source<TAB>beginning of the translation", free=True)
    temperature: float = option(
        0.0,
        "0: beam search; above 0: sample beam_size translations from softmax(logits / temperature) and print the nbest "
        "with the highest scores; beam_size=1: plain sampling",
        minimum=0,
        maximum=100,
        free=True,
    )
    top_k: int = option(0, "sample from this many most probable words; 0: from all", unit="words", minimum=0, free=True)
    top_p: float = option(
        1.0, "sample from the most probable words with this total probability", minimum=1e-6, maximum=1, free=True
    )
    seed: int = option(
        0, "seed of sampling; a translation depends on it and on the number of its line", minimum=0, free=True
    )
    nbest: int = option(
        1, "hypotheses printed per line; more than 1 prints `line ||| text ||| score`", minimum=1, free=True
    )
    token_scores: bool = option(
        False, "translate: print the pieces of each translation with their log-probabilities", free=True
    )
    alignments: bool = option(
        False, "translate: print the most attended source piece of each piece of a translation: 0-0 2-1 ...", free=True
    )
    alignment_layer: int = option(
        0,
        "alignments: decoder layer, from 1, whose cross-attention is used, averaged over heads; 0: all layers",
        minimum=0,
        free=True,
    )
    batch_tokens: int = option(4096, "size of a batch: source positions x beam", unit="tokens", minimum=1, free=True)
    streams: int = option(
        0,
        "batches decoded at the same time; 0: two on a single CPU device, one elsewhere",
        unit="batches",
        minimum=0,
        free=True,
    )
    unroll: int = option(
        12,
        "decoders of up to this many layers run without a loop: a quarter faster, but slower to compile",
        unit="layers",
        minimum=0,
        free=True,
    )

    @property
    def search(self) -> dict[str, Any]:
        """The options that a translation depends on, by name: all but paths and those that only affect speed."""
        others = "checkpoint", "ensemble", "input", "output", "batch_tokens", "streams", "unroll"
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Translation over HTTP."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0: all addresses of this machine", free=True)
    port: int = option(8000, "port to listen on; 0: any free port", minimum=0, maximum=65535, free=True)
    max_lines: int = option(100, "largest number of lines of a request", unit="lines", minimum=1, free=True)
    max_characters: int = option(
        5000, "largest number of characters of a line", unit="characters", minimum=1, free=True
    )
    max_waiting: int = option(
        256, "largest number of waiting requests; any more are answered with 503", unit="requests", minimum=1, free=True
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
        """The longest body within the limits, in bytes: JSON may escape a character as two times six bytes."""
        return self.max_lines * (12 * self.max_characters + 16) + 1000


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Scores."""

    splits: str = option("test", "comma-separated: valid, test", free=True)
    pairs: str = option("", "directions to translate, in the form of data.pairs; empty: those of the run", free=True)
    comet: str = option(
        "", "also score with this COMET model, a file or a name such as Unbabel/wmt22-comet-da", free=True
    )

    @property
    def split_names(self) -> list[str]:
        """`splits` as a list."""
        return [name.strip() for name in self.splits.split(",")]


@dataclasses.dataclass(frozen=True)
class AverageConfig:
    """One model from several checkpoints."""

    checkpoints: str = option(
        "last:2", "checkpoints to average: last:n, best:n, or steps such as 1000,2000,3000", free=True
    )


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Systems side by side."""

    systems: str = option(
        "",
        "comma-separated workdirs or files of translations, each as path or name=path; the first is the baseline",
        free=True,
    )
    reference: str = option("", "file of references; empty: those that the first workdir was evaluated with", free=True)
    split: str = option("test", "split whose translations to take from workdirs", free=True)

    def named(self) -> list[tuple[str, str]]:
        """`systems` as (name, path)."""
        parts = (part.strip().rpartition("=") for part in self.systems.split(",") if part.strip())
        return [(name or path, path) for name, _, path in parts]


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """The model for other engines."""

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
        "validation pairs whose log-probabilities are compared with the exported model's; 0: no check",
        unit="pairs",
        minimum=0,
        free=True,
    )

    @property
    def name(self) -> str:
        """Name of the folder if `path` is empty."""
        return "-".join(filter(None, (self.format, self.quantization)))


@dataclasses.dataclass(frozen=True)
class AnalyzeConfig:
    """Looking inside."""

    methods: str = option("", "comma-separated methods to compare untrained; empty: model.method", free=True)

    def names(self, method: str) -> list[str]:
        """`methods` as a list; `method` if there are none."""
        names = (name.strip() for name in self.methods.split(","))
        return list(dict.fromkeys(name for name in names if name)) or [method]


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """What a run will cost."""

    device: str = option(
        "", "device to plan for, see branchnorm_jax/analysis/devices.py; empty: this machine's", free=True
    )
    devices: int = option(0, "number of devices; 0: all of this machine", minimum=0, free=True)
    sentence_length: int = option(
        32, "average length of a sentence, both sides", unit="tokens", minimum=2, maximum=100_000, free=True
    )
    compile: bool = option(True, "compile the update on this machine, for the compiler's own figures", free=True)
    calibrate: bool = option(False, "time shallow models of the same width on this machine", free=True)
    refuse: bool = option(
        True,
        "do not train if parameters, optimiser state and gradients alone exceed the device's memory",
        free=True,
    )


@dataclasses.dataclass(frozen=True)
class SweepConfig:
    """Many runs."""

    grid: str = option(
        "",
        "runs, as axis=value,value axis=value | ...; axes: method, depth, any option of model, data, train, decode",
        free=True,
    )
    columns: str = option(
        "depth", "comma-separated axes of the table's columns; the other axes label its rows", free=True
    )
    baseline: str = option("", "method that the others are tested against; empty: no test", free=True)
    recommended: bool = option(
        False,
        "each run takes the options that its method recommends, unless config file, command line or grid set them; "
        "otherwise only the options of the grid differ",
        free=True,
    )
    chosen: str = option(
        "",
        "recommended: options that keep their values; filled in with the options that were set, for a resume",
        free=True,
    )

    @property
    def column_names(self) -> list[str]:
        """`columns` as a list."""
        return [name.strip() for name in self.columns.split(",")]


@dataclasses.dataclass(frozen=True)
class Config:
    """All options. Use `from_config_dict` to make one: it validates."""

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
    analyze: AnalyzeConfig = dataclasses.field(default_factory=AnalyzeConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    sweep: SweepConfig = dataclasses.field(default_factory=SweepConfig)


def fields() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every option as ("section.name", dataclass field), in the order of this file."""
    for section, value in vars(Config()).items():
        for field in dataclasses.fields(value):
            yield f"{section}.{field.name}", field

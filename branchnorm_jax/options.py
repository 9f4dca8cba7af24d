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
        4000, "T: the update at which every alpha reaches its end", unit="updates", minimum=1, common=True
    )
    alpha_schedule: str = option(
        "linear",
        "how alpha rises in methods with a growing branch (branchnorm, mixnorm, prores_*); adaptive: linear, but it "
        "pauses while a layer's gradient is below alpha_floor",
        choices=("linear", "exp", "sigmoid", "adaptive"),
    )
    alpha_order: str = option(
        "equal",
        "which layers' alpha grows when: all together (equal: BranchNorm), the orders of ProRes, or one layer after "
        "another by alpha_stagger (bottom_up, top_down, progressive); branches whose alpha is 0 are not computed",
        choices=(
            *("equal", "linear", "linear_sqrt", "linear_square", "reverse", "stagewise_0", "stagewise_L"),
            *(
                "stagewise_sqrt_L",
                "stagewise_sqrt_l",
                "fix_L",
                "fix_sqrt_L",
                "fix_sqrt_l",
                "bottom_up",
                "top_down",
                "progressive",
            ),
        ),
    )
    alpha_start: str = option(
        "",
        "alpha at update 0: a number, a rule of depth such as 1/sqrt(n) (n sub-layers, L layers, l the layer), or "
        "deepnorm (DeepNorm's ratio of branch to skip); empty: the order's own, 0 for equal",
    )
    alpha_end: str = option("", "alpha from update T on, as alpha_start; empty: the order's own, 1 for equal")
    alpha_stagger: float = option(
        0.5, "bottom_up, top_down, progressive: share of T after which the last layer starts", minimum=0, maximum=0.99
    )
    alpha_floor: float = option(
        1e-3, "adaptive: share of the strongest layer's gradient that the weakest one needs", minimum=0, maximum=1
    )
    alpha_hold: int = option(20, "adaptive: length of a pause of alpha", unit="updates", minimum=1)
    norm: str = option(
        "layer_norm",
        "kind of every norm that the method has; scale_norm_fixed learns one g, that of the norm after the decoder",
        choices=("layer_norm", "rms_norm", "scale_norm", "scale_norm_fixed", "dyt", "none"),
    )
    embedding: str = option(
        "standard", "embedding tables: as they are, or rows of length 1 (fixnorm)", choices=("standard", "fixnorm")
    )
    output_bias: bool = option(False, "learn a bias of the output logits")
    mask_unused: bool = option(
        False, "give no probability to pieces that the target side of the training text never uses"
    )
    word_dropout: float = option(
        0.0, "input words replaced by <unk> in training, both sides", unit="probability", minimum=0, maximum=0.99
    )
    init: str = option("", "base initialisation, see branchnorm_jax/model/initializers.py; empty: the method's own")
    dtype: str = option("float32", "data type of the matrix products", choices=("float32", "bfloat16"), common=True)
    carry_dtype: str = option(
        "float32", "data type of the residual stream between sub-layers", choices=("float32", "float16", "bfloat16")
    )
    scan: bool = option(True, "run the layers as one lax.scan (compile time independent of depth)", free=True)
    remat: str = option(
        "none",
        "what the backward pass computes again instead of keeping it: nothing; scores and hidden feed-forward layers "
        "(save_branches: 1/2 of the memory, 1/10 more time); all but the stream between layers (full: 1/3 more time), "
        "or between groups of layers (nested: 2/3 more time; dlcl: as full); auto: the first of them that fits",
        choices=("none", "save_branches", "full", "nested", "auto"),
        free=True,
        common=True,
    )
    group: int = option(
        0, "layers per group of remat=nested; 0: the size that needs least memory", minimum=0, free=True
    )
    logits_mb: int = option(
        128, "largest block of float32 logits that the loss holds at once, per device", unit="MB", minimum=1, free=True
    )
    unroll: int = option(1, "layers per iteration of the scan", minimum=1, free=True)


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
        "text: file name or glob under path, {pair} is en-de or de-en; .gz, .zst and .xz are tried too",
        free=True,
    )
    tfds_dir: str = option("", "tfds: folder of the prepared data sets; empty: TFDS's own default", free=True)
    source_lang: str = option("en", "language translated from", common=True)
    target_lang: str = option("de", "language translated to", common=True)
    pairs: str = option(
        "",
        "several pairs in one run instead: en-de,fr-de,...; en-de+fr is en-de,en-fr; en+de+fr is all six directions",
    )
    valid_pairs: str = option("", "pairs: those that are validated; empty: all")
    tags: str = option(
        "source",
        "pairs: the tag of the target language, as >>de<<, comes before the source, the target, or both",
        choices=("none", "source", "target", "both"),
    )
    temperature: float = option(
        1.0,
        "pairs: each makes up size^(1/temperature) of an epoch; 1: every sentence once",
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
        2_000_000, "sentences that the vocabulary is trained on, at most", unit="sentences", minimum=100
    )
    subword_samples: int = option(
        0,
        "subword regularisation: the training text is tokenised so many times, each time in pieces that are drawn; "
        "0: once, in the likeliest",
        unit="times",
        minimum=0,
        maximum=1000,
    )
    subword_alpha: float = option(
        0.2, "P(segmentation)^alpha is what a word's pieces are drawn by (Marian's sentencepiece-alphas)", minimum=0
    )
    max_length: int = option(
        256, "longer training pairs are dropped and counted; EOS included", unit="tokens", minimum=4
    )
    max_ratio: float = option(
        0.0, "training pairs of a larger length ratio are dropped and counted; 0: keep all", minimum=0
    )
    batch_shapes: int = option(
        4,
        "static batch shapes at most, each compiled once; from one to the next rows are half as many",
        unit="shapes",
        minimum=1,
        maximum=64,
    )
    row_multiple: int = option(
        8, "rows of a batch are a multiple of this; devices must divide it", unit="rows", minimum=1
    )

    def directions(self, pairs: str = "") -> "list[DataConfig]":
        """One config for each of `pairs`, by default the run's own; with neither, the one of source and target_lang."""
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
        """How many of the training text there are; a pass of the batch plan reads all of them."""
        return max(1, self.subword_samples)

    def validated(self) -> "list[DataConfig]":
        """The directions that are validated."""
        return self.directions(self.valid_pairs)

    @property
    def languages(self) -> list[str]:
        """All languages of the run, sources and targets."""
        return sorted({lang for found in self.directions() for lang in (found.source_lang, found.target_lang)})

    @property
    def pair(self) -> str:
        """Of a single direction: as en-de."""
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
        "workdir, or workdir:checkpoint, of a run whose vocabulary, parameters and alpha this one begins with: the "
        "same model, with other text or another way of training",
    )
    batch_tokens: int = option(
        4096,
        "positions per update on the larger of the two sides (fairseq's max-tokens x workers x accumulation)",
        unit="tokens",
        minimum=8,
        common=True,
    )
    accumulation: int = option(1, "parts that one update's batch is split into", unit="parts", minimum=1)
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
        "p: the update of a layer is multiplied by its alpha^p, in methods with a growing branch; 0: plain updates",
        minimum=0,
    )
    encoder_rate: float = option(1.0, "factor on the updates of the encoder's layers; 0 freezes them", minimum=0)
    encoder_rate_steps: int = option(
        0, "encoder_rate is for the first updates only; 0: for all", unit="updates", minimum=0
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
    decay_patience: int = option(
        3, "val_decay: when the score of a validation is below that of each of so many before it", minimum=1
    )
    min_learning_rate: float = option(
        0.0,
        "stop when a validation after the warm-up finds the learning rate below this; 0: never",
        minimum=0,
        free=True,
    )
    update_in_backward: bool = option(
        False,
        "update each layer as soon as the backward pass has its gradient, which is then forgotten: a quarter less for "
        "parameters, moments and gradients; needs model.remat=full or nested, no clipping, accumulation, skipping",
        free=True,
    )
    nonfinite: str = option(
        "stop",
        "an update with a loss, gradient or size that is not finite ends the run, changes nothing, or goes back to a "
        "checkpoint",
        choices=("stop", "skip", "rollback"),
        free=True,
    )
    spike: str = option(
        "log",
        "an update whose loss or size is far above the last ones' is noted, ends the run, changes nothing, or takes it "
        "back to a checkpoint",
        choices=("log", "stop", "skip", "rollback"),
        free=True,
    )
    spike_deviations: float = option(
        8.0, "how far that is", unit="standard deviations", minimum=1, maximum=1e6, free=True
    )
    rollback: str = option(
        "batches",
        "what differs after a rollback: the batches that led to it are left out, or alpha stands still",
        choices=("batches", "alpha"),
        free=True,
    )
    rollback_updates: int = option(
        20,
        "batches: how many are left out, the last in trouble included; alpha: for how long it stands after the trouble",
        unit="updates",
        minimum=1,
        free=True,
    )
    label_smoothing: float = option(0.1, "probability given to the other words", minimum=0, maximum=0.99)
    ema_decay: float = option(
        0.0,
        "decay of an exponential moving average of the parameters, say 0.9999, which validates, translates and is "
        "exported in their place; 0: none is kept",
        minimum=0,
        maximum=0.999999,
    )
    log_every: int = option(10, "interval of metrics.jsonl lines; 0: never", unit="updates", minimum=0, free=True)
    watch_every: int = option(
        100,
        "interval of layers.jsonl lines: statistics of every layer; 0: none are computed",
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
    prefetch: int = option(4, "batches prepared ahead by a thread", unit="batches", minimum=1, free=True)


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The devices."""

    data: int = option(0, "size of the mesh axis that splits batches; 0: all that are left", minimum=0, free=True)
    model: int = option(1, "size of the mesh axis that splits matrices", minimum=1, free=True)
    distributed: bool = option(False, "start jax.distributed even where no launcher is detected", free=True)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Translation."""

    checkpoint: str = option("best", "which checkpoint: best, last, a step, or average (see --mode=average)", free=True)
    ensemble: str = option(
        "",
        "comma-separated workdirs, or workdir:checkpoint, whose models vote with this one; of the same vocabulary",
        free=True,
    )
    target_lang: str = option(
        "", "pairs: language to translate to where a line does not begin with a tag such as >>de<<", free=True
    )
    input: str = option("", "translate, score: file to read; empty: stdin", free=True)
    output: str = option("", "translate: file to write, restarted where it stopped; empty: stdout", free=True)
    beam_size: int = option(4, "hypotheses kept; 1: greedy", minimum=1, maximum=1000, free=True, common=True)
    length_penalty: float = option(0.6, "strength of the length penalty", free=True, common=True)
    length_penalty_kind: str = option(
        "fairseq",
        "score / L^p (fairseq, what the papers used) or score / ((5+L)/6)^p (gnmt); L counts EOS",
        choices=("fairseq", "gnmt"),
        free=True,
    )
    max_length_a: float = option(
        2.0, "a of the longest translation a*x+b, x source tokens with EOS", minimum=0, maximum=100, free=True
    )
    max_length_b: int = option(
        20, "b of the longest translation a*x+b", unit="tokens", minimum=1, maximum=100_000, free=True
    )
    min_length: int = option(1, "shortest translation, language tags not counted", unit="tokens", minimum=0, free=True)
    max_input_length: int = option(
        1024,
        "longer input lines are cut, with a warning; score cuts none",
        unit="tokens",
        minimum=4,
        maximum=100_000,
        free=True,
    )
    no_repeat_ngram: int = option(
        0, "no sequence of so many tokens comes twice; 0: any may", unit="tokens", minimum=0, maximum=100, free=True
    )
    target_prefix: bool = option(False, "translate: lines are source<TAB>beginning of the translation", free=True)
    temperature: float = option(
        0.0,
        "0: beam search; above: beam_size translations are drawn by softmax(logits / temperature), of which the nbest "
        "with the best scores are printed; beam_size=1 is a plain draw",
        minimum=0,
        maximum=100,
        free=True,
    )
    top_k: int = option(0, "draw from so many likeliest words; 0: from all", unit="words", minimum=0, free=True)
    top_p: float = option(
        1.0, "draw from the likeliest words that have this probability together", minimum=1e-6, maximum=1, free=True
    )
    seed: int = option(
        0, "of what is drawn; a translation depends on it and on the line's number", minimum=0, free=True
    )
    nbest: int = option(
        1, "hypotheses printed per line; more than 1 prints `line ||| text ||| score`", minimum=1, free=True
    )
    token_scores: bool = option(
        False, "translate: print the pieces of each translation with their log-probabilities", free=True
    )
    alignments: bool = option(
        False, "translate: print which source piece each piece of a translation looks at most: 0-0 2-1 ...", free=True
    )
    alignment_layer: int = option(
        0,
        "decoder layer whose cross-attention that is, from 1, the mean of its heads; 0: all layers'",
        minimum=0,
        free=True,
    )
    batch_tokens: int = option(4096, "source positions x beam of a batch", unit="tokens", minimum=1, free=True)
    streams: int = option(
        0,
        "batches decoded at the same time; 0: two on a single CPU device, one elsewhere",
        unit="batches",
        minimum=0,
        free=True,
    )
    unroll: int = option(
        12,
        "decoders of up to so many layers run without a loop: a quarter faster, but longer to compile",
        unit="layers",
        minimum=0,
        free=True,
    )

    @property
    def search(self) -> dict[str, Any]:
        """By name, what a translation depends on, beside its line and the models: not where they lie, nor how fast."""
        others = "checkpoint", "ensemble", "input", "output", "batch_tokens", "streams", "unroll"
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Translation over HTTP."""

    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0: all of this machine's", free=True)
    port: int = option(8000, "port to listen at; 0: any that is free", minimum=0, maximum=65535, free=True)
    max_lines: int = option(100, "most lines of a request", unit="lines", minimum=1, free=True)
    max_characters: int = option(5000, "most characters of a line", unit="characters", minimum=1, free=True)
    max_body_bytes: int = option(1_000_000, "largest body of a request", unit="bytes", minimum=1, free=True)
    max_waiting: int = option(
        256, "most requests that wait for the device; one more is answered 503", unit="requests", minimum=1, free=True
    )
    batch_lines: int = option(
        64, "waiting requests are put together until there are so many lines", unit="lines", minimum=1, free=True
    )
    batch_wait_ms: float = option(
        5.0, "how long the first request waits for others", unit="ms", minimum=0, maximum=60_000, free=True
    )
    warm_up_length: int = option(
        32, "programs for lines of up to so many tokens are compiled at the start", unit="tokens", minimum=0, free=True
    )


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Scores."""

    splits: str = option("test", "comma-separated: valid, test", free=True)
    pairs: str = option("", "directions to translate, as data.pairs; empty: those of the run", free=True)
    comet: str = option(
        "", "also score with this COMET model, a file or a name such as Unbabel/wmt22-comet-da; empty: no", free=True
    )

    @property
    def split_names(self) -> list[str]:
        """`splits` as a list."""
        return [name.strip() for name in self.splits.split(",")]


@dataclasses.dataclass(frozen=True)
class AverageConfig:
    """One model from several checkpoints."""

    checkpoints: str = option("last:2", "which: last:n, best:n, or steps as 1000,2000,3000", free=True)


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Systems side by side."""

    systems: str = option(
        "",
        "comma-separated workdirs or files of translations, each as path or name=path; the first is the baseline",
        free=True,
    )
    reference: str = option("", "file of references; empty: what the first workdir was evaluated with", free=True)
    split: str = option("test", "which split's translations to take from workdirs", free=True)

    def named(self) -> list[tuple[str, str]]:
        """`systems` as (name, path)."""
        parts = (part.strip().rpartition("=") for part in self.systems.split(",") if part.strip())
        return [(name or path, path) for name, _, path in parts]


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """The model for other engines."""

    format: str = option("ctranslate2", "whose format to write", choices=("ctranslate2", "huggingface"), free=True)
    quantization: str = option(
        "",
        "ctranslate2: data type of the stored matrices; empty: float32",
        choices=("", "int8", "int8_float16", "int16", "float16", "bfloat16"),
        free=True,
    )
    path: str = option(
        "",
        "folder to write, new or empty; without it <workdir>/export/<format>[-<quantization>], which is replaced",
        free=True,
    )
    check_lines: int = option(
        100,
        "validation pairs whose log-probabilities both sides compute; 0: no check",
        unit="pairs",
        minimum=0,
        free=True,
    )

    @property
    def name(self) -> str:
        """Of the folder, where `path` names none."""
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
        "", "device to plan for, see branchnorm_jax/analysis/devices.py; empty: what is here", free=True
    )
    devices: int = option(0, "how many; 0: as many as are here", minimum=0, free=True)
    sentence_length: int = option(
        32, "average length of a sentence, both sides", unit="tokens", minimum=2, maximum=100_000, free=True
    )
    compile: bool = option(
        True, "compile the update on the device that is here, for the compiler's own figures", free=True
    )
    calibrate: bool = option(False, "time shallow models of the same width on the device that is here", free=True)
    refuse: bool = option(
        True,
        "do not start a training if parameters, optimiser state and gradients alone need more than the device's memory",
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
    columns: str = option("depth", "axes of the table's columns, comma-separated; others label lines", free=True)
    baseline: str = option("", "method that the others are tested against; empty: no test", free=True)
    recommended: bool = option(
        False,
        "each run takes what the authors of its method recommend, unless config file, command line or grid set it; "
        "else all options but the grid's are equal",
        free=True,
    )
    chosen: str = option(
        "", "recommended: options that stay as they are; filled in with those that were set, for a resume", free=True
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

"""Checks of options that depend on each other. `config.py` checks the type and the range of each option."""

import itertools
import math
import re
from typing import Any

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import Config, sections

LARGEST_RATIO = 1000
"""Largest ratio of the weights of two corpora: an epoch repeats the pairs of one so often."""


def check(config: Config) -> None:
    """Checks the rules that involve several options. Raises `UserError` if one is broken."""
    _validate_model(config)
    _validate_train(config)
    _validate_directions(config)
    _validate_corpora(config)
    _validate_decode(config)
    if config.data.subword_samples and config.data.vocab_type != "unigram":
        raise UserError("config: data.subword_samples needs the probabilities of data.vocab_type=unigram")
    for split in config.evaluate.split_names:
        if split not in ("valid", "test"):
            raise UserError(f"config: evaluate.splits contains {split!r}; use valid and test, comma-separated")


def _validate_model(config: Config) -> None:
    """Checks the options of the network. Raises `UserError` if they are invalid."""
    model, data = config.model, config.data
    if model.width % model.heads and not model.head_width:
        raise UserError(f"config: model.heads={model.heads} does not divide model.width={model.width}")
    if model.width % 2:
        raise UserError(f"config: model.width={model.width} must be even (sinusoidal positions come in pairs)")
    if model.positions == "rotary" and model.key_width % 2:
        raise UserError(f"config: model.positions=rotary needs an even width of attention heads, not {model.key_width}")
    if model.kernels == "interpret" and (model.positions in ("relative", "rotary") or model.value_residual):
        what = "model.value_residual" if model.value_residual else f"model.positions={model.positions}"
        raise UserError(f"config: model.kernels=interpret: the kernels do not support {what}; use auto or plain")
    if model.decoder_start == "zero" and model.positions in ("relative", "rotary"):
        raise UserError(
            f"config: model.decoder_start=zero with model.positions={model.positions} makes the decoder's first input "
            "0, where norms have no useful gradient; use model.decoder_start=eos"
        )
    if model.longest and model.family == "encoder_decoder" and data.max_length > model.longest:
        raise UserError(
            f"config: data.max_length={data.max_length} is more than model.max_positions={model.max_positions}, the "
            "longest sentence of a model with learned positions"
        )
    _validate_family(config)
    if (shared := model.shared_embeddings) in ("all", "inputs") and not data.shared_vocab:
        raise UserError(f"config: model.shared_embeddings={shared} needs data.shared_vocab=True; use decoder or none")
    if model.positions != "relative":
        return
    if model.relative_buckets % 2:
        raise UserError(f"config: model.relative_buckets={model.relative_buckets} must be even")
    if model.relative_distance <= model.relative_buckets // 2:
        raise UserError(
            f"config: model.relative_distance={model.relative_distance} must be more than half of "
            f"model.relative_buckets={model.relative_buckets}"
        )


_LANGUAGE_MODEL_VALUES: dict[str, tuple[Any, ...]] = {
    "model.shared_embeddings": ("all", "none"),
    "model.decoder_start": ("eos",),
    "data.pairs": ("",),
    "data.subword_samples": (0,),
    "data.source_normalization": ("nmt_nfkc",),
    "data.target_normalization": ("nfc",),
    "data.max_length": (256,),
    "data.max_ratio": (0,),
    "decode.ensemble": ("",),
    "decode.glossary": ("",),
    "decode.constraints": (False,),
    "decode.target_prefix": (False,),
    "decode.output": ("",),
    "decode.alignments": (False,),
    "decode.token_scores": (False,),
    "decode.dtype": ("auto",),
    "decode.unroll": (0,),
    "decode.streams": (0,),
    "decode.split": ("auto",),
    "decode.source_lang": ("",),
    "decode.target_lang": ("",),
    "evaluate.comet": ("",),
    "train.eval_bleu_sentences": (0,),
    "train.best_metric": ("loss",),
    "train.encoder_rate": (1,),
    "train.encoder_rate_steps": (0,),
}
"""Option -> the values that a language model allows; the others are for translation."""

_LANGUAGE_MODEL_HINTS = {
    "decode.output": "; --mode=generate prints to stdout",
    "data.max_length": "; the length of its rows is data.context",
}


def _validate_family(config: Config) -> None:
    """Checks that model, data and training are all for translation or all for language models."""
    model, decoder = config.model, config.model.family == "decoder"
    if decoder == bool(model.encoder_layers):
        needs = (
            "has no encoder: give a depth such as 12L" if decoder else "needs an encoder: give a depth such as 6L-6L"
        )
        raise UserError(f"config: model.family={model.family} {needs} (model.encoder_layers={model.encoder_layers})")
    if decoder != (config.data.source == "documents"):
        wanted = "data.source=documents, as configs/lm.py does" if decoder else "another data.source than documents"
        raise UserError(f"config: model.family={model.family} needs {wanted}")
    if not decoder:
        if config.data.vocab_type == "bytes":
            raise UserError("config: data.vocab_type=bytes is for language models; use unigram or bpe")
        return
    data = config.data
    by_name = sections(config)
    for full, allowed in _LANGUAGE_MODEL_VALUES.items():
        section, _, name = full.partition(".")
        if (value := getattr(by_name[section], name)) not in allowed:
            options = " or ".join(str(each) or "''" for each in allowed)
            hint = _LANGUAGE_MODEL_HINTS.get(full, "")
            raise UserError(f"config: a language model needs {full}={options}, not {value}{hint}")
    if len(data.corpora()) > 1 or data.corpora()[0][1] != 1:
        raise UserError(
            f"config: data.train_split={data.train_split}: a language model has a single corpus; use a glob "
            "in data.files to read several files"
        )
    if data.vocab_type == "bytes" and data.vocab_size != BYTE_PIECES:
        raise UserError(f"config: data.vocab_type=bytes has {BYTE_PIECES} pieces: set data.vocab_size={BYTE_PIECES}")
    if config.evaluate.stride > data.context:
        raise UserError(f"config: evaluate.stride={config.evaluate.stride} is more than data.context={data.context}")
    if model.longest and data.context > model.longest:
        raise UserError(
            f"config: data.context={data.context} is more than model.max_positions={model.max_positions}, the longest "
            "row of a model with learned positions"
        )


BYTE_PIECES = 259
"""Size of the vocabulary of bytes: <pad>, </s>, <unk> and 256 bytes."""


def _validate_train(config: Config) -> None:
    """Checks the options of training. Raises `UserError` if they are invalid."""
    train, data = config.train, config.data
    # Rows of sentences have a length that is chosen later, and at least one token.
    row, what = (data.context, f" of data.context={data.context} tokens") if data.source == "documents" else (1, "")
    if train.batch_tokens < row * data.row_multiple:
        raise UserError(
            f"config: train.batch_tokens={train.batch_tokens} cannot hold data.row_multiple={data.row_multiple} rows"
            f"{what}; raise it to {row * data.row_multiple} or lower {'data.context' if what else 'data.row_multiple'}"
        )
    if train.update_in_backward:
        _validate_update_in_backward(config)
    if train.may_roll_back:
        if not train.checkpoint_every:
            raise UserError("config: a rollback needs checkpoints to go back to; set train.checkpoint_every")
        if train.rollback == "batches" and (train.keep_last - 1) * train.checkpoint_every < train.rollback_updates:
            raise UserError(
                f"config: train.rollback_updates={train.rollback_updates} is too large for train.keep_last="
                f"{train.keep_last} checkpoints, one every {train.checkpoint_every} updates; raise train.keep_last"
            )
    if bool(train.steps) == bool(train.epochs):
        raise UserError(
            f"config: set either train.steps or train.epochs and leave the other 0 "
            f"(now steps={train.steps}, epochs={train.epochs:g})"
        )
    if train.best_metric != "loss" and not train.eval_bleu_sentences:
        needs = f"train.best_metric={train.best_metric} needs train.eval_bleu_sentences > 0"
        raise UserError(f"config: {needs}; or set best_metric=loss")
    needing = {
        f"train.patience={train.patience}": train.patience,
        f"train.min_learning_rate={train.min_learning_rate:g}": train.min_learning_rate,
        "train.schedule=val_decay": train.schedule == "val_decay",
    }
    if not train.eval_every and (used := [option for option, value in needing.items() if value]):
        raise UserError(f"config: {used[0]} needs validations; set train.eval_every as well")
    if train.schedule == "range_test" and not train.warmup_init:
        raise UserError("config: train.schedule=range_test multiplies a first rate; set train.warmup_init above 0")
    if train.parent_rate != 1 and not config.model.grown_from:
        raise UserError(
            f"config: train.parent_rate={train.parent_rate:g} is for deepened models; set model.grown_from, or "
            "train.learning_rate for fine-tuning"
        )
    if train.best_metric == "comet" and not config.evaluate.comet:
        raise UserError("config: train.best_metric=comet needs evaluate.comet, a model such as Unbabel/wmt22-comet-da")
    if data.row_multiple % train.accumulation:
        raise UserError(
            f"config: train.accumulation={train.accumulation} does not divide data.row_multiple={data.row_multiple}"
        )


def _validate_decode(config: Config) -> None:
    """Checks the options of translation. Raises `UserError` if they are invalid."""
    decode, depth = config.decode, config.model.decoder_layers
    if decode.nbest > decode.beam_size:
        raise UserError(
            f"config: decode.nbest={decode.nbest} is more than decode.beam_size={decode.beam_size}; raise the beam size"
        )
    decoder = config.model.family == "decoder"
    longest = "max_new_tokens" if decoder else "" if decode.max_length_a else "max_length_b"
    if longest and decode.min_length > getattr(decode, longest):
        raise UserError(
            f"config: decode.min_length={decode.min_length} is more than the maximum length, "
            f"decode.{longest}={getattr(decode, longest)}"
        )
    if decode.constraints and decode.target_prefix:
        raise UserError(
            "config: decode.constraints and decode.target_prefix both read fields after the source; set one"
        )
    if decode.constraints and decode.split == "sentences":
        raise UserError("config: decode.constraints: lines with phrases are not split; set decode.split=auto or none")
    if decode.temperature and (decode.constraints or decode.glossary):
        raise UserError("config: decode.glossary and decode.constraints need beam search; set decode.temperature=0")
    if not decode.temperature and (decode.top_k or decode.top_p < 1):
        raise UserError("config: decode.top_k and decode.top_p need sampling; set decode.temperature, for example to 1")
    if decode.streams > 1 and config.parallel.model > 1:
        # Two threads would start programs that communicate, in an order that may differ between the devices.
        raise UserError(
            f"config: decode.streams={decode.streams} needs a network that no devices share "
            f"(parallel.model={config.parallel.model}); set decode.streams=1"
        )
    if decode.alignment_layer > depth:
        raise UserError(
            f"config: decode.alignment_layer={decode.alignment_layer} is more than model.decoder_layers={depth}"
        )


def _validate_directions(config: Config) -> None:
    """Checks the language pairs. Raises `UserError` if they are invalid."""
    data = config.data
    if not data.pairs and data.source_lang == data.target_lang:
        raise UserError(f"config: data.source_lang and data.target_lang are both {data.source_lang!r}")
    named = {"data.pairs": data.pairs, "data.valid_pairs": data.valid_pairs, "evaluate.pairs": config.evaluate.pairs}
    code = re.compile(r"[a-z]\w*")  # such as de, zh_tw, pt_BR; a hyphen separates the two languages
    for name, pairs in named.items():
        if not pairs:
            continue
        if not data.pairs:
            raise UserError(f"config: {name} needs data.pairs, which is empty")
        directions = data.language_pairs(pairs)
        valid = {lang: bool(code.fullmatch(lang)) for lang in itertools.chain.from_iterable(directions)}
        wrong = [pair for pair in directions if pair[0] == pair[1] or not all(map(valid.__getitem__, pair))]
        if wrong or not directions:
            what = f"{'-'.join(wrong[0])!r} is not a pair of two languages" if wrong else "no language pair"
            raise UserError(f"config: {name}={pairs!r}: {what}; write en-de,fr-pt_BR or, for every direction, en+de+fr")
    if data.valid_pairs and (unknown := set(data.language_pairs(data.valid_pairs)) - set(data.language_pairs())):
        missing = "-".join(min(unknown))
        raise UserError(f"config: data.valid_pairs={data.valid_pairs}: {missing} is not among data.pairs={data.pairs}")
    if data.tags == "none" and len(data.targets) > 1:
        raise UserError(
            f"config: data.tags=none: without tags the model cannot know which of {', '.join(data.targets)} to "
            "translate to; set data.tags=source or data.tags=target"
        )


def _validate_corpora(config: Config) -> None:
    """Checks the training corpora and their weights. Raises `UserError` if they are invalid."""
    data, option = config.data, f"config: data.train_split={config.data.train_split!r}"
    names = [corpus.train_split for corpus, _ in data.corpora()]
    weights = [weight for _, weight in data.corpora()]
    if not all(names):
        raise UserError(f"{option}: a corpus has no name; write names and weights as in news:2,web:1")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{option}: {twice[0]} is there twice; give it a weight, as in {twice[0]}:2")
    if len(names) > 1 and data.source == "numerals":
        raise UserError(f"{option}: the built-in corpus is a single one; several need data.source=text or tfds")
    if not (min(weights) > 0 and math.isfinite(sum(weights)) and max(weights) <= LARGEST_RATIO * min(weights)):
        raise UserError(
            f"{option}: weights must be above 0, and the largest at most {LARGEST_RATIO} times the smallest"
        )


def _validate_update_in_backward(config: Config) -> None:
    """Checks the options that `train.update_in_backward` requires. Raises `UserError` if one does not fit.

    That option discards the gradient of each layer before the gradient of the next layer is computed.
    """
    model, train = config.model, config.train
    for name, value, allowed in (
        ("model.remat", model.remat, ("full", "nested", "auto")),
        ("train.clip_norm", train.clip_norm, (0,)),
        ("train.accumulation", train.accumulation, (1,)),
        ("train.nonfinite", train.nonfinite, ("stop", "rollback")),
        ("train.spike", train.spike, ("log", "stop", "rollback")),
        ("model.unroll", model.unroll, (0, 1)),
    ):
        if value not in allowed:
            options = " or ".join(str(option) for option in allowed)
            raise UserError(f"config: train.update_in_backward needs {name}={options}, not {value}")
    for name in ("encoder_layers", "decoder_layers"):
        if model.group and getattr(model, name) % model.group:
            raise UserError(
                f"config: train.update_in_backward needs a model.group that divides model.{name}="
                f"{getattr(model, name)}, not {model.group}; model.group=0 chooses one"
            )

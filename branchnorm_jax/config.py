"""Builds a validated `Config` from a config file and a command line.

`default_config()` turns the options of `options.py` into the locked `ConfigDict` that the files under `configs/` return
and that command-line flags override; `from_config_dict()` turns the result into a typed, validated, frozen `Config`.
Code outside the command line uses `Config` and never a `ConfigDict`.
"""

import dataclasses
import difflib
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import Config, fields, parse_depth, sections


class Section(ml_collections.ConfigDict):
    """A section of options that records which options were assigned, even if to their defaults."""

    def __init__(self, defaults: Mapping[str, Any] | None = None) -> None:
        # ConfigDict would treat an ordinary attribute as an option.
        object.__setattr__(self, "assigned", set())
        super().__init__(defaults)
        self.assigned.clear()

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.assigned.add(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.assigned.clear()
        self.assigned.update(state["assigned"])


def default_config(depth: str = "") -> ml_collections.ConfigDict:
    """Returns the locked `ConfigDict` of all defaults. Its sections record assignments.

    Args:
      depth: as in the papers, "18L-18L" (encoder-decoder) or "12L" (decoder-only); "" keeps the default.
    """
    config = ml_collections.ConfigDict()
    for name, options in dataclasses.asdict(Config()).items():
        config[name] = Section(options)
    set_depth(config, depth)
    return config.lock()


def set_depth(config: ml_collections.ConfigDict, depth: str) -> None:
    """Sets the depths of encoder and decoder from text such as "18L-18L"; "" keeps them.

    Raises:
      UserError: if the text is not a depth.
    """
    if not depth:
        return
    layers = parse_depth(depth)
    if layers is None:
        raise UserError(
            f"config argument {depth!r}: expected a depth such as 6L-6L (encoder-decoder) or 12L (decoder-only)"
        )
    config.model.encoder_layers, config.model.decoder_layers = layers


def with_one_length(config: ml_collections.ConfigDict, given: set[str]) -> ml_collections.ConfigDict:
    """Lets an explicit train.epochs replace the config file's train.steps, and vice versa.

    Args:
      config: all options.
      given: names of the options that the command line set. If it set both lengths, both stay, which is an error.
    """
    for name, other in (("steps", "epochs"), ("epochs", "steps")):
        if f"train.{name}" in given and f"train.{other}" not in given and config.train[name]:
            config.train[other] = type(config.train[other])(0)
    return config


def assigned(config: ml_collections.ConfigDict) -> set[str]:
    """Returns the names of the options that a config file or the command line set, even to their defaults.

    If `default_config` did not create a section, as in the config of an earlier run, all its options count as set.
    """
    return {
        f"{section.rstrip('_')}.{name}"
        for section, options in config.items()
        for name in (options.assigned if isinstance(options, Section) else options)
    }


def with_recommended(config: ml_collections.ConfigDict, recommended: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Sets the recommended options of a method, except those already `assigned`.

    Args:
      config: all options.
      recommended: "section.name" -> value.
    """
    for full in recommended.keys() - assigned(config):
        section, name = full.split(".")
        with config.unlocked():
            config[section][name] = recommended[full]
    return config


FOLLOWS = {"model.alpha_steps": "train.warmup_steps"}
"""option -> the option that it follows, unless it is `assigned`. In BranchNorm's paper T is the warm-up."""


def with_followers(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Sets each unassigned option of `FOLLOWS` to the value of the option that it follows, unless that is 0."""
    for name, leader in FOLLOWS.items():
        (section, option), (of_leader, leading) = name.split("."), leader.split(".")
        if name not in assigned(config) and config[of_leader][leading]:
            config[section][option] = config[of_leader][leading]
    return config


def record_chosen(config: ml_collections.ConfigDict, given: set[str]) -> None:
    """Stores in `sweep.chosen` the options that recommended values must not replace in a sweep.

    Args:
      config: all options.
      given: names of the options that the command line set; an earlier call of the same sweep recorded the others.
    """
    if config.sweep.recommended:
        earlier = {*config.sweep.chosen.split(",")} - {""}
        config.sweep.chosen = ",".join(sorted(earlier | given if earlier else assigned(config)))


ELSEWHERE = {
    "lr": "train.learning_rate",
    "batch_size": "train.batch_tokens",
    "max_tokens": "train.batch_tokens",
    "update_freq": "train.accumulation",
    "max_update": "train.steps",
    "max_steps": "train.steps",
    "warmup_updates": "train.warmup_steps",
    "num_layers": "model.encoder_layers",
    "d_model": "model.width",
    "hidden_size": "model.width",
    "embed_dim": "model.width",
    "d_ff": "model.ffn_width",
    "num_heads": "model.heads",
    "beam": "decode.beam_size",
    "num_beams": "decode.beam_size",
    "lenpen": "decode.length_penalty",
}
"""Names of options in other toolkits -> ours, for error messages."""


def nearest_name(name: str) -> str:
    """Returns the valid option most similar to `name`, for an error message, or "" if none is similar."""
    section, _, option = name.rpartition(".")
    if option in ELSEWHERE:
        return ELSEWHERE[option]

    def likeness(known: str) -> float:
        known_section, known_option = known.split(".")
        # The right name in the wrong section beats a wrong name in the right section.
        return difflib.SequenceMatcher(None, option, known_option).ratio() + 0.1 * (section == known_section)

    best = max((known for known, _ in fields()), key=likeness)
    return best if likeness(best) >= 0.6 else ""


def from_config_dict(config_dict: ml_collections.ConfigDict | dict[str, Any]) -> Config:
    """Returns a typed, validated and frozen `Config`.

    Raises:
      UserError: for an unknown name, a wrong type or a value out of range.
    """
    values = config_dict.to_dict() if isinstance(config_dict, ml_collections.ConfigDict) else config_dict
    given: dict[str, dict[str, Any]] = {name: {} for name in sections(Config())}
    known = dict(fields())
    for attribute, entries in values.items():
        section = attribute.rstrip("_")
        if section in given and not isinstance(entries, dict):
            raise UserError(f"config: {section} is a section with options, not the value {entries!r}")
        if section not in given:
            raise UserError(f"config: no section {section!r}; sections are {', '.join(given)}")
        for name, value in entries.items():
            full = f"{section}.{name}"
            if full not in known:
                hint = nearest_name(full)
                raise UserError(f"config: no option {full!r}" + (f"; did you mean {hint!r}?" if hint else ""))
            given[section][name] = _checked(full, known[full], value)
    types = {field.name: field.default_factory for field in dataclasses.fields(Config)}
    made = zip(types, given.values(), strict=True)
    config = Config(**{name: types[name](**entries) for name, entries in made})  # type: ignore[operator]
    _validate(config)
    return config


def _checked(name: str, field: dataclasses.Field[Any], value: Any) -> Any:
    kind = type(field.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"config: {name} must be {kind.__name__}, not {type(value).__name__} ({value!r})")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config: {name}={value} is not a finite number")
    meta = field.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(f"config: {name}={value!r} is not one of {', '.join(meta['choices'])}")
    if meta["minimum"] is not None and not value >= meta["minimum"]:
        raise UserError(f"config: {name}={value} is below its minimum {meta['minimum']}")
    if meta["maximum"] is not None and not value <= meta["maximum"]:
        raise UserError(f"config: {name}={value} is above its maximum {meta['maximum']}")
    return value


LARGEST_RATIO = 1000
"""Largest ratio of the weights of two corpora: an epoch repeats the pairs of one so often."""


def _validate(config: Config) -> None:
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
    fitting: dict[str, tuple[Any, ...]] = {
        "model.shared_embeddings": ("all", "none"),
        "model.decoder_start": ("eos",),
        "data.pairs": ("",),
        "data.subword_samples": (0,),
        "decode.ensemble": ("",),
        "decode.glossary": ("",),
        "decode.constraints": (False,),
        "decode.target_prefix": (False,),
        "decode.output": ("",),
        "train.eval_bleu_sentences": (0,),
        "train.best_metric": ("loss",),
        "train.encoder_rate": (1,),
    }
    values = to_flat(config)
    for name, allowed in fitting.items():
        if values[name] not in allowed:
            options = " or ".join(str(value) or "''" for value in allowed)
            raise UserError(f"config: a language model needs {name}={options}, not {values[name]}")
    if len(data.corpora()) > 1 or data.corpora()[0][1] != 1:
        raise UserError(
            f"config: data.train_split={data.train_split}: a language model has a single corpus; use a glob "
            "in data.files to read several files"
        )
    if data.vocab_type == "bytes" and data.vocab_size != BYTE_PIECES:
        raise UserError(f"config: data.vocab_type=bytes has {BYTE_PIECES} pieces: set data.vocab_size={BYTE_PIECES}")
    if model.longest and data.context > model.longest:
        raise UserError(
            f"config: data.context={data.context} is more than model.max_positions={model.max_positions}, the longest "
            "row of a model with learned positions"
        )


BYTE_PIECES = 259
"""Size of the vocabulary of bytes: <pad>, </s>, <unk> and 256 bytes."""


def _validate_train(config: Config) -> None:
    """Checks the options of training. Raises `UserError` if they are invalid."""
    train = config.train
    if train.update_in_backward:
        _validate_update_in_backward(config)
    if "rollback" in (train.nonfinite, train.spike):
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
    if train.best_metric != "loss" and train.keep_best and not train.eval_bleu_sentences:
        needs = f"train.best_metric={train.best_metric} needs train.eval_bleu_sentences > 0"
        raise UserError(f"config: {needs}; or set best_metric=loss")
    if train.best_metric == "comet" and not config.evaluate.comet:
        raise UserError("config: train.best_metric=comet needs evaluate.comet, a model such as Unbabel/wmt22-comet-da")
    if config.data.row_multiple % train.accumulation:
        raise UserError(
            f"config: train.accumulation={train.accumulation} does not divide data.row_multiple="
            f"{config.data.row_multiple}"
        )


def _validate_decode(config: Config) -> None:
    """Checks the options of translation. Raises `UserError` if they are invalid."""
    decode, depth = config.decode, config.model.decoder_layers
    if decode.nbest > decode.beam_size:
        raise UserError(f"config: decode.nbest={decode.nbest} is more than decode.beam_size={decode.beam_size}")
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


def to_flat(config: Config) -> dict[str, Any]:
    """Returns {"section.name": value} in the order of `options.py`."""
    by_name = sections(config)
    return {name: getattr(by_name[name.split(".")[0]], field.name) for name, field in fields()}


def difference(a: Config, b: Config, *, free: bool) -> list[str]:
    """Lists the options that differ between two configs, as "section.name: x -> y".

    Args:
      a: the old config.
      b: the new config.
      free: also list the options that a resume may change.
    """
    old, new = to_flat(a), to_flat(b)
    return [
        f"{name}: {old[name]!r} -> {new[name]!r}"
        for name, field in fields()
        if old[name] != new[name] and (free or not field.metadata["free"])
    ]


def to_json(config: Config) -> str:
    """Returns the content of `config.json`."""
    by_name = {name: dataclasses.asdict(section) for name, section in sections(config).items()}
    return json.dumps(by_name, indent=2) + "\n"


RENAMED: dict[tuple[str, str, Any], Any] = {
    ("model", "alpha_order", "uniform"): "equal",
    ("plan", "compile", True): "here",
    ("plan", "compile", False): "none",
}
"""(section, option, value) saved by earlier versions -> the current name of the value."""

DROPPED = (("model", "scan"), ("train", "prefetch"), ("serve", "max_body_bytes"))
"""(section, option) pairs of earlier versions that were removed. None of them affects the trained parameters."""


ADDED = {
    ("data", "source_normalization"): "nmt_nfkc",
    ("data", "target_normalization"): "nmt_nfkc",
}
"""(section, option) that earlier versions did not save -> what they did, if this is not the default today."""


def load(path: Path) -> Config:
    """Reads a config that `to_json` wrote. Raises `UserError` if the file is missing or not a config."""
    try:
        values = json.loads(path.read_text())
        if isinstance(values, dict) and "model_type" in values:
            raise UserError(f"{path}: this is a model of Hugging Face, not a run; make one of it with --mode=import")
        if not isinstance(values, dict) or not values.keys() >= {"model", "data", "train"}:
            raise ValueError("not the options of a run")
        for (section, option, old), new in RENAMED.items():
            if values.get(section, {}).get(option) == old:
                values[section][option] = new
        for section, option in DROPPED:
            values.get(section, {}).pop(option, None)
        for (section, option), earlier in ADDED.items():
            values[section].setdefault(option, earlier)
        return from_config_dict(values)
    except (OSError, ValueError, UserError) as error:
        raise UserError(
            f"{path}: cannot read the config of this workdir ({error}); delete the file and give --config again"
        ) from error


def help_text() -> str:
    """Returns the text of `--mode=help`: a table of every option with its default, unit and meaning.

    The common options come first. The other options follow by section.
    """
    lines = ["Common options:"]
    section = ""
    for name, field in sorted(fields(), key=lambda option: not option[1].metadata["common"]):
        head, meta = name.split(".")[0], field.metadata
        if head != section and not meta["common"]:
            section = head
            lines += ["", f"{section}: {sections(Config())[section].__doc__}"]
        unit = f" {meta['unit']}" if meta["unit"] else ""
        choices = f" [{'|'.join(meta['choices'])}]" if meta["choices"] else ""
        lines.append(f"  {name:30} {str(field.default) or '-':>10}{unit:14} {meta['help']}{choices}")
    return "\n".join(lines)

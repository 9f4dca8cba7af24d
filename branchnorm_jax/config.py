"""Builds a validated `Config` from a config file and a command line.

`default_config()` turns the options of `options.py` into the locked `ConfigDict` that the files under `configs/` return
and that command-line flags override; `from_config_dict()` turns the result into a typed, validated, frozen `Config`.
Code outside the command line uses `Config` and never a `ConfigDict`.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections

from branchnorm_jax import checks
from branchnorm_jax.errors import StorageError, UserError
from branchnorm_jax.files import json_checksum
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


def usual_alpha_steps(config: ml_collections.ConfigDict | Config, warmup_layers: int) -> int:
    """Returns T where it is not set: the warm-up W of the learning rate, as in BranchNorm's paper.

    If updates are scaled (`train.branch_update_power`) and the deeper stack has L > N layers, T = W (L / N)^(1/3).
    Without a warm-up T is the default of the option.

    Args:
      config: all options.
      warmup_layers: N of the method's recipe; 0 if T never depends on the depth.
    """
    model, train = config.model, config.train
    if not train.warmup_steps:
        return Config().model.alpha_steps
    if not warmup_layers or not train.branch_update_power:
        return int(train.warmup_steps)
    depth = max(model.encoder_layers, model.decoder_layers) / warmup_layers
    return round(train.warmup_steps * max(1.0, depth) ** (1 / 3))


def with_alpha_steps(config: ml_collections.ConfigDict, warmup_layers: int) -> ml_collections.ConfigDict:
    """Sets T to `usual_alpha_steps`, unless it is `assigned`."""
    if "model.alpha_steps" not in assigned(config):
        config.model.alpha_steps = usual_alpha_steps(config, warmup_layers)
    return config


def record_chosen(config: ml_collections.ConfigDict, given: set[str]) -> None:
    """Stores in `sweep.chosen` the options that recommended values, and the usual T, must not replace in a sweep.

    Args:
      config: all options.
      given: names of the options that the command line set; an earlier call of the same sweep recorded the others.
    """
    earlier = {*config.sweep.chosen.split(",")} - {""}
    # The saved options of a sweep do not say which of them it had set; those of a run, with a new grid, are all set.
    resumed = not isinstance(config.sweep, Section) and "sweep.grid" not in given
    new = given if earlier or resumed else assigned(config)
    config.sweep.chosen = ",".join(sorted(earlier | new))


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
    checks.check(config)
    return config


def _checked(name: str, field: dataclasses.Field[Any], value: Any) -> Any:
    kind = type(field.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"config: {name} must be {kind.__name__}, not {type(value).__name__} ({value!r})")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config: {name}={value} is not a finite number")
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"config: {name}={value!r} has a NUL character, which no name can have")
    meta = field.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(f"config: {name}={value!r} is not one of {', '.join(meta['choices'])}")
    if meta["minimum"] is not None and not value >= meta["minimum"]:
        raise UserError(f"config: {name}={value} is below its minimum {meta['minimum']}")
    if meta["maximum"] is not None and not value <= meta["maximum"]:
        maximum = int(meta["maximum"]) if isinstance(value, int) else meta["maximum"]
        raise UserError(f"config: {name}={value} is above its maximum {maximum}")
    return value


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


CHECKSUM = "checksum"
"""Name of the checksum in config.json, beside the sections."""


def to_json(config: Config) -> str:
    """Returns the content of `config.json`: the options by section, and their checksum."""
    by_name = {name: dataclasses.asdict(section) for name, section in sections(config).items()}
    return json.dumps(by_name | {CHECKSUM: json_checksum(by_name)}, indent=2) + "\n"


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
    """Reads a config that `to_json` wrote. Earlier versions wrote no checksum.

    Raises:
      UserError: if the file is missing, not a config, or changed since it was written.
      StorageError: if it may be intact but cannot be read.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file, so {path.parent} is no run") from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise _broken(path, error) from error
    if isinstance(values, dict) and "model_type" in values:
        raise UserError(f"{path}: this is a model of Hugging Face, not a run; make one of it with --mode=import")
    try:
        if not isinstance(values, dict) or not values.keys() >= {"model", "data", "train"}:
            raise ValueError("not the options of a run")
        checksum = values.pop(CHECKSUM, None)
        if checksum not in (None, json_checksum(values)):
            raise ValueError("its checksum differs, so it was damaged or edited; options belong on the command line")
        if wrong := [section for section, options in values.items() if not isinstance(options, dict)]:
            raise ValueError(f"{wrong[0]} is not a section with options")
        for (section, option, old), new in RENAMED.items():
            if values.get(section, {}).get(option) == old:
                values[section][option] = new
        for section, option in DROPPED:
            values.get(section, {}).pop(option, None)
        for (section, option), earlier in ADDED.items():
            values[section].setdefault(option, earlier)
        return from_config_dict(values)
    except (ValueError, UserError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> UserError:
    if path.name != "config.json":
        return UserError(
            f"{path}: not the config.json of a run ({error}); give --config=<file or name>, or that of a run"
        )
    what = f"{path}: cannot read the config of this workdir ({error})"
    return UserError(f"{what}; restore the file, or delete it and give --config again")


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

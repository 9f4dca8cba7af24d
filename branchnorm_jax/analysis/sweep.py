"""The runs of a sweep: a grid in one line of text, and the config of each run.

A grid consists of axes `name=value,value`, separated by spaces. Its runs are all combinations of their values. `|` adds
another grid:

    method=post_ln,branchnorm depth=6L-6L,18L-18L | method=branchnorm depth=50L-50L train.seed=0,1

`method` and `depth` are abbreviations, see `SETS`. The name of any other axis is the full name of an option.
"""

import dataclasses
import difflib
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from branchnorm_jax import config as configs
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.options import Config, SweepConfig, fields, parse_depth

Run = dict[str, str]
"""One point of a grid: axis -> value, as written."""

SETS = {"method": {"model.method"}, "depth": {"model.encoder_layers", "model.decoder_layers"}}
"""The options that the axes `method` and `depth` set; every other axis is the name of an option."""

AXES = {*SETS, *(name for name, _ in fields() if name.split(".")[0] in ("model", "data", "train", "decode"))}

TRUTH = {"true": True, "false": False}


def parse_grid(text: str, baseline: str = "") -> list[Run]:
    """Returns the runs of a grid in order, without duplicates.

    Raises:
      UserError: if the text is not a grid, or if the grid does not contain the baseline.
    """
    runs: list[Run] = []
    for part in text.split("|"):
        axes: dict[str, list[str]] = {}
        for word in part.split():
            name, equals, values = word.partition("=")
            if not equals or not all(values.split(",")):
                raise UserError(f"sweep.grid: {word!r} is not name=value,value")
            if name not in AXES:
                own = name.rpartition(".")[2]
                likely = [own, configs.nearest_name(name), *difflib.get_close_matches(name, AXES, 1)]
                hint = next((f"did you mean {each!r}?" for each in likely if each in AXES), "")
                axes_are = "axes are method, depth and the options of model, data, train and decode"
                raise UserError(f"sweep.grid: no axis {name!r}; {hint or axes_are}")
            for other in axes:
                if SETS.get(name, {name}) & SETS.get(other, {other}):
                    raise UserError(
                        f"sweep.grid: {other} and {name} set the same option; write {other}=value,value, or separate "
                        "two grids with |"
                    )
            axes[name] = values.split(",")
            if twice := [value for value, count in Counter(axes[name]).items() if count > 1]:
                raise UserError(f"sweep.grid: {word} has {twice[0]} twice; remove one of them")
        if not axes:
            where = f"; found none in {part.strip() or 'an empty part'!r} of {text!r}" if text.strip() else ""
            raise UserError(f"sweep.grid: give axes such as method=post_ln,branchnorm depth=6L-6L,18L-18L{where}")
        runs += [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    methods = dict.fromkeys(run["method"] for run in runs if "method" in run)
    for method in methods:
        get_recipe(method)
    if baseline and baseline not in methods:
        raise UserError(
            f"sweep.baseline: {baseline!r} is not among the grid's methods ({', '.join(methods) or 'none'})"
        )
    return [run for index, run in enumerate(runs) if run not in runs[:index]]


def name_of(run: Mapping[str, str], separator: str = "-") -> str:
    """Returns the name of a run: the values of its axes, with the option's name (not for method and depth)."""
    return separator.join(v if k in ("method", "depth") else f"{k.split('.')[-1]}={v}" for k, v in run.items())


def folder_of(run: Mapping[str, str]) -> str:
    """Returns the folder of a run: its name, shortened and with a hash if it is not a valid folder name."""
    name = name_of(run)
    plain = re.sub(r"[^\w.,+=-]", "_", name)[:100].lstrip(".")
    return name if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def axes_of(row: Mapping[str, Any]) -> Run:
    """Returns the axes of a row of the results, without the seed."""
    return {axis: value for axis, value in row.items() if axis in AXES and axis != "train.seed"}


def plan_runs(config: Config) -> dict[str, tuple[Run, Config]]:
    """Returns the runs of the config's grid by folder.

    Raises:
      UserError: if the grid or one of its runs is invalid.
    """
    if "test" not in config.evaluate.split_names:
        raise UserError(f"evaluate.splits={config.evaluate.splits}: a sweep compares test scores; add test")
    grid, columns = parse_grid(config.sweep.grid, config.sweep.baseline), config.sweep.column_names
    runs: dict[str, tuple[Run, Config]] = {}
    for run in grid:
        try:
            chosen = configure(config, run)
        except UserError as error:
            raise UserError(f"sweep.grid: {name_of(run)}: {error}") from error
        for other, (_, there) in runs.items():
            if chosen == there:
                raise UserError(f"sweep.grid: {name_of(run)} and {other} are the same run; remove one of them")
        if folder_of(run) in runs:
            raise UserError(f"sweep.grid: two runs have the name {name_of(run)}; move one of them to another sweep")
        runs[folder_of(run)] = run, chosen
    _check_spelling(grid)
    axes = dict.fromkeys(axis for run in grid for axis in run)
    unknown = set(columns) - {*axes, "depth"}
    if unknown:
        raise UserError(
            f"sweep.columns: the grid has no axis {', '.join(sorted(unknown))}; its axes are {', '.join(axes)}"
        )
    return runs


def _check_spelling(runs: Sequence[Run]) -> None:
    """Raises `UserError` if an axis has a value in two spellings, because the values of runs are compared as text."""
    spellings: dict[tuple[str, Any], str] = {}
    for axis, text in (pair for run in runs for pair in run.items()):
        if (first := spellings.setdefault((axis, _value(axis, text)), text)) != text:
            raise UserError(f"sweep.grid: {axis} has {first} and {text}, which are equal; write them in the same way")


def configure(config: Config, run: Run) -> Config:
    """Returns the config of one run. Raises `UserError` if a value is invalid."""
    options = configs.with_recommended(_options(config, run), recommended(config, run))
    options = configs.with_alpha_steps(options, get_recipe(options.model.method).warmup_layers)
    # The config of a run does not contain the grid, so a sweep with a longer grid keeps the finished runs.
    return dataclasses.replace(configs.from_config_dict(options), sweep=SweepConfig())


def recommended(config: Config, run: Run) -> dict[str, Any]:
    """Returns the recommended options of a run's method that are not assigned, "section.name" -> value.

    The result is empty if `sweep.recommended` is False.
    """
    options = _options(config, run)
    by_name = get_recipe(options.model.method).recommended if config.sweep.recommended else {}
    return {name: value for name, value in by_name.items() if name not in configs.assigned(options)}


def left_out(runs: Mapping[str, tuple[Run, Config]]) -> dict[str, dict[str, Any]]:
    """Returns the recommended options of each method that none of its runs sets, "section.name" -> value.

    An option counts as set if the grid names it, or if it differs from the project's default.
    """
    defaults, found = configs.to_flat(Config()), dict[str, dict[str, Any]]()
    for run, config in runs.values():
        method, values = config.model.method, configs.to_flat(config)
        wanted = found.get(method, get_recipe(method).recommended)
        found[method] = {
            name: value for name, value in wanted.items() if name not in run and values[name] == defaults[name] != value
        }
    return {method: options for method, options in found.items() if options}


def _options(config: Config, run: Run) -> ml_collections.ConfigDict:
    """Returns the sweep's options with the values of a run; options set by user or grid count as assigned."""
    options = configs.default_config()
    given, defaults, chosen = configs.to_flat(config), configs.to_flat(Config()), config.sweep.chosen.split(",")
    for full, value in given.items():
        section, name = full.split(".")
        # The section `import_` has another name there, and no effect.
        if (value != defaults[full] or full in chosen) and section in options:
            options[section][name] = value
    for axis, text in run.items():
        if axis == "depth":
            configs.set_depth(options, text)
            continue
        section, name = ("model", "method") if axis == "method" else axis.split(".")
        options[section][name] = _value(axis, text)
    return configs.with_one_length(options, {*run})


def _value(axis: str, text: str) -> Any:
    """Returns the value of an axis as its option has it; for `depth`, both depths, or None if the text is no depth.

    Raises:
      UserError: if the text is no value of the option's type.
    """
    if axis == "depth":
        return parse_depth(text)
    kind = type(configs.to_flat(Config())["model.method" if axis == "method" else axis])
    try:
        return TRUTH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError) as error:
        raise UserError(f"{axis}={text}: expected {kind.__name__}") from error

"""Filters of OpusFilter (the extra [clean]), listed in a YAML file as OpusFilter's own configurations list them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from branchnorm_jax.data.formats import Pair
from branchnorm_jax.errors import UserError, needs_extra
from branchnorm_jax.options import DataConfig

CHUNK = 100_000
"""Pairs that a filter reads at once, as in OpusFilter: WordAlignFilter aligns them together."""


class Filter(NamedTuple):
    """A filter with its name, such as LengthRatioFilter or, if there are two of them, LengthRatioFilter.1."""

    name: str
    filter: Any


def load_filters(name: str, data: DataConfig) -> list[Filter]:
    """Loads the filters of a YAML file.

    Args:
      name: path of the file. It contains a list of filters, or an OpusFilter configuration, of which only the filters
        are used. Files that it names are below its folder.
      data: its languages replace {source_lang} and {target_lang}.

    Raises:
      UserError: if the file, a filter or a parameter is invalid, or OpusFilter is not installed.
    """
    option = f"clean.filters={name}"
    with needs_extra("clean", option):
        from opusfilter.pipeline import FilterPipeline
    path = Path(name).expanduser()
    pipeline = FilterPipeline()
    for number, one in enumerate(_entries(path, option, data), start=1):
        kind = next((key for key in one if key != "module"), "") if isinstance(one, dict) else ""
        where = f"{option}: filter {number}, {kind or one}"
        try:
            pipeline.filters += FilterPipeline.from_config([{**one, kind: one[kind] or {}}], str(path.parent)).filters
        except Exception as error:  # Each filter has its own mistakes, and calls packages of its own.
            raise UserError(f"{where}: {' '.join(str(error).split())}") from error
        if unknown := pipeline.filters[-1].kwargs:
            raise UserError(f"{where}: has no parameter {next(iter(unknown))!r}")
    names = map(".".join, pipeline.get_score_tuples())
    return [Filter(*one) for one in zip(names, pipeline.filters, strict=True)]


def rejections(filters: Sequence[Filter], pairs: Sequence[Pair]) -> list[str]:
    """Returns for each pair the name of the first filter that rejects it, or "".

    Raises:
      UserError: if a filter fails.
    """
    names, left = [""] * len(pairs), list(range(len(pairs)))
    for one in filters:
        try:
            accepted = list(one.filter.decisions([pairs[index] for index in left])) if left else []
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{one.name} failed: {' '.join(str(error).split())}") from error
        for index, good in zip(left, accepted, strict=True):
            names[index] = "" if good else one.name
        left = [index for index in left if not names[index]]
    return names


def _entries(path: Path, option: str, data: DataConfig) -> list[Any]:
    """Returns the entries of a file of filters."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    for field, language in (("{source_lang}", data.source_lang), ("{target_lang}", data.target_lang)):
        text = text.replace(field, language)
    try:
        content = yaml.safe_load(text)
        if isinstance(content, dict):
            steps = [step for step in content["steps"] if step["type"] == "filter"]
            if any(step["parameters"].get("filterfalse") for step in steps):
                raise UserError(f"{option}: a step has filterfalse, which keeps the rejected pairs; remove that step")
            content = [one for step in steps for one in step["parameters"]["filters"]]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{option}: not OpusFilter's YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, list) or not content:
        raise UserError(f"{option}: contains no list of filters such as `- LengthRatioFilter: {{threshold: 3}}`")
    return content

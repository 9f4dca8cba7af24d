"""Text files as a corpus: which files a split consists of, and their sentence pairs."""

import glob
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from upath import UPath

from branchnorm_jax.bucket import is_url, open_url
from branchnorm_jax.data.formats import FORMATS, Pair, format_of, pairs_in
from branchnorm_jax.data.lines import COMPRESSED, text_lines
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig

_NAMES_SHOWN = 8
_WILDCARD = re.compile(r"(\*\*/?|\*|\?|\[!?.[^]]*\])")


def pairs(config: DataConfig, split: str) -> Iterator[Pair]:
    """Streams the sentence pairs of a split; see `corpus.read_pairs`.

    Args:
      config: specifies the files and the languages.
      split: name of the split in the names of the files.
    """
    files, languages = _files(config, split), (config.source_lang, config.target_lang)
    empty = True
    for paths in files:
        for pair in pairs_in(paths[0], languages) if len(paths) == 1 else _parallel(*paths):
            empty = False
            yield pair
    if empty:
        raise UserError(
            f"{' and '.join(str(path) for paths in files for path in paths)}: the corpus is empty; "
            f"the files must contain at least one line"
        )


def version(config: DataConfig, split: str) -> dict[str, Any]:
    """Returns values that change when the text of a split changes; see `corpus.corpus_key`."""
    return {"files": [file_version(path) for paths in _files(config, split) for path in paths]}


def files_of(config: DataConfig, split: str) -> list[Path | UPath]:
    """Returns the files of a split that match `data.files`, which has no {lang}, in reading order."""
    if not config.path:
        raise UserError(f"config: data.source={config.source} needs data.path, the folder of the text files")
    pattern = config.files.replace("{split}", split)
    return [path for _, path in sorted(_matching_files(_folder(config.path), pattern, "").items())]


def _parallel(*paths: Path | UPath) -> Iterator[Pair]:
    """Yields the pairs of two files that are parallel, line by line."""
    sides = [map(str.strip, text_lines(path)) for path in paths]
    for number, (source, target) in enumerate(itertools.zip_longest(*sides)):
        if source is None or target is None:
            longer = int(source is None)
            counts = [number, number]
            counts[longer] += 1 + sum(1 for _ in sides[longer])
            raise UserError(
                f"{paths[0]} has {counts[0]:,} lines but {paths[1]} has {counts[1]:,}; "
                f"the files must be parallel, line by line"
            )
        yield source, target


def file_version(path: Path | UPath) -> list[str | int]:
    """Returns values that change when a text file changes."""
    if isinstance(path, Path):
        stat = path.stat()
        return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    info = path.fs.info(path.path)
    version = info.get("generation") or info.get("ETag") or path.fs.ukey(path.path)
    return [str(path), info["size"], str(version)]


def _files(config: DataConfig, split: str) -> list[tuple[Path | UPath, ...]]:
    """Returns the (source, target) files of a split, or the files that contain both sides, in reading order."""
    if not config.path:
        raise UserError("config: data.source=text needs data.path, the folder of the text files")
    named = config.files.replace("{split}", split)
    apart = "{lang}" in named
    if "{split}" not in config.files or not (apart or format_of(named)):
        raise UserError(
            f"config: data.files={config.files!r}, here {named!r}, must contain {{split}} and {{lang}}; without "
            f"{{lang}}, a file contains both sides, and its name ends in one of {', '.join(FORMATS)}"
        )
    if not split:
        raise UserError("config: the split has no name; set data.valid_split or data.test_split")
    folder = _folder(config.path)
    patterns = [named.replace("{pair}", pair) for pair in config.either_pair]
    languages = config.source_lang, config.target_lang
    pattern = next((p for p in patterns if _glob_files(folder, p, languages[0])), patterns[0])
    if not apart:
        return [(path,) for _, path in sorted(_matching_files(folder, pattern, "").items())]
    sources, targets = (_matching_files(folder, pattern, lang) for lang in languages)
    if alone := sorted(sources.keys() ^ targets.keys()):
        partner = str(alone[0]).replace("{lang}", languages[alone[0] in sources])
        raise UserError(
            f"{(sources | targets)[alone[0]]}: the counterpart {partner} is missing from {folder}; add it, or change "
            f"data.files={config.files} so that it matches neither file"
        )
    return [(sources[key], targets[key]) for key in sorted(sources)]


def _folder(name: str) -> Path | UPath:
    """Returns the folder `data.path`: a path, or a URL of any scheme that fsspec can read."""
    folder: Path | UPath = Path(name).expanduser()
    if is_url(name):
        open_url(name)
        folder = UPath(name)
    try:
        if folder.is_dir():
            return folder
    except Exception as error:  # The libraries of buckets have no common class of exceptions.
        raise UserError(f"data.path={name}: cannot be read ({error})") from error
    if folder.exists():
        raise UserError(
            f"data.path={name}: this is a file; give its folder, and the names of its files as data.files, unless they "
            "are called as its default says"
        )
    where = "" if is_url(name) or folder.is_absolute() else f" in {Path.cwd()}"
    raise UserError(f"data.path={name}: no such folder{where}")


def _glob_files(folder: Path | UPath, pattern: str, lang: str) -> dict[Path, Path | UPath]:
    """Finds the files of a language that match the glob, as {key: path}.

    Files may be plain or compressed. The key of a file is its path below the folder, without the compression suffix and
    with the language replaced by {lang}, so the files of both languages have the same keys in the same order. Sorting
    by file name would not pair them: train.de comes before train.x.de, but train.x.en before train.en. If a file exists
    both plain and compressed, the plain one is used.
    """
    name_pattern = re.compile(re.escape(lang).join(f"({_matcher(part)})" for part in pattern.split("{lang}")))
    paths: dict[Path, Path | UPath] = {}
    for suffix in ("", *COMPRESSED):
        suffixed = pattern.replace("{lang}", glob.escape(lang)) + suffix
        if isinstance(folder, Path):
            names = glob.glob(suffixed, root_dir=folder, recursive=True)
        else:
            names = [path.relative_to(folder).as_posix() for path in folder.glob(suffixed)]
        for name in sorted(names):
            path, match = folder / name, name_pattern.fullmatch(name.removesuffix(suffix))
            if path.is_file() and match:
                key = Path("{lang}".join(match.groups()))
                paths.setdefault(key.with_suffix("") if key.suffix in COMPRESSED else key, path)
    return paths


def _matcher(pattern: str) -> str:
    """Returns a regular expression that matches at least what the glob matches."""
    wildcards = {"*": "[^/]*", "**": "(?s:.*)", "**/": "(?s:.*)"}
    parts = enumerate(_WILDCARD.split(pattern))  # every other one is a wildcard
    return "".join(wildcards.get(part, "[^/]") if index % 2 else re.escape(part) for index, part in parts)


def _matching_files(folder: Path | UPath, pattern: str, lang: str) -> dict[Path, Path | UPath]:
    """Like `_glob_files`, but raises `UserError` if no file matches."""
    paths = _glob_files(folder, pattern, lang)
    if not paths:
        try:
            names = sorted(path.name for path in folder.iterdir())
        except OSError as error:
            raise UserError(f"{folder}: cannot be read ({error.strerror})") from error
        names_shown = ", ".join(names[:_NAMES_SHOWN]) or "nothing"
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        wanted = f"{pattern.replace('{lang}', lang)} (or with {', '.join(COMPRESSED)})"
        raise UserError(
            f"{folder}: no file matches {wanted}; the folder contains {names_shown}{more}; change data.files "
            "or the names of the splits (data.train_split ...)"
        )
    return paths

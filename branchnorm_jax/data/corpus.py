"""Sources of parallel text: the built-in numerals corpus, text files, and TFDS data sets."""

import bz2
import difflib
import glob
import gzip
import hashlib
import importlib.metadata
import itertools
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from upath import UPath

from branchnorm_jax.bucket import is_url, open_url
from branchnorm_jax.data import numerals
from branchnorm_jax.errors import UserError, needs_extra
from branchnorm_jax.options import DataConfig

Pair = tuple[str, str]

_HELD_OUT_NUMERALS = 500
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_CHUNK_BYTES = 1 << 20
_NAMES_SHOWN = 8
_WILDCARD = re.compile(r"(\*\*/?|\*|\?|\[!?.[^]]*\])")


def read_pairs(config: DataConfig, split: str) -> Iterator[Pair]:
    """Streams the (source, target) sentence pairs of a split in a fixed order.

    Surrounding white space is stripped. Empty sentences are kept, so the position of a pair is its line number.

    Args:
      config: specifies the source and the languages.
      split: "train", "valid" or "test"; `config.<split>_split` is the name of the split in the source.

    Raises:
      UserError: during iteration, if the text is missing, unreadable, not UTF-8, not parallel or empty.
    """
    return {"numerals": _numerals_pairs, "text": _text_pairs, "tfds": _tfds_pairs}[config.source](config, split)


def text_lines(path: Path | UPath) -> Iterator[str]:
    """Yields the lines of a plain or compressed text file.

    Only a line feed ends a line; other line separators such as U+2028 are part of the line. A byte-order mark at the
    start of the file and carriage returns at the end of a line are removed.

    Raises:
      UserError: during iteration, if the file cannot be read or a line is not UTF-8.
    """
    number = 0
    try:
        for raw in _split_lines(_chunks(path)):
            number += 1
            line = raw.decode("utf-8")
            yield (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: not valid UTF-8 (byte 0x{error.object[error.start]:02x} at position "
            f"{error.start}); convert the file to UTF-8"
        ) from error
    except Exception as error:
        # The libraries of buckets have no common class of exceptions.
        if isinstance(path, Path) and not isinstance(error, OSError | EOFError | zlib.error | lzma.LZMAError):
            raise
        reason = getattr(error, "strerror", None) or error
        where = f" beyond line {number}" if number else ""
        raise UserError(f"{path}: cannot be read{where} ({reason})") from error


def corpus_key(config: DataConfig, split: str) -> dict[str, Any]:
    """Returns a cache key, of JSON values, that changes when the corpus changes.

    The text itself is not read. Text files are identified by resolved path, size and modification time; files at
    URLs by URL, size and version (generation or ETag); numerals by parameters, generator code and library versions;
    TFDS data sets by full name with version, folder and size.

    Raises:
      UserError: if the text is missing.
    """
    key: dict[str, Any] = {"source": config.source, "languages": [config.source_lang, config.target_lang]}
    if config.source == "numerals":
        module = Path(numerals.__file__)
        code = module.read_bytes() + module.with_suffix(".toml").read_bytes()
        return key | {
            "split": split,
            "pairs": _numerals_count(config, split),
            "generator": hashlib.sha256(code).hexdigest(),
            "versions": [importlib.metadata.version(name) for name in ("num2words", "babel")],
        }
    if config.source == "text":
        return key | {"files": [_version(path) for files in _text_files(config, split) for path in files]}
    builder, name = _tfds_split(config, split)
    return key | {
        "split": name,
        "builder": builder.info.full_name,
        "folder": str(builder.data_path),
        "size": [builder.info.splits.total_num_examples, int(builder.info.dataset_size)],
    }


def _split_name(config: DataConfig, split: str) -> str:
    return {"train": config.train_split, "valid": config.valid_split, "test": config.test_split}[split]


def _reversed(config: DataConfig) -> str:
    """Returns the pair in reverse order (de-en for en-de).

    A data set may be named either way.
    """
    return f"{config.target_lang}-{config.source_lang}"


# Numerals.


def _numerals_count(config: DataConfig, split: str) -> int:
    return config.numerals_pairs if split == "train" else _HELD_OUT_NUMERALS


def _numerals_pairs(config: DataConfig, split: str) -> Iterator[Pair]:
    return numerals.pairs(split, config.source_lang, config.target_lang, _numerals_count(config, split))


# Text files.


def _text_pairs(config: DataConfig, split: str) -> Iterator[Pair]:
    files = _text_files(config, split)
    empty = True
    for paths in files:
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
            empty = False
            yield source, target
    if empty:
        raise UserError(
            f"{' and '.join(str(path) for paths in files for path in paths)}: the corpus is empty; "
            f"the files must contain at least one line"
        )


def _version(path: Path | UPath) -> list[str | int]:
    """Returns values that change when a text file changes."""
    if isinstance(path, Path):
        stat = path.stat()
        return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    info = path.fs.info(path.path)
    version = info.get("generation") or info.get("ETag") or path.fs.ukey(path.path)
    return [str(path), info["size"], str(version)]


def _text_files(config: DataConfig, split: str) -> list[tuple[Path | UPath, Path | UPath]]:
    """Returns the (source, target) files of a split in reading order."""
    if not config.path:
        raise UserError("config: data.source=text needs data.path, the folder of the text files")
    if "{lang}" not in config.files or "{split}" not in config.files:
        raise UserError(f"config: data.files={config.files!r} must contain {{split}} and {{lang}}")
    folder = _folder(config.path)
    patterns = [
        config.files.replace("{split}", _split_name(config, split)).replace("{pair}", pair)
        for pair in (config.pair, _reversed(config))
    ]
    languages = config.source_lang, config.target_lang
    pattern = next((p for p in patterns if _glob_files(folder, p, languages[0])), patterns[0])
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
            f"data.path={name}: this is a file; give its folder, and, unless the files are called train.en, valid.en "
            "and so on, their names as data.files"
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
    for suffix in ("", *_COMPRESSED):
        suffixed = pattern.replace("{lang}", glob.escape(lang)) + suffix
        if isinstance(folder, Path):
            names = glob.glob(suffixed, root_dir=folder, recursive=True)
        else:
            names = [path.relative_to(folder).as_posix() for path in folder.glob(suffixed)]
        for name in sorted(names):
            path, match = folder / name, name_pattern.fullmatch(name.removesuffix(suffix))
            if path.is_file() and match:
                key = Path("{lang}".join(match.groups()))
                paths.setdefault(key.with_suffix("") if key.suffix in _COMPRESSED else key, path)
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
        wanted = f"{pattern.replace('{lang}', lang)} (or with {', '.join(_COMPRESSED)})"
        raise UserError(
            f"{folder}: no file matches {wanted}; the folder contains {names_shown}{more}; change data.files"
        )
    return paths


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []  # of the current, incomplete line
    for chunk in chunks:
        head, newline, tail = chunk.rpartition(b"\n")
        if newline:
            yield from b"".join([*parts, head]).split(b"\n")
            parts = []
        parts.append(tail)
    if last := b"".join(parts):
        yield last


def _chunks(path: Path | UPath) -> Iterator[bytes]:
    """Yields the decompressed content of a file in chunks."""
    with path.open("rb") as raw:
        if path.suffix == ".zst":
            yield from _zstandard_chunks(raw)
            return
        openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
        file = openers[path.suffix](raw) if path.suffix in openers else raw
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _zstandard_chunks(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the decompressed content of a zstandard file, frame by frame.

    zstandard's own file object does not detect truncated files.
    """
    import zstandard

    def new_frame() -> Any:
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    frame = new_frame()
    while data := file.read(_CHUNK_BYTES):
        while data:
            if frame.eof:
                frame = new_frame()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            data = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("the compressed file is truncated")


# TFDS data sets are read through array_record, which does not need tensorflow.


def _tfds_pairs(config: DataConfig, split: str) -> Iterator[Pair]:
    builder, name = _tfds_split(config, split)
    read = _tfds_reader(builder, config)
    for number, example in enumerate(builder.as_data_source(split=name)):
        try:
            yield read(example)
        except UnicodeDecodeError as error:
            raise UserError(f"{builder.info.full_name}, {name}, example {number}: not valid UTF-8") from error


def _tfds_split(config: DataConfig, split: str) -> tuple[Any, str]:
    """Returns the builder, prepared as array_record, and the name of the split in it.

    The builder is the one named by `data.path`, unless the split names another builder, as in
    wmt14_translate/de-en:test.
    """
    folder, path, name = os.path.expanduser(config.tfds_dir) or None, config.path, _split_name(config, split)
    if "/" in name:
        path, _, name = name.partition(":")
        if not name:
            raise UserError(f"config: the split {path!r} names a data set but no split; write for example {path}:test")
    try:
        builder = _tfds_named(path.replace("{pair}", config.pair), folder)
    except UserError:
        if "{pair}" not in path:
            raise
        builder = _tfds_named(path.replace("{pair}", _reversed(config)), folder)
    file_format = builder.info.file_format.value if builder.is_prepared() else ""
    if file_format != "array_record":
        place = f", data_dir={folder!r}" if folder else ""
        name = builder.info.full_name.rpartition("/")[0]
        code = (
            f"import tensorflow_datasets as tfds, tensorflow_datasets.translate; "
            f"tfds.builder({name!r}{place}, file_format='array_record').download_and_prepare()"
        )
        fault = (
            f"is prepared as {file_format}, which needs tensorflow; remove it and"
            if file_format
            else "is not prepared;"
        )
        raise UserError(f'{builder.info.full_name} {fault} run: python -c "{code}"')
    try:
        empty = not builder.info.splits[name].num_examples
    except (KeyError, ValueError):
        empty = True
    if empty:
        splits = ", ".join(builder.info.splits)
        raise UserError(f"{builder.info.full_name}: no examples in split {name!r}; splits are {splits}")
    return builder, name


def _tfds_named(name: str, folder: str | None) -> Any:
    """Returns the builder with this name, whether prepared or not."""
    with needs_extra("tfds", "data.source=tfds"):
        import tensorflow_datasets as tfds
        import tensorflow_datasets.translate  # registers the WMT builders, a plain import does not
    try:
        return tfds.builder(name, data_dir=folder)
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        close = difflib.get_close_matches(name.split("/")[0], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"data.path={name}: TFDS has no such data set{hint}") from error
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UserError(f"data.path={name}: {' '.join(str(error).split())[:400]}") from error


def _tfds_reader(builder: Any, config: DataConfig) -> Callable[[Mapping[str, Any]], Pair]:
    """Returns a function that extracts the sentence pair from an example."""
    import tensorflow_datasets as tfds

    languages = (config.source_lang, config.target_lang)
    features = builder.info.features if isinstance(builder.info.features, tfds.features.FeaturesDict) else {}
    if set(languages) <= set(features):
        return lambda example: (_text(example[languages[0]]), _text(example[languages[1]]))

    for key, feature in features.items():
        if isinstance(feature, tfds.features.TranslationVariableLanguages) and set(languages) <= set(feature.languages):
            return lambda example: _choose(example[key], languages)

    # For keys such as src and dst, only the config's name ("en-fr", "en_to_fr") tells the languages.
    keys = builder.info.supervised_keys or ()
    named = re.split("-|_to_", builder.builder_config.name) if builder.builder_config else []
    if sorted(named) == sorted(languages) and len(keys) == 2 and set(keys) <= set(features):
        key_of = dict(zip(named, keys, strict=True))
        return lambda example: (_text(example[key_of[languages[0]]]), _text(example[key_of[languages[1]]]))

    names = ", ".join(features) or "no text"
    raise UserError(
        f"{builder.info.full_name} has no pair {'-'.join(languages)}; its features are {names}; "
        f"change data.source_lang and data.target_lang"
    )


def _choose(translations: Mapping[str, Any], languages: tuple[str, str]) -> Pair:
    """Selects two languages from a multilingual example; a missing language gives ""."""
    texts = dict(zip(map(_text, translations["language"]), map(_text, translations["translation"]), strict=False))
    return texts.get(languages[0], ""), texts.get(languages[1], "")


def _text(value: bytes | str) -> str:
    """Converts a TFDS value to stripped text.

    Values are bytes or str, depending on the data set.
    """
    return (value.decode("utf-8") if isinstance(value, bytes) else str(value)).strip()

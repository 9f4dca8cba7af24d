"""Plain text for language models: which documents a split consists of.

Text is kept byte for byte, except for a byte-order mark at the start of a file, and the ends of lines that are
documents.
"""

import codecs
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from upath import UPath

from branchnorm_jax.data.lines import COMPRESSED, decompressed, sized_lines, unique_names
from branchnorm_jax.data.textfiles import file_version, files_of
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig

Part = tuple[str, bool]
"""A part of a document, and whether the document ends with it."""

SHARES = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}
"""Where each split of an undivided text begins and ends: the division of enwik8 and text8."""

_LONGEST = 1 << 20
"""Maximum number of characters of a part."""

_CONTINUATION = bytes(range(0x80, 0xC0))
"""The bytes of UTF-8 that do not begin a character."""


def read_documents(config: DataConfig, split: str) -> Iterator[Part]:
    """Streams the documents of a split in a fixed order, in parts of at most a line.

    A document is a file, or a line without its line feed (`data.document`). In a file whose name ends in .jsonl it is
    the field "text" of a line. Empty documents are left out. Without {split} in `data.files`, the first 90 % of all
    bytes are for training, the next 5 % for validation and the last 5 % the test set. A character or a line at a border
    belongs to the split in which it begins.

    Args:
      config: specifies the files.
      split: "train", "valid" or "test"; `config.<split>_split` is its name in the names of the files.

    Raises:
      UserError: during iteration, if the text is missing, unreadable, not UTF-8 or empty.
    """
    files, empty, before = files_of(config, _name(config, split)), True, 0
    first, last, sizes = 0, None, [0] * len(files)
    if shares := _shares(config, split):
        sizes = [_size(path) for path in files]
        first, last = (int(share * sum(sizes)) for share in shares)
    for path, size in zip(files, sizes, strict=True):
        shifted = max(0, first - before), None if last is None else last - before
        if config.document == "line" or _plain_suffix(path) == ".jsonl":
            parts = _lines(path, *shifted)
        else:
            parts = _whole(path, *shifted)
        for part in parts:
            empty = False
            yield part
        before += size
    if empty:
        hint = "the files must contain some text"
        if shares:
            hint = "data.files has no {split}, so the text is divided 90:5:5 and needs more documents or bytes"
        raise UserError(f"{some_files(files)}: the {split} split is empty; {hint}")


def divided(config: DataConfig, split: str) -> str:
    """Returns a line that says which part of an undivided text a split is; "" if the split has files of its own."""
    if not (shares := _shares(config, split)):
        return ""
    return f"{split}: the bytes from {shares[0]:.0%} to {shares[1]:.0%} of {config.files}, which has no {{split}}"


def version(config: DataConfig, split: str) -> dict[str, Any]:
    """Returns values that change when the text of a split changes; see `corpus.corpus_key`."""
    files = [file_version(path) for path in files_of(config, _name(config, split))]
    return {"files": files, "documents": [split, config.document, *_shares(config, split)]}


def some_files(files: Sequence[Path | UPath]) -> str:
    """Names the files in a message."""
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"


def _shares(config: DataConfig, split: str) -> tuple[float, ...]:
    """Returns where a split begins and ends in the undivided text; () if the split has files of its own."""
    return () if "{split}" in config.files else SHARES[split]


def _name(config: DataConfig, split: str) -> str:
    return str(getattr(config, f"{split}_split"))


def _plain_suffix(path: Path | UPath) -> str:
    name = Path(path.name)
    return name.with_suffix("").suffix if name.suffix in COMPRESSED else name.suffix


def _size(path: Path | UPath) -> int:
    """Returns the number of bytes of a file, uncompressed."""
    if isinstance(path, Path) and path.suffix not in COMPRESSED:
        return path.stat().st_size
    return sum(map(len, decompressed(path)))


def _lines(path: Path | UPath, first: int, last: int | None) -> Iterator[Part]:
    """Yields the lines that begin in a range of bytes, one document each."""
    position, as_json = 0, _plain_suffix(path) == ".jsonl"
    for number, (line, size) in enumerate(sized_lines(path), start=1):
        begins, position = position, position + size
        if begins < first or not (line.strip() if as_json else line):
            continue
        if last is not None and begins >= last:
            return
        text = _field(path, number, line) if as_json else line
        yield from _document(_divided([text]))


def _field(path: Path | UPath, number: int, line: str) -> str:
    """Returns the field "text" of a line of JSON."""
    try:
        text = json.loads(line, object_pairs_hook=unique_names)["text"]
        text.encode()  # JSON can have half of a character, such as "\\ud800".
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f": {error}" if isinstance(error, ValueError) else ""
        what = f'not a JSON object with a text, such as {{"text": "..."}}{reason}'
        raise UserError(f"{path}, line {number}: {what}") from error
    return text


def _whole(path: Path | UPath, first: int, last: int | None) -> Iterator[Part]:
    """Yields a file, or a range of its bytes, line by line."""
    return _document(_divided(_decoded(path, _between(decompressed(path), first, last), first)))


def _divided(texts: Iterable[str]) -> Iterator[str]:
    """Divides consecutive texts into lines with their line feeds, and longer lines anywhere."""
    ahead = ""
    for text in texts:
        *lines, ahead = (ahead + text).split("\n")
        for line in (*(f"{line}\n" for line in lines), *([ahead] if len(ahead) > _LONGEST else [])):
            yield from (line[start : start + _LONGEST] for start in range(0, len(line), _LONGEST))
        ahead = "" if len(ahead) > _LONGEST else ahead
    if ahead:
        yield ahead


def _document(texts: Iterable[str]) -> Iterator[Part]:
    """Marks the last part of a document."""
    before = ""
    for text in texts:
        if before:
            yield before, False
        before = text
    if before:
        yield before, True


def _decoded(path: Path | UPath, parts: Iterable[bytes], position: int) -> Iterator[str]:
    """Decodes the bytes of a file from `position` on."""
    decoder = codecs.getincrementaldecoder("utf-8" if position else "utf-8-sig")()
    try:
        for part in parts:
            if text := decoder.decode(part):
                yield text
            position += len(part)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: not valid UTF-8 near byte {position + error.start:,}; convert the file to UTF-8"
        ) from error


def _between(parts: Iterable[bytes], first: int, last: int | None) -> Iterator[bytes]:
    """Yields the bytes of the characters that begin in a range."""
    position, started = 0, first <= 0
    for part in parts:
        begin, position = position, position + len(part)
        own = part[max(0, first - begin) : None if last is None else max(0, last - begin)]
        if not started:
            own = own.lstrip(_CONTINUATION)
            started = bool(own)
        yield own
        if last is not None and position > last:
            rest = part[max(0, last - begin) :]
            more = rest.lstrip(_CONTINUATION)
            yield rest[: len(rest) - len(more)] if started else b""
            if more:
                return

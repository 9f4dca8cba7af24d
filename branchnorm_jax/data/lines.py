"""Lines of plain and compressed text files."""

import bz2
import contextlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from upath import UPath

from branchnorm_jax.errors import UserError

_CHUNK_BYTES = 1 << 20

_COMPRESSED_BYTES = 1 << 12
"""Bytes that are decompressed at a time: at most 128 MB of text from Zstandard, which has no limit of its own."""


@contextlib.contextmanager
def readable(path: Path | UPath, where: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Turns an error while a file is read into a `UserError`.

    Args:
      path: the file.
      where: returns how far it was read, for the message.
    """
    try:
        yield
    except (UserError, UnicodeDecodeError):
        raise
    except Exception as error:
        # The libraries of buckets have no common class of exceptions.
        if isinstance(path, Path) and not isinstance(error, OSError | EOFError | zlib.error | lzma.LZMAError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read{where()} ({reason})") from error


def text_lines(path: Path | UPath) -> Iterator[str]:
    """Yields the lines of a plain or compressed text file.

    Only a line feed ends a line; other line separators such as U+2028 are part of the line. A byte-order mark at the
    start of the file and carriage returns at the end of a line are removed.

    Raises:
      UserError: during iteration, if the file cannot be read or a line is not UTF-8.
    """
    return (line for line, _ in sized_lines(path))


def sized_lines(path: Path | UPath) -> Iterator[tuple[str, int]]:
    """Yields the lines of `text_lines`, each with its number of bytes in the file, line feed included."""
    number = 0
    try:
        with readable(path, lambda: f" beyond line {number}" if number else ""):
            for raw in _split_lines(chunks(path)):
                number += 1
                line = raw.decode("utf-8")
                yield (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r"), len(raw) + 1
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}, line {number}: not valid UTF-8 (byte 0x{error.object[error.start]:02x} at position "
            f"{error.start}); convert the file to UTF-8"
        ) from error


class RepeatedNameError(ValueError):
    """A JSON object has two fields of the same name."""


def unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object. Raises `RepeatedNameError` for a name that occurs twice: one of its values would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, _ in pairs if sum(other == name for other, _ in pairs) > 1)
        raise RepeatedNameError(f"two fields are called {twice[:40]!r}")
    return made


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


def chunks(path: Path | UPath) -> Iterator[bytes]:
    """Yields the decompressed content of a file in chunks of at most 1 MiB, or 128 MiB of Zstandard's.

    Raises:
      UserError: if a local file changed while it was read.
    """
    with path.open("rb") as raw, unchanged(raw, str(path)):
        yield from _frames(raw, path.suffix) if path.suffix in COMPRESSED else iter(lambda: raw.read(_CHUNK_BYTES), b"")


def decompressed(path: Path | UPath) -> Iterator[bytes]:
    """Yields the chunks of a file. Raises `UserError` during iteration if it cannot be read."""
    with readable(path):
        yield from chunks(path)


@contextlib.contextmanager
def unchanged(file: IO[bytes], name: str) -> Iterator[None]:
    """Raises `UserError` if a local file changes inside the context: what was read of it is from two versions."""

    def version() -> tuple[int, int]:
        try:
            stat = os.fstat(file.fileno())
        except (AttributeError, OSError):  # a file in a bucket
            return 0, 0
        return stat.st_size, stat.st_mtime_ns

    before = version()
    yield
    if version() != before:
        raise UserError(f"{name}: the file changed while it was read; start again when it is complete")


def _frames(raw: IO[bytes], suffix: str) -> Iterator[bytes]:
    """Yields the content of a file that consists of compressed frames, one after the other.

    The file objects of bz2, lzma and zstandard each ignore some kinds of damage at the end or between frames.

    Raises:
      OSError: if a frame is damaged or incomplete.
    """
    frame = _DECOMPRESSORS[suffix]()
    while data := raw.read(_COMPRESSED_BYTES):
        while data:
            if frame.eof:
                data = data.lstrip(b"\0")  # padding
                frame = _DECOMPRESSORS[suffix]() if data else frame
                continue
            yield from _parts(frame, data, () if suffix == ".zst" else (_CHUNK_BYTES,))
            data = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise OSError("the compressed file is truncated")


def _parts(frame: Any, data: bytes, most: tuple[int, ...]) -> Iterator[bytes]:
    """Yields what a decompressor makes of some bytes, of at most `most` bytes each."""
    try:
        while part := frame.decompress(data, *most):
            yield part
            if frame.eof:
                return
            data = getattr(frame, "unconsumed_tail", b"")
    except Exception as error:  # The libraries have no common class of exceptions.
        raise OSError(str(error)) from error


def _zstandard() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    ".zst": _zstandard,
    ".xz": lzma.LZMADecompressor,
    ".bz2": bz2.BZ2Decompressor,
}
"""Suffix -> function that makes the decompressor of a frame."""

COMPRESSED = tuple(_DECOMPRESSORS)
"""Suffixes of compressed files."""

"""Lines of plain and compressed text files."""

import bz2
import contextlib
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from upath import UPath

from branchnorm_jax.errors import UserError

COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
"""Suffixes of compressed files."""

_CHUNK_BYTES = 1 << 20


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

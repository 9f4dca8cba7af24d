"""Checksums of the compiled programs that JAX stores. JAX executes a stored program even if its file is damaged."""

import contextlib
import json
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from branchnorm_jax.errors import StorageError, some
from branchnorm_jax.files import write_atomically

SUMS = "checksums.json"

YOUNG = 60.0
"""Age in seconds of a file that another process may still be writing: JAX does not write it atomically."""

ZSTD = b"\x28\xb5\x2f\xfd"
"""The first bytes of a file that is compressed with zstandard. Without that package, JAX uses zlib."""


def usable(folder: Path, say: Callable[[str], None]) -> bool:
    """Deletes the programs of a folder that have changed since they were recorded, and says so; records new ones.

    The folder need not exist, nor be writable. A new program is trusted if its file is complete.

    Returns:
      Whether no damaged program is left.
    """
    sums, damaged = known(folder), list[str]()
    for path in programs(folder):
        with contextlib.suppress(OSError):  # JAX compiles again what it cannot read either.
            if path.name in sums and zlib.crc32(path.read_bytes()) != sums[path.name]:
                damaged.append(path.name)
                path.unlink(missing_ok=True)  # Another process may have deleted it.
    left = [name for name in damaged if (folder / name).exists()]
    if left:
        say(f"{folder}: {some(left, 3)} changed since JAX wrote it and cannot be deleted; this folder is not used")
    elif damaged:
        say(f"{folder}: deleted {some(damaged, 3)}, which changed since JAX wrote it, so it will be compiled again")
    record(folder)
    return not left


def programs(folder: Path) -> list[Path]:
    """Returns the files of the programs."""
    return sorted(folder.glob("*-cache"))


def known(folder: Path) -> dict[str, Any]:
    """Returns the recorded checksums by file name; {} if there are none or they cannot be read."""
    try:
        sums = json.loads((folder / SUMS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return sums if isinstance(sums, dict) else {}


def complete(content: bytes) -> bool:
    """Returns whether the content of a file is a whole program. A killed process may leave a part, never completed."""
    stream: Any = zstandard.ZstdDecompressor() if content.startswith(ZSTD) else zlib
    decompressor = stream.decompressobj()
    try:
        decompressor.decompress(content)
    except (zstandard.ZstdError, zlib.error):
        return False
    return bool(decompressor.eof)


def record(folder: Path) -> None:
    """Records the CRC-32 of the programs that have none yet, and deletes those that were never written to the end."""
    before, after = known(folder), dict[str, Any]()
    for path in programs(folder):
        with contextlib.suppress(OSError):
            if path.name in before:
                after[path.name] = before[path.name]
            elif complete(content := path.read_bytes()):
                after[path.name] = zlib.crc32(content)
            elif time.time() - path.stat().st_mtime > YOUNG:
                path.unlink()
    if after != before:
        with contextlib.suppress(StorageError):
            write_atomically(folder / SUMS, json.dumps(after, indent=2) + "\n")

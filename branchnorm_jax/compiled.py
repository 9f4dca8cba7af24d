"""Checksums of the compiled programs that JAX stores. JAX runs what its files contain, also if they are damaged."""

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from branchnorm_jax.errors import StorageError, some
from branchnorm_jax.files import write_atomically

SUMS = "checksums.json"


@contextlib.contextmanager
def checked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Deletes the damaged programs of a folder, and says so; at the end, records those that were added.

    The folder need not exist, nor be writable. A program that a killed process added is recorded at the next start.
    """
    damaged = [
        name for name, value in known(folder).items() if (folder / name).exists() and crc(folder / name) != value
    ]
    if damaged:
        for name in damaged:
            (folder / name).unlink(missing_ok=True)
        say(f"{folder}: deleted {some(damaged, 3)}, which changed since JAX wrote it; it will be compiled again")
    record(folder)
    try:
        yield
    finally:
        record(folder)


def known(folder: Path) -> dict[str, int]:
    """Returns the recorded checksums by file name; {} if there are none or they cannot be read."""
    try:
        return {str(name): int(value) for name, value in json.loads((folder / SUMS).read_text("utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def crc(path: Path) -> int:
    """Returns the CRC-32 of a file, -1 if it cannot be read."""
    try:
        return zlib.crc32(path.read_bytes())
    except OSError:
        return -1


def record(folder: Path) -> None:
    """Records the checksums of the programs that have none yet."""
    before = known(folder)
    after = {path.name: before.get(path.name) or crc(path) for path in sorted(folder.glob("*-cache"))}
    if after != before:
        with contextlib.suppress(StorageError):
            write_atomically(folder / SUMS, json.dumps(after, indent=2) + "\n")

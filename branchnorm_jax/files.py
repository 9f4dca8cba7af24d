"""File locks, atomic replacement of files and directories, and the checksum of what is stored as JSON."""

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from branchnorm_jax.errors import StorageError, UserError

ABANDONED = 86_400.0
"""Age in seconds after which a temporary file or directory counts as left behind by a killed process."""


def lock(file: IO[Any], held: str, wait: bool = False) -> None:
    """Locks a file until it is closed. On file systems without locks, the file stays unlocked.

    Raises:
      UserError: with the message `held`, if another process has locked the file and this one does not `wait`.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise UserError(held) from error
    except OSError:
        pass  # Some network file systems have no locks.


def json_checksum(value: object) -> int:
    """Returns the CRC-32 of a JSON value, which does not depend on the order of its names."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def real(path: Path) -> Path:
    """Returns the path without links. A loop of links remains, for which `Path.resolve` raises `RuntimeError`."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def storing(path: Path, advice: str = "") -> Iterator[None]:
    """Turns `OSError` in the block into `StorageError`, which names the file; a failed write does not name it."""
    try:
        yield
    except OSError as error:
        message = _unwritable(error.filename or path, error)
        raise StorageError(f"{message}; {advice}" if advice else message) from error


def _unwritable(name: object, error: OSError) -> str:
    return f"{name}: cannot be written ({error.strerror or error})"


def write_atomically(path: Path, text: str) -> None:
    r"""Replaces the content of a file atomically.

    Readers see the complete old text or the complete new text, even after a crash. Names of files that are not UTF-8
    give lone surrogates, which are written as escapes such as \udcff. These are valid in JSON, which is read back
    unchanged.

    Raises:
      StorageError: if the file cannot be written.
    """
    with _temporary(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, path)


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yields a temporary directory, which replaces `final` if the block succeeds and is deleted otherwise.

    Readers of `final` see the old directory, no directory, or the complete new directory. If the process is killed in
    the block, the temporary directory remains; the next `atomic_directory` deletes it after `ABANDONED` seconds.

    Raises:
      StorageError: if the block or the replacement raises `OSError`.
    """
    with _temporary(final) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        _replace(temporary, final)


@contextlib.contextmanager
def _temporary(final: Path) -> Iterator[Path]:
    """Yields a path next to `final` that no other process uses, and deletes what is there at the end.

    Deletes also what killed processes have left there. Raises `StorageError` if the block raises `OSError`.
    """
    delete_abandoned(final.parent, glob.escape(final.name))
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    except OSError as error:
        name = str(error.filename or final).replace(str(temporary), str(final))
        raise StorageError(_unwritable(name, error)) from error
    finally:
        _delete(temporary)


def delete_abandoned(folder: Path, names: str = "*") -> None:
    """Deletes what killed processes have left of files in a folder; `names` is a pattern."""
    for path in folder.glob(f".{names}.{'[0-9a-f]' * 32}.*"):
        with contextlib.suppress(OSError):  # Another process may delete it, too.
            # A process that has been writing for days changes the files, and not always their directory.
            changed = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
            if time.time() - changed > ABANDONED:
                _delete(path)


def _delete(path: Path) -> None:
    """Deletes a file or a directory, if it exists and can be deleted."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def _replace(temporary: Path, final: Path) -> None:
    """Renames `temporary` to `final`; tries again if another process creates `final` in between."""
    while True:
        try:
            os.rename(temporary, final)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        old = temporary.with_suffix(".old")
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, old)
        shutil.rmtree(old, ignore_errors=True)

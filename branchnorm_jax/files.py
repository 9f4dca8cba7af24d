"""File locks, and atomic replacement of files and directories."""

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from branchnorm_jax.errors import StorageError, UserError


def lock(file: IO[Any], held: str) -> None:
    """Locks a file until it is closed. On file systems without locks, the file stays unlocked.

    Raises:
      UserError: with the message `held`, if another process has locked the file.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(held) from error
    except OSError:
        pass  # Some network file systems have no locks.


def real(path: Path) -> Path:
    """Returns the path without links. A loop of links remains, for which `Path.resolve` raises `RuntimeError`."""
    return Path(os.path.realpath(path))


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of a file atomically.

    Readers see the complete old text or the complete new text, even after a crash.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(final: Path) -> Iterator[Path]:
    """Yields a temporary directory, which replaces `final` if the block succeeds and is deleted otherwise.

    Readers of `final` see the old directory, no directory, or the complete new directory. If the process is killed in
    the block, the temporary directory remains.

    Raises:
      StorageError: if the block or the replacement raises `OSError`.
    """
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _replace(temporary, final)
    except OSError as error:
        raise StorageError(f"{error.filename or final}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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

"""A run's folder in a bucket, such as gs://bucket/run.

The checkpoints are in the bucket only: every process writes its part of them there. All other files are in a local
folder, because they grow line by line or are mapped into memory. They are fetched from the bucket when the folder is
opened, and published in it before each checkpoint, after each validation and at the end. So a checkpoint in the bucket
is never ahead of the logs in the bucket.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec

from branchnorm_jax.errors import MissingExtraError, StorageError, UserError
from branchnorm_jax.files import lock

SCHEMES = {"gs": "gcsfs"}
"""Scheme of a URL -> the package that reads it. The library of the checkpoints supports these schemes, too."""

NEVER = {"checkpoints", "compile_cache"}
"""Folders that are either in the bucket only or on this machine only."""

LARGE = {"average", "corpus", "export", "tensorboard"}
"""Folders that are published, but fetched only on request."""

KEPT = {"compile_cache", "corpus"}
"""Folders whose local copies remain for the next start on this machine."""

MARK = ".run"
"""File with the identity of the process that trains in a workdir."""


def is_url(name: str) -> bool:
    """Returns whether a name is a URL instead of a path."""
    return re.match("[a-z][a-z0-9+.-]*://", name) is not None


def open_url(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path in it.

    Raises:
      UserError: if the scheme is unknown.
      MissingExtraError: if the package that reads it is not installed.
    """
    # It warns at each access if the account may not ask for the type of the bucket, which does not matter.
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    try:
        return fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        scheme = url.partition("://")[0]
        if scheme in SCHEMES:
            raise MissingExtraError(
                f'{url}: needs {SCHEMES[scheme]}; run: pip install "branchnorm_jax[{scheme}]"'
            ) from error
        raise UserError(f"{url}: {error}") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error


class Bucket:
    """The bucket's folder `url`, and its local copy `folder`."""

    def __init__(self, url: str) -> None:
        """Opens the folder, which need not exist, and fetches its files.

        Raises:
          UserError: if checkpoints cannot be in such a bucket, or if it cannot be read.
        """
        if url.partition("://")[0] not in SCHEMES:
            known = " or ".join(f"{scheme}://" for scheme in SCHEMES)
            raise UserError(f"{url}: a workdir is a folder or begins with {known}; mount other storage as a folder")
        self.url = url.rstrip("/")
        self._files, root = open_url(self.url)
        self._root = PurePosixPath(root)
        self.folder, self._lock = _own_folder(self.url)
        self._published: dict[Path, tuple[int, int]] = {}
        self._marks: dict[str, str] = {}
        self._skipped = NEVER | {"corpus"}
        for entry in self.folder.iterdir():
            if entry.name not in KEPT and not entry.name.startswith("."):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        try:
            self.fetch(self.folder)
        except StorageError as error:
            raise UserError(str(error)) from error

    def close(self) -> None:
        """Lets other processes use the local copy."""
        self._lock.close()

    def fetch(self, folder: Path) -> None:
        """Fetches the files below `folder`, a part of the local copy, that are new or have changed in the bucket.

        Raises `StorageError` if the bucket cannot be read.
        """
        below = folder.relative_to(self.folder)
        self._skipped -= set(below.parts)
        skipped = self._skipped | (LARGE - set(below.parts))
        with self._reaching("cannot be read"):
            for remote in self._files.find((self._root / below).as_posix()):
                name = Path(remote).relative_to(self._root)
                path = self.folder / name
                if skipped & set(name.parts) or path.name == MARK:
                    continue
                if not path.exists() or _stamp(path) != (self._files.size(remote), self._modified(remote)):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    partial = path.with_name(f".{path.name}.part")
                    self._files.get_file(remote, str(partial))
                    os.replace(partial, path)
                self._note(path)

    def set_mark(self, folder: Path, mark: str) -> None:
        """Writes `mark` into the file .run of `folder`. From now on, `publish` checks that it is still there."""
        remote = self._remote(folder / MARK)
        with self._reaching("cannot be written"):
            self._files.pipe_file(remote, mark.encode())
        self._marks[remote] = mark

    def publish(self) -> None:
        """Uploads the files that have changed, and deletes those that have been deleted here.

        Raises:
          UserError: if another process has taken one of the marks of this one.
          StorageError: if the bucket cannot be written.
        """
        with self._reaching("cannot be written"):
            for remote, mark in self._marks.items():
                if self._files.cat_file(remote) != mark.encode():
                    raise UserError(
                        f"{self.url}: another process has started to train in this workdir, so this one ends"
                    )
            found = set(self._local())
            for path in found:
                if self._published.get(path) != _stamp(path):
                    self._files.put_file(str(path), self._remote(path))
                    self._note(path)
            for path in self._published.keys() - found:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._remote(path))
                del self._published[path]

    def _local(self) -> Iterator[Path]:
        """Yields the local files that belong into the bucket."""
        for path in self.folder.rglob("*"):
            below = path.relative_to(self.folder)
            if path.is_file() and not path.name.startswith(".") and not self._skipped & set(below.parts):
                yield path

    def _note(self, path: Path) -> None:
        """Notes that a file is the same here and in the bucket; both have the same time from now on."""
        modified = self._modified(self._remote(path))
        os.utime(path, ns=(modified, modified))
        self._published[path] = _stamp(path)

    def _remote(self, path: Path) -> str:
        return (self._root / path.relative_to(self.folder)).as_posix()

    def _modified(self, remote: str) -> int:
        """Returns the time of a file in the bucket: nanoseconds, rounded to what every file system stores."""
        return int(self._files.modified(remote).timestamp()) * 10**9

    @contextlib.contextmanager
    def _reaching(self, failure: str) -> Iterator[None]:
        """Turns the exceptions of the bucket's library, which have no common class, into `StorageError`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise StorageError(f"{self.url}: {failure} ({reason})") from error


def _own_folder(url: str) -> tuple[Path, IO[str]]:
    """Returns a local folder for `url` that no other process uses, and the lock that reserves it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "branchnorm_jax"
    name = re.sub("[^A-Za-z0-9._-]+", "+", url)
    number = 0
    while True:
        folder = cache / (f"{name}~{number}" if number else name)
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".in_use").open("w")
        try:
            lock(file, "in use")
        except UserError:
            file.close()
            number += 1
        else:
            return folder, file


def _stamp(path: Path) -> tuple[int, int]:
    """Returns the size of a file in bytes and its modification time in nanoseconds."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns

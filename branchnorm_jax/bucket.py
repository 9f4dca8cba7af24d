"""A run's folder in a bucket, such as gs://bucket/run.

The checkpoints are in the bucket only: every process writes its part of them there. All other files are in a local
folder, because they grow line by line or are mapped into memory. They are downloaded when the folder is opened, and
uploaded before each checkpoint, after each validation and at the end. So a checkpoint in the bucket is never ahead of
the logs in the bucket.
"""

import contextlib
import datetime
import hashlib
import logging
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import fsspec

from branchnorm_jax.errors import MissingExtraError, StorageError, UnreachableError, UserError, install
from branchnorm_jax.files import lock

SCHEMES = {"gs": "gcsfs"}
"""Scheme of a URL -> the package that reads it. The library of the checkpoints supports these schemes, too."""

NEVER = {"checkpoints", "compile_cache"}
"""Folders that are either in the bucket only or on this machine only."""

LARGE = {"average", "corpus", "export", "tensorboard"}
"""Folders that are fetched only on request. `corpus` is uploaded only after that, because the local copy may be old."""

KEPT = {"compile_cache", "corpus"}
"""Folders whose local copies remain for the next start on this machine."""

MARK = ".run"
"""File with the identity of the process that trains in a workdir."""

Stamp = tuple[int, int]
"""Size of a file in bytes and its modification time in nanoseconds, in whole seconds for a file in the bucket."""


def is_url(name: str) -> bool:
    """Returns whether a name is a URL instead of a path."""
    return re.match("[A-Za-z][A-Za-z0-9+.-]*://", name) is not None


def open_url(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path in it.

    Raises:
      UserError: if the scheme is unknown.
      MissingExtraError: if the package that reads it is not installed.
    """
    # gcsfs logs a traceback for every failed request, and a warning if the account cannot read the bucket's metadata.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"use_listings_cache": False}
    scheme = url.partition("://")[0]
    try:
        if scheme == "gs":
            import aiohttp  # Comes with gcsfs, whose requests otherwise have no time limit.

            options["requests_timeout"] = aiohttp.ClientTimeout(sock_connect=30, sock_read=120)
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        if scheme in SCHEMES:
            raise MissingExtraError(f"{url}: needs {SCHEMES[scheme]}; run: {install(scheme)}") from error
        raise UserError(f"{url}: {error}") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}") from error


class Bucket:
    """The bucket's folder `url`, and its local copy `folder`, which belongs to this process while the object exists."""

    def __init__(self, url: str) -> None:
        """Opens the folder, which need not exist, and fetches its files.

        Raises:
          UserError: if checkpoints cannot be in such a bucket, or if it does not exist or cannot be read.
          UnreachableError: if it does not answer.
        """
        if url.partition("://")[0] not in SCHEMES:
            known = " or ".join(f"{scheme}://" for scheme in SCHEMES)
            raise UserError(f"{url}: a workdir is a folder or begins with {known}; mount other storage as a folder")
        if not re.match("[a-z]+://[^/]+/+[^/]", url):
            raise UserError(f"{url}: name a folder in a bucket, such as gs://bucket/run")
        self.url = url.rstrip("/")
        self._files, root = open_url(self.url)
        self._root = PurePosixPath(root)
        self.folder, self._lock = _own_folder(self.url)
        self._same: dict[Path, Stamp] = {}
        """Files that are the same here and in the bucket, unless their stamp has changed."""
        self._marks: dict[str, str] = {}
        self._skipped = NEVER | {"corpus"}
        for entry in self.folder.iterdir():
            if entry.name not in KEPT and not entry.name.startswith("."):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        try:
            self.fetch(self.folder)
        except UnreachableError:
            raise
        except StorageError as error:
            raise UserError(str(error)) from error

    def fetch(self, folder: Path) -> None:
        """Makes the files below `folder`, a part of the local copy, equal to those in the bucket.

        Files that were never in the bucket remain.

        Raises:
          UserError: if the bucket contains a file that would be outside of the local copy.
          StorageError: if the bucket cannot be read.
        """
        below = folder.relative_to(self.folder)
        self._skipped -= set(below.parts)
        skipped = self._skipped | (LARGE - set(below.parts))
        found = set()
        with self._reaching("cannot be read"):
            for remote, info in self._files.find((self._root / below).as_posix(), detail=True).items():
                name = PurePosixPath(remote).relative_to(self._root)
                if ".." in name.parts:  # In a bucket this is a name like any other; here it would leave the folder.
                    raise UserError(f"{self.url}: contains {name}, which would be outside of the local copy; delete it")
                path, stamp = self.folder / name, (info["size"], _nanoseconds(info["mtime"]))
                # A folder that was created by hand is an empty object whose name ends with a slash.
                if remote.endswith("/") or skipped & set(name.parts) or path.name == MARK:
                    continue
                if not path.exists() or _stamp(path) != stamp:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    partial = path.with_name(f".{path.name}.part")
                    self._files.get_file(remote, str(partial))
                    os.utime(partial, ns=(stamp[1], stamp[1]))
                    os.replace(partial, path)
                self._same[path] = _stamp(path)
                found.add(path)
        for path in self._same.keys() - found:
            # Another process has deleted it in the bucket.
            if path.is_relative_to(folder) and not skipped & set(path.relative_to(self.folder).parts):
                path.unlink(missing_ok=True)
                del self._same[path]

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
            # An upload can be interrupted. In this order, a vocabulary precedes the note of its origin, and the tokens
            # of a store precede its description.
            for path in sorted(found, reverse=True):
                if self._same.get(path) != _stamp(path):
                    self._upload(path)
            for path in self._same.keys() - found:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._remote(path))
                del self._same[path]

    def _upload(self, path: Path) -> None:
        stamp = _stamp(path)
        # A copy: if another program writes to the file, the upload still has a fixed size.
        partial = path.with_name(f".{path.name}.part")
        shutil.copyfile(path, partial)
        self._files.put_file(str(partial), self._remote(path))
        partial.unlink()
        if _stamp(path) == stamp:
            # With equal times, the next start on this machine recognises the file.
            modified = _nanoseconds(self._files.modified(self._remote(path)))
            os.utime(path, ns=(modified, modified))
            stamp = _stamp(path)
        self._same[path] = stamp

    def _local(self) -> Iterator[Path]:
        """Yields the local files that belong into the bucket."""
        for path in self.folder.rglob("*"):
            parts = path.relative_to(self.folder).parts
            # A killed `atomic_directory` leaves a hidden folder.
            if path.is_file() and not self._skipped & set(parts) and not any(part[0] == "." for part in parts):
                yield path

    def _remote(self, path: Path) -> str:
        return (self._root / path.relative_to(self.folder)).as_posix()

    @contextlib.contextmanager
    def _reaching(self, failure: str) -> Iterator[None]:
        """Turns the exceptions of the bucket's library, which have no common class, into `StorageError`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            # Refusals and local files have these types. Errors of the network have types of their own.
            refused = type(error) in (OSError, FileNotFoundError, FileExistsError, PermissionError)
            kind = StorageError if refused else UnreachableError
            raise kind(f"{self.url}: {failure} ({reason})") from error


def _own_folder(url: str) -> tuple[Path, IO[str]]:
    """Returns a local folder for `url` that no other process uses, and the lock that reserves it.

    Raises:
      UserError: if no folder can be created.
    """
    readable = re.sub("[^A-Za-z0-9._-]+", "+", url)[-100:]
    name = f"{readable}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    number = 0
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        while True:
            # Hosts may share a home without file locks.
            folder = home / "branchnorm_jax" / socket.gethostname() / (f"{name}~{number}" if number else name)
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / ".in_use").open("w")
            try:
                lock(file, "in use")
            except UserError:
                file.close()
                number += 1
            else:
                return folder, file
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{url}: no folder for the local copy ({error}); set XDG_CACHE_HOME to a folder that can be written to"
        ) from error


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _nanoseconds(time: datetime.datetime) -> int:
    return int(time.timestamp()) * 10**9

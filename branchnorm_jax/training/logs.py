"""Output of a run: JSON lines, TensorBoard event files, the progress line, and the environment for status.json."""

import contextlib
import functools
import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from branchnorm_jax import __version__
from branchnorm_jax.errors import MissingExtraError, needs_extra
from branchnorm_jax.files import storing
from branchnorm_jax.parallel import hosts

# tqdm creates its default lock at the first message. Ctrl-C at that moment would raise an AttributeError.
tqdm.set_lock(threading.RLock())

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece", "sacrebleu")


class JsonLines:
    """A file with one JSON object per line. Each object has a `step`, so that a restored run can drop later lines."""

    def __init__(self, path: Path, first_step: int) -> None:
        """Opens `path` to append, and first drops the lines of `first_step` and later.

        The run repeats those steps and writes their lines again. Only these lines are read: the file of a long run is
        large.

        Raises:
          StorageError: if the file cannot be read or written.
        """
        self._path = path
        self.end = first_step
        """Step after the last line that was dropped; `first_step` if none was."""
        with storing(path):
            self._file, size, broken = path.open("a"), 0, 0
            for end, text in lines_from_end(path):
                line = parsed(text)
                if line and line["step"] < first_step:
                    size = end
                    break
                self.end = max(self.end, line["step"] + 1 if line else 0)
                broken += line is None
            self._file.truncate(size)
        say_broken(path, broken, "deleted")

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line and flushes it to the operating system. A float that is not finite becomes null.

        Raises:
          StorageError: if the file cannot be written.
        """
        values = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in line.items()}
        with storing(self._path):
            self._file.write(json.dumps(values, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file. Raises `StorageError` if a line that `write` failed to write still cannot be written."""
        with storing(self._path):
            self._file.close()


def read_lines(path: Path, names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Reads the lines of a `JsonLines` file that have all `names` as keys. A missing file has no lines.

    A process that is killed can leave an unfinished last line; the function ignores that line silently. It also skips
    all other lines that cannot be read, and reports their number on stderr.
    """
    content = path.read_bytes() if path.exists() else b""
    found = [parsed(text, names) for text in content[: content.rfind(b"\n") + 1].splitlines()]
    say_broken(path, found.count(None), "left out")
    return [line for line in found if line is not None]


def parsed(text: bytes, names: Iterable[str] = ()) -> dict[str, Any] | None:
    """Returns a line of a `JsonLines` file; None if it is damaged or lacks one of `names`."""
    with contextlib.suppress(ValueError):
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get("step"), int) and line.keys() >= {*names}:
            return line
    return None


def lines_from_end(path: Path, block: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """Yields the end and the text of each line, the last one first; not of a last line that is unfinished."""
    with path.open("rb") as file:
        position, finished = file.seek(0, os.SEEK_END), False
        rest, stop = b"", 0  # The bytes from `position` on; those before `stop` have not been yielded.
        while position:
            size = min(block, position)
            position -= size
            file.seek(position)
            rest = file.read(size) + rest[:stop]
            stop = len(rest)
            if not finished:
                stop = rest.rfind(b"\n") + 1
                finished = stop > 0
            while (begin := rest.rfind(b"\n", 0, max(0, stop - 1)) + 1) or (not position and stop):
                yield position + stop, rest[begin:stop]
                stop = begin


def say_broken(path: Path, count: int, done: str) -> None:
    """Says how many lines could not be read, if any, and what was done with them."""
    if count:
        lines = "1 line could not be read and was" if count == 1 else f"{count:,} lines could not be read and were"
        say(f"{path}: {lines} {done}")


@contextlib.contextmanager
def hidden(module: str) -> Iterator[None]:
    """Makes imports of a module fail inside the context, unless it has been imported before."""
    hides = module not in sys.modules
    if hides:
        sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules[module]


class TensorBoard:
    """Writes scalars to TensorBoard event files, without TensorFlow.

    The calling thread writes the points, and not the thread of tensorboardX's `SummaryWriter`: if the disk is full,
    that thread ends, and the program waits for it for ever.
    """

    SYNC = 30.0
    """Seconds after which the next call writes the buffered points to the disk, which may take a while."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Prepares an event file in `directory`, which the first point opens: a finished run gets no empty ones.

        TensorBoard hides the points that an interrupted run wrote at `first_step` and later. Without tensorboardX the
        class writes no event files, and reports this in one line on stderr.
        """
        self._directory, self._first_step, self._synchronised = directory, first_step, time.monotonic()
        self._writer: Any = None
        self._events: Any = None
        try:
            # The library imports PyTorch if it is installed, which takes a second and is not needed for numbers.
            with needs_extra("plots", "TensorBoard needs tensorboardX"), hidden("torch"):
                from tensorboardX.event_file_writer import EventsWriter
                from tensorboardX.proto.event_pb2 import Event, SessionLog
                from tensorboardX.summary import scalar
        except MissingExtraError as error:
            say(f"{directory} is not written: {error}")
            return
        self._event, self._scalar, self._start = Event, scalar, SessionLog(status=SessionLog.START)
        self._writer = EventsWriter

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds one point per name at `step`. Values that are not finite are skipped.

        Raises:
          StorageError: if the file cannot be written.
        """
        if not self._writer:
            return
        now = time.time()
        with storing(self._directory):
            if not self._events:
                self._directory.mkdir(exist_ok=True)
                # The library names files by whole seconds, and would replace one that a rollback has just closed.
                self._events = self._writer(str(self._directory / "events"), f".{self._first_step}.{time.time_ns()}")
                self._events.write_event(self._event(wall_time=now, step=self._first_step, session_log=self._start))
            for name, value in scalars.items():
                if math.isfinite(value):
                    self._events.write_event(self._event(wall_time=now, step=step, summary=self._scalar(name, value)))
            if time.monotonic() - self._synchronised > self.SYNC:
                self._events.flush()
                self._synchronised = time.monotonic()

    def close(self) -> None:
        """Writes the buffered points and closes the file. Raises `StorageError` if it cannot be written."""
        if self._events:
            with storing(self._directory):
                self._events.close()


class _Lines:
    """Wraps a stderr that is not a terminal. Each update of a progress bar becomes a separate line."""

    def write(self, text: str) -> None:
        for line in text.replace("\r", "\n").split("\n"):
            if line.strip():
                sys.stderr.write(line.rstrip() + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(total: int, done: int, unit: str, description: str) -> tqdm:
    """Returns a live progress line on stderr with rate and ETA.

    If stderr is not a terminal, the progress bar writes one line every 30 s.
    """
    live = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=done,
        unit=unit,
        desc=description,
        file=sys.stderr if live else _Lines(),
        dynamic_ncols=live,
        mininterval=0.2 if live else 30,
        delay=0 if live else 1,
        leave=False,
        disable=not hosts.is_first(),
    )


def say(line: str) -> None:
    """Writes one line to stderr without breaking the progress line. Of several processes only the first writes."""
    if hosts.is_first():
        tqdm.write(line, file=sys.stderr)


@functools.cache
def environment() -> dict[str, Any]:
    """Returns the devices, number of processes, package versions and git revision of this run at its start."""
    device = jax.devices()[0]
    return {
        "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "processes": jax.process_count(),
        "versions": {"python": sys.version.split()[0], "branchnorm_jax": __version__}
        | {name: metadata.version(name) for name in PACKAGES},
        "git_revision": git_revision(),
    }


def git_revision() -> str:
    """Returns the commit of this code, or "unknown" outside a checkout; "+" marks changes in tracked files."""
    here, name = Path(__file__).parent, Path(__file__).name
    try:
        # An installed package may be inside the checkout of another project. That project does not track this file.
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", name], cwd=here, capture_output=True, check=True, timeout=10
        )
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+" if changed else "")


def peak_memory_bytes() -> int:
    """Returns the peak memory use so far in bytes, as the device reports it.

    If the device does not report it, the result is the peak resident set size of this process.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

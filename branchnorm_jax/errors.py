"""Errors reported to the user; `cli.py` prints each as one line on stderr and sets the exit code.

| exit code | meaning                                   | class                |
|-----------|-------------------------------------------|----------------------|
| 0         | success                                   |                      |
| 2         | invalid input, option or workdir          | `UserError`          |
| 3         | the run diverged                          | `DivergedError`      |
| 4         | a process was lost, stuck or missing      | `HostError`          |
| 5         | storage failed                            | `StorageError`       |
| 6         | an exported model gives different results | `MismatchError`      |
| 128 + n   | stopped by signal n                       | `Preempted`          |
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that end lines, move a terminal's cursor, turn the direction of writing, or cannot be written in UTF-8."""


class BranchNormError(Exception):
    """Base class. The message is one line that says what is wrong, where, and how to fix it."""

    exit_code: int = 1
    status: str = "failed"


class UserError(BranchNormError):
    """Invalid input, option or workdir, which the user can fix."""

    exit_code = 2


class UnfitError(UserError):
    """The options of a run do not fit its text, which only the text can show. All processes of the run raise it."""


class MissingExtraError(UserError):
    """A package that is optional is not installed."""


@contextlib.contextmanager
def needs_extra(name: str, what: str) -> Iterator[None]:
    """Raises `MissingExtraError` if an import inside the context fails.

    The message says that `what` needs the packages of the extra `name`.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{what}: {error}; run: {install(name)}") from error


def install(name: str) -> str:
    """Returns the command that installs the packages of an extra."""
    file = Path("requirements", f"{name}.txt")
    in_checkout = (Path(__file__).parent.parent / file).is_file()
    return f"pip install -r {file}" if in_checkout else f'pip install "branchnorm_jax[{name}]"'


class OneLineWarning(UserWarning):
    """Something that a user should know, in one line. The command line prints it without the place in the code."""


def one_line(text: str) -> str:
    r"""Returns a message as one line: control characters, as in names of files, become escapes.

    >>> print(one_line("a\nb: no such file"))
    a\nb: no such file
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def count(number: int, what: str) -> str:
    """Returns a number with its noun.

    >>> count(1, "character"), count(1200, "character")
    ('1 character', '1,200 characters')
    """
    return f"{number:,} {what}" + "s" * (number != 1)


def some(names: Sequence[str], most: int = 20) -> str:
    """Returns names as a list for a message, of which long lists show only the first.

    >>> some(["de", "en", "fr"], most=2)
    'de, en and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class DivergedError(BranchNormError):
    """Training diverged at update `step`: a loss or norm is not finite (`kind` "nonfinite"), or a spike ("spike")."""

    exit_code = 3
    status = "diverged"

    def __init__(self, message: str, step: int, kind: str = "nonfinite") -> None:
        super().__init__(message)
        self.step, self.kind = step, kind


class HostError(BranchNormError):
    """A process of the run is missing, was lost, or makes no progress."""

    exit_code = 4


class StorageError(BranchNormError):
    """A write failed, for example because the disk is full or read-only, or a file that is there cannot be read."""

    exit_code = 5


class UnreachableError(StorageError):
    """A bucket does not answer. Another start may succeed."""

    exit_code = 4


class MismatchError(BranchNormError):
    """An exported model gives different results in its target engine."""

    exit_code = 6


class Preempted(KeyboardInterrupt):
    """A signal requested a stop. In training, this is raised after the state was saved, or before the first update.

    Like `KeyboardInterrupt`, it is not a subclass of `Exception`, so code that handles failures does not catch it.
    """

    status = "preempted"

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number, self.exit_code = signal_number, 128 + signal_number

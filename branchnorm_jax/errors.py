"""The few errors that a user can meet; `main.py` turns each into one line on stderr and an exit code.

| exit code | meaning                                   | class                |
|-----------|-------------------------------------------|----------------------|
| 0         | done                                      |                      |
| 2         | the user's mistake                        | `UserError`          |
| 3         | the run diverged                          | `DivergedError`      |
| 4         | a host was lost or did not answer in time | `HostError`          |
| 5         | storage failed                            | `StorageError`       |
| 6         | an exported model computes something else | `MismatchError`      |
| 128 + n   | preempted by signal n, after saving       | `Preempted`          |
"""


class BranchNormError(Exception):
    """Base class. The message is one line that says what is wrong, where, and how to mend it."""

    exit_code: int = 1
    status: str = "failed"


class UserError(BranchNormError):
    """Bad input, option or workdir: something that the user can mend."""

    exit_code = 2


class DivergedError(BranchNormError):
    """A figure of the update made at `step` is not finite (`kind` nonfinite), or far out of line (spike)."""

    exit_code = 3
    status = "diverged"

    def __init__(self, message: str, step: int, kind: str = "nonfinite") -> None:
        super().__init__(message)
        self.step, self.kind = step, kind


class HostError(BranchNormError):
    """Another process of the run is missing or silent."""

    exit_code = 4


class StorageError(BranchNormError):
    """The disk is full, read-only or failing while the run writes its results."""

    exit_code = 5


class MismatchError(BranchNormError):
    """A model written for another engine gives other numbers there."""

    exit_code = 6


class Preempted(KeyboardInterrupt):
    """A signal asked the process to stop; what there was to save was saved before this was raised.

    As Ctrl-C it is no `Exception`: nobody who expects a failure may take it for one and go on.
    """

    status = "preempted"

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number, self.exit_code = signal_number, 128 + signal_number

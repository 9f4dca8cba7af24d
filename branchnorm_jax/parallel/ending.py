"""The end of a process that cannot continue, even if its main thread is blocked inside the runtime."""

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator

from branchnorm_jax.errors import HostError

TIME_TO_REPORT = 5
"""Seconds for the reports of a process that ends. A full disk or a blocked terminal must not keep it alive."""

_reports: list[Callable[[str], None]] = []
_ending = threading.Lock()


@contextlib.contextmanager
def reported_to(report: Callable[[str], None]) -> Iterator[None]:
    """Inside the context, `end_process` also passes its message to `report`, in a thread of its own."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports.remove(report)


def end_process(message: str, *, stacks: bool = False, last: Callable[[], None] = lambda: None) -> None:
    """Prints `message` as the line of a `HostError` and ends the process with its exit code. Does not return.

    Args:
      message: what happened, and what to do.
      stacks: whether to print the stacks of all threads before the line.
      last: called just before the end.
    """
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # Another thread is ending this process, with a message of its own.
    reporter = threading.Thread(target=_report, args=(message, stacks), daemon=True)
    reporter.start()
    reporter.join(TIME_TO_REPORT)
    last()
    os._exit(HostError.exit_code)


def _report(message: str, stacks: bool) -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")  # Clears the progress line.
        if stacks:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        print(f"{HostError.__name__}: {message}", file=sys.stderr, flush=True)
    for report in reversed(_reports):
        with contextlib.suppress(Exception):
            report(message)

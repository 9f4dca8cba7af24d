"""The processes of a multi-host run: start-up, agreement, and signals that ask for a stop."""

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import jax
from jax._src import distributed  # The public API has no access to the key-value store of the coordinator.

from branchnorm_jax.errors import BranchNormError, HostError, UserError
from branchnorm_jax.options import ParallelConfig

T = TypeVar("T")

# Environment variables set by launchers that jax.distributed detects automatically.
LAUNCHERS = ("SLURM_JOB_NUM_NODES", "OMPI_MCA_orte_hnp_uri", "JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS")

PATIENCE = 10
"""Seconds of waiting for another process after which a line on stderr says what for."""


def start(parallel: ParallelConfig) -> None:
    """Connects to the other processes of the run.

    Does nothing unless a launcher is detected or `parallel.distributed` is set. Without a launcher, the environment
    variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` describe the run.

    Raises:
      HostError: if the other processes do not answer within `parallel.start_timeout`.
    """
    force = parallel.distributed
    if not force and not any(name in os.environ for name in LAUNCHERS):
        return
    if os.environ.get("SLURM_JOB_NUM_NODES") and os.environ.get("SLURM_NTASKS", "1") == "1" and not force:
        return
    count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(
            os.environ.get("JAX_COORDINATOR_ADDRESS"),
            int(count) if count else None,
            int(index) if index else None,
            initialization_timeout=parallel.start_timeout,
            heartbeat_timeout_seconds=parallel.heartbeat_timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise HostError(f"cannot join the other processes of the run: {error}") from error


def is_first() -> bool:
    """Returns whether this is process 0, which alone writes the shared files."""
    return jax.process_index() == 0


_calls = itertools.count()


def gather(text: str, what: str = "") -> list[str]:
    """Returns the texts of all processes, in the order of the processes. All processes must call it.

    Args:
      text: the text of this process.
      what: what a process does before it calls this function, for the line that appears while others wait for it.
    """
    if jax.process_count() == 1:
        return [text]
    client: Any = distributed.global_state.client
    # All processes make the same calls, so the number of the call identifies it.
    call = f"branchnorm_jax/{next(_calls)}"
    client.key_value_set(f"{call}/{jax.process_index()}", text)
    return [_wait_for(client, f"{call}/{index}", index, what) for index in range(jax.process_count())]


def _wait_for(client: Any, key: str, index: int, what: str) -> str:
    for attempt in itertools.count():
        try:
            return str(client.blocking_key_value_get(key, PATIENCE * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise HostError(f"the connection to the coordinator broke: {str(error).splitlines()[0]}") from error
        if not attempt:
            print(
                f"process {jax.process_index()} waits for process {index}" + (f", {what}" if what else ""),
                file=sys.stderr,
                flush=True,
            )
    raise AssertionError


def agree(facts: Mapping[str, Any]) -> None:
    """Checks that `facts` are the same in all processes.

    Raises:
      UserError: in every process, with the first difference between a process and process 0.
    """
    mine = {"host": socket.gethostname(), **{name: str(value) for name, value in facts.items()}}
    first, *others = (json.loads(text) for text in gather(json.dumps(mine)))
    for index, other in enumerate(others, start=1):
        for name in facts:
            if first.get(name) != other.get(name):
                raise UserError(
                    f"{name} is {other.get(name)!r} in process {index} on {other['host']}, but {first.get(name)!r} in "
                    f"process 0 on {first['host']}; all processes of a run need the same"
                )


def first_then_others(first: Callable[[], T], others: Callable[[], T], what: str) -> T:
    """Calls `first` in process 0, and then `others` in the other processes. Returns this process' result.

    If `first` fails, all processes raise its error. `what` describes the work of process 0 for the waiting processes.
    """
    if not is_first():
        outcome = json.loads(gather("", what)[0])
        if outcome:
            kinds = {kind.__name__: kind for kind in BranchNormError.__subclasses__()}
            raise kinds.get(outcome["error"], HostError)(f"process 0: {outcome['message']}")
        return others()
    try:
        result = first()
    except BaseException as error:
        gather(json.dumps({"error": type(error).__name__, "message": str(error)}))
        raise
    gather("{}")
    return result


def leave() -> None:
    """Lets process 0, which coordinates the run, end last after a failure. Call it just before the process ends.

    Without process 0 the runtime aborts the other processes, and their messages would be lost. Process 0 waits at most
    `PATIENCE` seconds.
    """
    client: Any = distributed.global_state.client
    if client is None or distributed.global_state.num_processes == 1:
        return
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"branchnorm_jax/left/{distributed.global_state.process_id}", "")
        if distributed.global_state.process_id == 0:
            deadline = time.monotonic() + PATIENCE
            for index in range(1, distributed.global_state.num_processes):
                rest = max(0.0, deadline - time.monotonic())
                client.blocking_key_value_get(f"branchnorm_jax/left/{index}", int(1000 * rest))


class Preemption:
    """Context manager that turns SIGTERM, SIGINT and SIGUSR1 into a request to stop after the current update.

    A second SIGINT raises `KeyboardInterrupt` at once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.signal: int = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal:
            raise KeyboardInterrupt
        self.signal = number

    def requested(self, largest: jax.Array | None) -> int:
        """Returns the signal that requests a stop, or 0.

        Args:
          largest: the largest signal of all processes at the update before the last one, which that update computed.
            It is the same in all processes, so all stop at the same step. A single process does not need it.
        """
        if jax.process_count() == 1:
            return self.signal
        return 0 if largest is None else int(largest)

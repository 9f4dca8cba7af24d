"""The processes of a multi-host run: start-up, agreement, lost processes, and signals that ask for a stop."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import jax
from jax._src import clusters, distributed  # The public API has no access to the key-value store of the coordinator.

from branchnorm_jax.errors import (
    BranchNormError,
    HostError,
    MissingExtraError,
    Preempted,
    StorageError,
    UnreachableError,
    UserError,
)
from branchnorm_jax.options import ParallelConfig
from branchnorm_jax.parallel.ending import end_process
from branchnorm_jax.parallel.meeting import PATIENCE, gather_links, join_first, parse_address, say
from branchnorm_jax.parallel.monitor import ADVICE, Monitor
from branchnorm_jax.parallel.relay import start_relay

T = TypeVar("T")

# Environment variables of a run of several processes. Slurm's also exists in a step of one process.
LAUNCHERS = ("JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri", "SLURM_STEP_NODELIST")

NEVER = 24 * 60 * 60
"""Seconds for time limits of JAX that must not expire. The monitor notices a lost process long before."""

_monitor: Monitor | None = None


def start(parallel: ParallelConfig) -> None:
    """Connects to the other processes of the run, and ends this process from now on if one of them is lost.

    Does nothing unless a launcher is detected or `parallel.distributed` is set. Without a launcher, the environment
    variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` describe the run.

    Raises:
      HostError: if the other processes do not answer within `parallel.start_timeout`.
      UserError: if the numbers of the processes contradict each other.
    """
    global _monitor
    described = [name for name in LAUNCHERS if name in os.environ]
    if described == ["SLURM_STEP_NODELIST"] and os.environ.get("SLURM_NTASKS", "1") == "1":
        described = []
    if not described and not parallel.distributed:
        return
    try:
        address, count, index, devices = _place(parallel.start_timeout)
        if count > 1:
            if index:
                links = [join_first(index, count, address, parallel.start_timeout)]
                address = start_relay(parse_address(address))
            else:
                listen = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{parse_address(address)[1]}")
                links = gather_links(count, listen, parallel.start_timeout)
            _monitor = Monitor(index, links, parallel.heartbeat_timeout)
        jax.distributed.initialize(
            address,
            count,
            index,
            devices,
            cluster_detection_method="deactivate",  # It was done above.
            initialization_timeout=parallel.start_timeout,
            heartbeat_timeout_seconds=NEVER,
            shutdown_timeout_seconds=NEVER,
        )
    except ValueError as error:
        raise UserError(f"the processes of the run are described wrongly: {error}") from error
    except RuntimeError as error:
        raise HostError(f"cannot join the other processes of the run: {error}") from error


def _place(timeout: int) -> tuple[str, int, int, Sequence[int] | None]:
    """Returns the coordinator's address, the number of processes, the number of this one, and its local devices.

    JAX finds out what the environment variables do not say. None means all local devices.

    Raises:
      ValueError: if one of the first three stays unknown.
    """
    number, own, local = map(os.environ.get, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS"))
    address, count, index, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"),
        int(number) if number else None,
        int(own) if own else None,
        [int(device) for device in local.split(",")] if local else None,
        None,
        timeout,
    )
    if address is None or count is None or index is None:
        raise ValueError("set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID")
    parse_address(address)
    if count < 1:
        raise ValueError(f"JAX_NUM_PROCESSES={count}, but a run has at least one process")
    if not 0 <= index < count:
        raise ValueError(f"JAX_PROCESS_ID={index}, but the {count} processes have the numbers 0 to {count - 1}")
    return address, count, index, devices


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
    number, own = next(_calls), jax.process_index()
    client.key_value_set(f"branchnorm_jax/{number}/{own}", text)
    keys = [f"branchnorm_jax/{number}/{index}" for index in range(jax.process_count())]
    texts = [_wait_for(client, key, index, what) for index, key in enumerate(keys)]
    if number:  # All processes have made this call, so they have read the texts of the one before.
        client.key_value_delete(f"branchnorm_jax/{number - 1}/{own}")
    return texts


def _wait_for(client: Any, key: str, index: int, what: str) -> str:
    for attempt in itertools.count():
        try:
            return str(client.blocking_key_value_get(key, PATIENCE * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise HostError(f"the connection to the coordinator broke: {str(error).splitlines()[0]}") from error
        if not attempt:
            say(f"process {jax.process_index()} waits for process {index}" + (f", {what}" if what else ""))
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
            if outcome["signal"]:
                raise Preempted(f"process 0: {outcome['message']}", outcome["signal"])
            kinds: dict[str, type[BranchNormError]] = {
                kind.__name__: kind for kind in (UserError, MissingExtraError, StorageError, UnreachableError)
            }
            raise kinds.get(outcome["error"], HostError)(f"process 0: {outcome['message']}")
        return others()
    try:
        result = first()
    except BaseException as error:
        number = error.signal_number if isinstance(error, Preempted) else 0
        gather(json.dumps({"error": type(error).__name__, "message": str(error), "signal": number}))
        raise
    gather("{}")
    return result


@contextlib.contextmanager
def blame_lost_process() -> Iterator[None]:
    """Ends the process with the right message if an error inside the context is due to the loss of another process.

    The runtime and the storage library report such a loss in many ways. Other errors pass.
    """
    try:
        yield
    except Exception as error:
        if _monitor and (isinstance(error, StorageError) or not isinstance(error, BranchNormError)):
            _monitor.settle(_comes_from_runtime(error))
        if "Gloo context initialization failed" in str(error):  # On CPUs, a process waits 30 s for the others.
            raise HostError(
                f"another process did not answer in time, perhaps because it is slower; {ADVICE}"
            ) from error
        raise


def _comes_from_runtime(error: BaseException | None) -> bool:
    """Returns whether an error, or one that caused it, is a status of the runtime, such as "UNKNOWN: Gloo ...".

    Some functions of the runtime raise it as a `ValueError`.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, jax.errors.JaxRuntimeError) or re.match(r"[A-Z_]{5,}: ", str(error)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def end_stuck(what: str) -> None:
    """Ends the run, because this process makes no progress: `what` takes too long. Does not return."""
    if _monitor:
        who = f"process {_monitor.index} on host {socket.gethostname()} makes no progress"
        _monitor.end_all(f"{who}: {what}; the stacks are above; {ADVICE}", stacks=True)
    end_process(f"no progress: {what}; the stacks are above; {ADVICE}", stacks=True)


def leave(code: int) -> None:
    """Tells the other processes that this one ends with exit code `code`. Call it just before the process ends."""
    if _monitor:
        _monitor.leave(code)


class Preemption:
    """Context manager that turns `SIGNALS` into a request to stop after the current update, and says so.

    A SIGINT after any of them raises `KeyboardInterrupt` at once. Ignored signals stay ignored: a shell starts jobs in
    the background so that Ctrl-C spares them.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    NOTICE = (
        "\nstopping as soon as the state is saved; Ctrl-C ends the run at once and loses the updates since its last "
        "checkpoint\n"
    )

    def __init__(self) -> None:
        self.signal: int = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
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
        if not self.signal:
            # Not through sys.stderr, because the signal may have interrupted a write to it. A closed terminal fails.
            with contextlib.suppress(OSError):
                os.write(2, self.NOTICE.encode())
        self.signal = number

    def heed(self, together: bool = False, when: str = "", what: str = "") -> None:
        """Raises `Preempted` if a signal has arrived.

        Several processes must stop at the same place, so they heed only in calls that all of them make (`together`).
        `when` ends the message, and `what` says what a process does that the others wait for; see `gather`.
        """
        number = self.signal
        if jax.process_count() > 1:
            number = max(map(int, gather(str(self.signal), what))) if together else 0
        if number:
            raise Preempted(f"stopped by signal {number}{when}", number)

    @contextlib.contextmanager
    def excusing(self, when: str = "") -> Iterator[None]:
        """Raises `Preempted` in place of an error of JAX after a signal.

        Ctrl-C and some schedulers also send the signal to the programs that JAX compiles with, such as ptxas.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError:
            self.heed(when=when)
            raise

    def requested(self, largest: jax.Array | None) -> int:
        """Returns the signal that requests a stop, or 0.

        Args:
          largest: the largest signal of all processes at the update before the last one, which that update computed.
            It is the same in all processes, so all stop at the same step. A single process does not need it.
        """
        if jax.process_count() == 1:
            return self.signal
        return 0 if largest is None else int(largest)

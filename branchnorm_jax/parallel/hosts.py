"""Processes: start-up of several hosts, and the signals by which a scheduler takes a machine away."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

import jax

from branchnorm_jax.errors import HostError

# Set by the launchers whose layout jax.distributed understands by itself.
LAUNCHERS = ("SLURM_JOB_NUM_NODES", "OMPI_MCA_orte_hnp_uri", "JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS")


def start(force: bool) -> None:
    """Joins the other processes of the run, if a launcher is detected or `force` asks for it.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` describe the run where no launcher does.

    Raises:
      HostError: the others did not answer in time.
    """
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
        )
    except (RuntimeError, ValueError) as error:
        raise HostError(f"cannot join the other processes of the run: {error}") from error


def is_first() -> bool:
    """Whether this process writes the files that one process writes."""
    return jax.process_index() == 0


class Preemption:
    """While entered, SIGTERM, SIGINT and SIGUSR1 ask the run to stop after its update; a second SIGINT kills it."""

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

    def requested(self, step: int) -> int:
        """The signal that asks to stop before update `step`, or 0; the same on every host."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                return self.signal or signal.SIGTERM
            return 0
        return self.signal

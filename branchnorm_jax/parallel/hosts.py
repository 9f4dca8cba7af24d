"""Multi-host start-up, and handling of preemption signals."""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

import jax

from branchnorm_jax.errors import HostError

# Environment variables set by launchers that jax.distributed detects automatically.
LAUNCHERS = ("SLURM_JOB_NUM_NODES", "OMPI_MCA_orte_hnp_uri", "JAX_COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS")


def start(force: bool) -> None:
    """Connects to the other processes of the run.

    Does nothing unless a launcher is detected or `force` is set. Without a launcher, the environment variables
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` describe the run.

    Raises:
      HostError: if the other processes do not answer in time.
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
    """Returns whether this is process 0, which alone writes the shared files."""
    return jax.process_index() == 0


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

    def requested(self, step: int) -> int:
        """Returns the signal that requests a stop before update `step`, or 0.

        All hosts agree whether to stop.
        """
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            if multihost_utils.reached_preemption_sync_point(step):
                return self.signal or signal.SIGTERM
            return 0
        return self.signal

"""main.py with a fault in the process $FAULTY at update 8: it waits forever, or with $FULL=1 its disk is full."""

import errno
import os
import threading
from typing import Any

from branchnorm_jax import cli
from branchnorm_jax.parallel import watchdog
from branchnorm_jax.training.loop import Run

watchdog.SHORT = 4.0
read = Run._read


def read_with_fault(self: Run, recorder: Any, step: int, *rest: Any) -> None:
    """Reads the metrics of an update, or fails."""
    if step == 8 and os.environ.get("JAX_PROCESS_ID", "0") == os.environ["FAULTY"]:
        if os.environ.get("FULL"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        threading.Event().wait()
    read(self, recorder, step, *rest)


if __name__ == "__main__":
    run: Any = Run
    run._read = read_with_fault
    cli.command()

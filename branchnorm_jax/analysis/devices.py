"""What devices can do: public specifications, and what is known of the machine at hand."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import jax

from branchnorm_jax.errors import UserError


class Device(NamedTuple):
    """One device."""

    memory: float
    """Bytes."""
    matrix: float
    """Operations per second of matrix products in bfloat16 (V100: float16), dense."""
    matrix_float32: float
    """The same in float32 as JAX runs it by default: TF32 on Ampere and later, bfloat16 passes on TPUs."""
    bandwidth: float
    """Bytes per second, memory to chip."""


DEVICES = {
    "v100": Device(32e9, 125e12, 15.7e12, 0.90e12),
    "a100": Device(80e9, 312e12, 156e12, 2.04e12),
    "h100": Device(80e9, 989e12, 494e12, 3.35e12),
    "h200": Device(141e9, 989e12, 494e12, 4.80e12),
    "v4": Device(32e9, 275e12, 275e12, 1.20e12),
    "v5e": Device(16e9, 197e12, 197e12, 0.82e12),
    "v5p": Device(95e9, 459e12, 459e12, 2.76e12),
    "v6e": Device(32e9, 918e12, 918e12, 1.64e12),
}
"""NVIDIA GPUs (SXM) and TPUs by name."""

CORE = Device(0, 50e9, 50e9, 10e9)
"""One core of a server's CPU, roughly: what `plan.calibrate` replaces by a measurement."""

KINDS = {name: name for name in ("v100", "a100", "h100", "h200")}
KINDS |= {"tpu v4": "v4", "tpu v5": "v5p", "tpu v5 lite": "v5e", "tpu v5e": "v5e", "tpu v6": "v6e"}
"""What JAX calls them, in lower case, the longest match counts."""


USABLE = 0.94
"""Share of a device's memory that a program gets, where the device does not say."""


def find(name: str) -> Device:
    """The device of this name, with the memory that a program gets of it; "" is the one at hand.

    Raises:
      UserError: if it is not known.
    """
    if name in DEVICES:
        return DEVICES[name]._replace(memory=USABLE * DEVICES[name].memory)
    here = jax.local_devices()[0]
    if name == "cpu" or (not name and here.platform == "cpu"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        share = cores / jax.local_device_count()
        rates = share * CORE.matrix, share * CORE.matrix_float32, share * CORE.bandwidth
        return Device(USABLE * host_memory() / jax.local_device_count(), *rates)
    kind = max((key for key in KINDS if key in here.device_kind.lower()), key=len, default="")
    if name or not kind:
        known = f"plan.device={name!r}" if name else f"the device at hand, {here.device_kind},"
        raise UserError(f"config: {known} is not known; plan.device takes {', '.join(DEVICES)}, cpu")
    return DEVICES[KINDS[kind]]._replace(memory=memory())


def memory() -> float:
    """Bytes that a program gets of each device at hand; infinite where the device does not say."""
    here = jax.local_devices()[0]
    if here.platform == "cpu":
        return find("cpu").memory
    return float((here.memory_stats() or {}).get("bytes_limit", math.inf))


def host_memory() -> float:
    """Bytes of this machine's memory, or of the share of it that its container may use."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        return min(total, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total

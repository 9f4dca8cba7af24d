"""Memory and speed of devices: public specifications, and queries of the local machine."""

import math
import os
from pathlib import Path
from typing import NamedTuple

import jax

from branchnorm_jax.errors import UserError


class Device(NamedTuple):
    """Specification of one device."""

    memory: float
    """Memory in bytes."""
    matrix: float
    """Peak FLOP/s of dense matrix products in bfloat16. A V100 has fast products in float16 only."""
    matrix_float32: float
    """Peak FLOP/s in float32 at JAX's default precision: TF32 on Ampere and later, bfloat16 passes on TPUs."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    clock: float = 0.0
    """TPU: cycles per second, which are the peak FLOP/s / (2 x number of multipliers in its matrix units)."""


DEVICES = {
    "v100": Device(32e9, 15.7e12, 15.7e12, 0.90e12),
    "a100": Device(80e9, 312e12, 156e12, 2.04e12),
    "h100": Device(80e9, 989e12, 494e12, 3.35e12),
    "h200": Device(141e9, 989e12, 494e12, 4.80e12),
    "v4": Device(32e9, 275e12, 275e12, 1.20e12, 1.05e9),
    "v5e": Device(16e9, 197e12, 197e12, 0.82e12, 1.50e9),
    "v5p": Device(95e9, 459e12, 459e12, 2.76e12, 1.75e9),
    "v6e": Device(32e9, 918e12, 918e12, 1.64e12, 1.75e9),
}
"""NVIDIA GPUs (SXM) and TPUs by name."""

TPUS = ("v4", "v5e", "v5p", "v6e")

CORE = Device(0, 50e9, 50e9, 10e9)
"""Rough values for one CPU core of a server; `plan.calibrate` measures instead."""

KINDS = {name: name for name in ("v100", "a100", "h100", "h200")}
KINDS |= {"tpu v4": "v4", "tpu v5": "v5p", "tpu v5 lite": "v5e", "tpu v5e": "v5e", "tpu v6": "v6e"}
"""Substring of JAX's device kind, in lower case, -> name of the device. The longest match counts."""


USABLE = 0.94
"""Fraction of the memory that a program can use, if the device does not report it."""


def find(name: str) -> Device:
    """Returns the device with this name and its usable memory; "" is the local one.

    Raises:
      UserError: if the device is unknown.
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
        unknown = f"plan.device={name!r}" if name else f"the local device, {here.device_kind},"
        raise UserError(f"config: {unknown} is not known; set plan.device to one of {', '.join(DEVICES)}, cpu")
    known, reported = DEVICES[KINDS[kind]], memory()
    return known._replace(memory=reported if math.isfinite(reported) else USABLE * known.memory)


def platform(name: str) -> str:
    """Returns the JAX platform of a device: cpu, gpu or tpu; "" is the local device."""
    if not name:
        return jax.default_backend()
    return "cpu" if name == "cpu" else "tpu" if name in TPUS else "gpu"


def memory() -> float:
    """Returns the usable memory of each local device in bytes.

    It is infinite if the device does not report it.
    """
    here = jax.local_devices()[0]
    if here.platform == "cpu":
        return find("cpu").memory
    return float((here.memory_stats() or {}).get("bytes_limit", math.inf))


def host_memory() -> float:
    """Returns the memory of this machine, or of its container, in bytes."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        return min(total, float(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total

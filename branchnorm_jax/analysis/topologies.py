"""Devices that are absent: XLA's compilers for TPUs and NVIDIA GPUs describe them and compile for them anywhere.

| `plan.compile` | devices |
|---|---|
| `v5p:4x4x4` | a TPU slice of 4 x 4 x 4 chips |
| `v5e:4x4:x2` | two slices of 4 x 4 chips, connected by the data-centre network |
| `v5e:1x1` | one chip |
| `h200:8` | one host with 8 GPUs |
| `h100:2x8` | two hosts with 8 GPUs each |
"""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from branchnorm_jax.analysis.devices import DEVICES
from branchnorm_jax.errors import UserError, needs_extra

HERE, NONE = "here", "none"
"""Values of `plan.compile` that name no absent device: compile for this machine, or do not compile."""

AXES = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}
"""TPU -> number of sizes of its topology."""

GPUS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
"""GPU -> the name that its driver reports."""

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

OPTIONS: dict[str, dict[str, Any]] = {"tpu": {}, "cuda": {"xla_gpu_autotune_level": 0}}
"""Options of each compiler. Autotuning would run kernels on the GPU."""

HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: {bandwidth:.0f}
  device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: 9 minor: 0 }}
}}
platform_name: "CUDA"
runtime_version {{ major: 13 minor: 0 }}
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "{name}"
"""
"""What XLA's CUDA compiler has to know of an H100 or H200 (SXM): the limits of compute capability 9.0 in NVIDIA's CUDA
programming guide, and the sizes in NVIDIA's description of the Hopper architecture."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Absent devices."""

    text: str
    """The value of `plan.compile`."""
    device: str
    """Name of the device in `devices.DEVICES`."""
    sizes: tuple[int, ...]
    """TPU: chips of a slice along each axis. GPU: hosts, and GPUs of a host."""
    slices: int

    @property
    def platform(self) -> str:
        """Name of the compiler."""
        return "tpu" if self.device in AXES else "cuda"

    @property
    def count(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes) * self.slices

    @property
    def networks(self) -> tuple[str, str]:
        """Names of the network inside a slice or host and of the network between them."""
        return ("ICI", "DCN between slices") if self.platform == "tpu" else ("NVLink", "network between hosts")


def parse(text: str) -> Target:
    """Reads the value of `plan.compile`.

    Raises:
      UserError: if it names no known devices.

    >>> parse("v5e:4x4:x2").count
    32
    >>> parse("h200:8").sizes
    (1, 8)
    """
    match = re.fullmatch(r"(\w+):([1-9]\d*(?:x[1-9]\d*)*)(?::x([1-9]\d*))?", text)
    if match is None or match[1] not in (*AXES, *GPUS):
        raise UserError(
            f"config: plan.compile={text!r} is neither {HERE}, {NONE} nor a device with its topology, such as "
            f"v5p:4x4x4, v5e:4x4:x2 (two slices), h200:8 or h100:2x8 (two hosts); the devices are "
            f"{', '.join((*AXES, *GPUS))}"
        )
    device, slices = match[1], int(match[3] or 1)
    sizes = tuple(map(int, match[2].split("x")))
    if device in GPUS:
        if len(sizes) > 2 or match[3]:
            raise UserError(f"config: plan.compile={text!r}: write {device}:GPUS or {device}:HOSTSxGPUS")
        return Target(text, device, (*(1,) * (2 - len(sizes)), *sizes), 1)
    if len(sizes) != AXES[device]:
        example = "x".join("4" * AXES[device])
        raise UserError(
            f"config: plan.compile={text!r}: the topology of {device} has {AXES[device]} sizes, such as "
            f"{device}:{example}; write several slices as {device}:{example}:x2"
        )
    return Target(text, device, sizes, slices)


def prepare(target: Target) -> None:
    """Makes sure that nothing looks for real devices. Call it before JAX creates its first array.

    Raises:
      MissingExtraError: if the compiler is not installed.
    """
    found = {"tpu": ("libtpu",), "cuda": PLUGINS}[target.platform]
    extra = "tpu" if target.platform == "tpu" else "gpu"
    with needs_extra(extra, f"plan.compile={target.text}"):
        if not any(map(_installed, found)):
            raise ImportError(f"the package {found[0]} is not installed")
    # Otherwise libtpu asks the metadata server of Google Cloud, and waits for it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Without these two, libtpu prints warnings. The compiler does not use their values.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    # The compiler needs no GPU of this machine, so none has to match the versions of the CUDA libraries.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    jax.config.update("jax_platforms", "cpu")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def absent_devices(target: Target) -> list[Any]:
    """Returns the devices of a target, for a mesh. Programs can be compiled for them, but not run.

    Raises:
      MissingExtraError: if the compiler is not installed.
      UserError: if the compiler does not know this topology.
    """
    prepare(target)
    try:
        return list(_description(target).devices)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"config: plan.compile={target.text!r}: the compiler says: {reason}") from error


def _description(target: Target) -> topologies.TopologyDescription:
    sizes = "x".join(map(str, target.sizes))
    if target.platform == "cuda":
        device = DEVICES[target.device]
        facts = HOPPER.format(bandwidth=device.bandwidth, memory=device.memory, name=GPUS[target.device])
        return topologies.get_topology_desc(platform="cuda", target_config=facts, topology=f"1x{sizes}")
    options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
    if target.device == "v4":
        # Otherwise the two cores of a chip are two devices.
        options["chip_config_name"] = "megacore"
    return topologies.get_topology_desc(f"{target.device}:{sizes}", "tpu", **options)


def domains(devices: list[Any]) -> list[int]:
    """Returns the domain of each device, within which the fast network connects it: its slice (TPU) or host (GPU)."""
    if devices[0].platform == "tpu":
        return [getattr(device, "slice_index", None) or 0 for device in devices]
    return [device.process_index for device in devices]

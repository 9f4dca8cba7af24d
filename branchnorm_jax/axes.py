"""The axes of the device mesh, and the rules that map the axes of arrays to them.

    batches     [rows, length]      rows over data and fsdp
    parameters  [layers, ...]       heads, ffn and vocab over model; another axis over fsdp

The mesh axis `fsdp` splits what is stored: parameters, moments and moving average (ZeRO, Rajbhandari et al., 2020,
arXiv 1910.02054, stage 3). It splits the rows of a batch as well, so each matrix is made whole with `gather` before it
is used, and its gradient is summed over the devices and split again.
"""

import functools
from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

MESH = ("data", "fsdp", "model")
"""Mesh axes from the slowest network to the fastest."""

ROWS = ("data", "fsdp")
"""Mesh axes that split the rows of a batch."""

RULES: Mapping[str, str | None] = {
    **dict.fromkeys(("heads", "ffn", "vocab"), "model"),
    **dict.fromkeys(("embed", "layers", "streams"), None),
}
"""Logical axis of a parameter -> the mesh axis that splits it, if it divides its size."""


def partition(shape: tuple[int, ...], names: tuple[str, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns how a parameter is split over the devices of a mesh.

    `RULES` apply first. Then fsdp splits the first unsplit axis whose size is a multiple of it, other than the axis of
    the layers: along the first axis, the compilers of TPUs sum and split a gradient in one step. Vectors and scalars of
    a layer are small, so they stay whole.

    Args:
      shape: shape of the parameter.
      names: logical name of each axis.
      sizes: size of each mesh axis.

    Raises:
      ValueError: if two axes of the parameter have the same mesh axis.

    >>> partition((6, 64, 256), ("layers", "embed", "ffn"), {"data": 1, "fsdp": 2, "model": 2})
    PartitionSpec(None, 'fsdp', 'model')
    >>> partition((6, 64), ("layers", "embed"), {"data": 1, "fsdp": 2, "model": 2})
    PartitionSpec(None, None)
    """
    split: list[str | None] = []
    for size, name in zip(shape, names, strict=True):
        axis = RULES[name]
        split.append(axis if axis and sizes[axis] > 1 and size % sizes[axis] == 0 else None)
    taken = [axis for axis in split if axis]
    if len(taken) > len(set(taken)):
        raise ValueError(f"a parameter with axes {names} would be split twice over the same mesh axis: {split}")
    own = [index for index, name in enumerate(names) if name != "layers"]
    free = [index for index in own if split[index] is None and shape[index] % sizes["fsdp"] == 0]
    if sizes["fsdp"] > 1 and len(own) > 1 and free:
        split[free[0]] = "fsdp"
    return PartitionSpec(*split)


def gather(x: jax.Array, *names: str) -> jax.Array:
    """Returns a parameter that is whole along fsdp; its cotangent is split again.

    Does nothing outside of `jax.set_mesh` and where fsdp has one device. Within `jax.checkpoint`, the backward pass
    gathers the parameter again instead of storing it whole.

    Args:
      x: the parameter.
      names: logical name of each axis, as in its declaration.
    """
    split = partition(x.shape, names, mesh_sizes())
    return _gather(x, split) if "fsdp" in split else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, split: PartitionSpec) -> jax.Array:
    return _resharded(x, split, _whole(split))


def _forward(x: jax.Array, split: PartitionSpec) -> tuple[jax.Array, None]:
    return _gather(x, split), None


def _backward(split: PartitionSpec, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_resharded(cotangent, _whole(split), split),)


def _whole(split: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in split))


def _resharded(x: jax.Array, before: PartitionSpec, after: PartitionSpec) -> jax.Array:
    # Without the first constraint, the second one would also change how x is computed.
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, before), after)


_gather.defvjp(_forward, _backward)


def mesh_sizes() -> dict[str, int]:
    """Returns the size of each axis of the mesh that `jax.set_mesh` has set; 1 without a mesh."""
    return dict.fromkeys(MESH, 1) | dict(jax.sharding.get_abstract_mesh().shape)


LARGE_GPUS = ("A100", "H100", "H200", "B200", "B300")
"""Parts of the names of GPUs whose processors have at least 164 KB of shared memory. The kernels would not start on
others."""


def platform() -> str:
    """Returns the platform of the mesh that `jax.set_mesh` has set: cpu, gpu, tpu, or "" without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.platform


def kernels(choice: str) -> str:
    """Returns the platform for which the program uses Pallas kernels: gpu, tpu, cpu (interpreted), or "" for none.

    XLA cannot split the work of a Pallas kernel among devices, so "auto" uses them only where the mesh that
    `jax.set_mesh` has set is a single TPU, or one of `LARGE_GPUS`.

    Args:
      choice: the option `model.kernels`.
    """
    if choice == "interpret":
        return "cpu"
    mesh, here = jax.sharding.get_abstract_mesh(), platform()
    if choice == "plain" or here not in ("gpu", "tpu") or mesh.size != 1:
        return ""
    large = here == "tpu" or any(name in mesh.abstract_device.device_kind for name in LARGE_GPUS)
    return here if large else ""


REPLICA = "replica"
"""Name of the `jax.vmap` axis of programs that are written for the rows of one index of data."""


def replica() -> jax.Array | int:
    """Returns the index along `REPLICA`; 0 in programs for all rows."""
    try:
        return jax.lax.axis_index(REPLICA)
    except NameError:
        return 0


def row_shards() -> int:
    """Returns the number of devices that share the rows of an array, in the program that is traced."""
    sizes = mesh_sizes()
    return sizes["fsdp"] * (sizes["data"] if isinstance(replica(), int) else 1)

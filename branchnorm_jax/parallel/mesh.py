"""The (data, fsdp, model) device mesh, and the shardings of arrays on it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from branchnorm_jax.axes import MESH, ROWS, partition
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ParallelConfig


def make_mesh(config: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Creates a (data, fsdp, model) mesh.

    Neighbours along fsdp and model are on the same host and in the same slice where these axes fit there, because data
    needs the network least.

    Args:
      config: sizes of the axes; data=0 means all devices divided by the other axes.
      devices: devices of the mesh; None means all.

    Raises:
      UserError: if the sizes do not match the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    arranged = _arranged(devices, mesh_sizes(config, len(devices)))
    return Mesh(arranged, MESH, axis_types=(AxisType.Auto,) * len(MESH))


def mesh_sizes(config: ParallelConfig, count: int) -> tuple[int, int, int]:
    """Returns the sizes of the axes data, fsdp and model on `count` devices.

    Raises:
      UserError: if they do not match the devices.
    """
    inner = config.fsdp * config.model
    data = config.data or count // inner
    if data * inner != count:
        defaults = ParallelConfig()
        chosen = [
            f"--config.parallel.{name}"
            for name in ("model", "fsdp", "data")
            if getattr(config, name) != getattr(defaults, name)
        ]
        raise UserError(
            f"config: parallel.data={config.data or 'rest'} x parallel.fsdp={config.fsdp} x parallel.model="
            f"{config.model} does not match the {count} devices; their product must be the number of devices: change "
            f"{' or '.join(chosen)} (a run keeps the sizes that it was trained with)"
        )
    return data, config.fsdp, config.model


def _arranged(devices: list[jax.Device], sizes: tuple[int, int, int]) -> np.ndarray:
    """Returns the devices as an array of the mesh's shape."""
    data, *inner = sizes
    # On GPUs, slice_index is the number of the host. There the order of the devices puts data between hosts.
    slices = len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"} or {0})
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if data % slices:
        raise UserError(
            f"config: parallel.data={data} is not a multiple of the {slices} slices; parallel.fsdp x "
            "parallel.model has to fit into a slice"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *inner), (slices, 1, 1), devices, allow_split_physical_axes=True
    )


def row_devices(config: ParallelConfig) -> int:
    """Returns the number of devices that share the rows of a batch: data x fsdp."""
    return config.data * config.fsdp or jax.device_count() // config.model


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device has a full copy of."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array whose first axis is the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def by_device(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array with one element for each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def shard_tree(mesh: Mesh, tree: Any, logical: Any) -> Any:
    """Returns the sharding of each parameter of `tree`; see `axes.partition`.

    Args:
      mesh: the device mesh.
      tree: arrays or their shapes.
      logical: tree of the logical axis names of each leaf.
    """
    return jax.tree.map(
        lambda leaf, names: NamedSharding(mesh, partition(leaf.shape, names, dict(mesh.shape))), tree, logical
    )


def from_processes(mesh: Mesh, value: int) -> jax.Array:
    """Returns int32 [devices] with the `value` of the process that each device belongs to."""
    return jax.make_array_from_callback((mesh.size,), by_device(mesh), lambda _: np.full(1, value, np.int32))


def local_copy(mesh: Mesh, tree: Any) -> Any:
    """Returns global arrays as arrays on one device of this process. All processes must call it together."""
    if not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)):
        tree = jax.jit(lambda tree: tree, out_shardings=replicated(mesh))(tree)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def local_mesh(mesh: Mesh | None = None) -> Mesh:
    """Returns a mesh of the first device of this process in the order of `mesh`, which is that of `local_copy`."""
    return make_mesh(ParallelConfig(), (mesh.local_devices if mesh else jax.local_devices())[:1])


def describe_shardings(mesh: Mesh, state: Any) -> str:
    """Returns a line for users: the mesh, the share of the state on each device, and the largest whole arrays."""
    on_device, whole = 0.0, {}
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for path, leaf in leaves:
        share = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        on_device += share
        if leaf.sharding.is_fully_replicated:
            whole[jax.tree_util.keystr(path, simple=True, separator="/")] = share
    total = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    largest = sorted(whole, key=lambda name: -whole[name])[:3]
    names = ", ".join(f"{name} ({whole[name] / 1e6:,.3f} MB)" for name in largest)
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return (
        f"mesh {sizes}: {100 * on_device / total:.1f} % of the state on each device; "
        f"{sum(whole.values()) / 1e6:,.3f} MB are whole on every device, the largest: {names}"
    )

"""The (data, model) device mesh, and the mapping from logical axes to mesh axes."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ParallelConfig

LOGICAL_RULES: dict[str, str | None] = {
    "batch": "data",
    "heads": "model",
    "ffn": "model",
    "vocab": "model",
    "embed": None,
    "layers": None,
}


def make_mesh(config: ParallelConfig, row_multiple: int) -> Mesh:
    """Creates a (data, model) mesh over all devices.

    Args:
      config: sizes of the axes; data=0 means all devices divided by `model`.
      row_multiple: the number of rows of a microbatch is a multiple of this, and the data axis must divide it; 0
        disables this check.

    Raises:
      UserError: if the sizes do not match the devices or `row_multiple`.
    """
    devices = jax.device_count()
    data = data_size(config)
    if data * config.model != devices:
        raise UserError(
            f"config: parallel.data={config.data or 'rest'} x parallel.model={config.model} does not match the "
            f"{devices} devices; their product must be the number of devices"
        )
    if row_multiple and row_multiple % data:
        raise UserError(
            f"config: {data} data-parallel devices must divide data.row_multiple / train.accumulation = {row_multiple}"
            f"; set data.row_multiple to a multiple of {data} x train.accumulation"
        )
    return jax.make_mesh((data, config.model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def data_size(config: ParallelConfig) -> int:
    """Returns the size of the data axis of the mesh."""
    return config.data or jax.device_count() // config.model


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
    """Returns the sharding of an array from the logical names of its axes.

    None means not sharded.
    """
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_RULES[name] if name else None for name in logical)))


def shard_tree(mesh: Mesh, tree: Any, logical: Any) -> Any:
    """Returns the sharding of each leaf of `tree`.

    Args:
      mesh: the device mesh.
      tree: arrays or their shapes.
      logical: tree of the logical axis names of each leaf. An axis whose size the mesh axis does not divide is not
        sharded.
    """

    def leaf_sharding(leaf: Any, names: tuple[str, ...]) -> NamedSharding:
        fits = (
            name if size % mesh.shape.get(LOGICAL_RULES[name] or "", 1) == 0 else None
            for size, name in zip(leaf.shape, names, strict=True)
        )
        return sharding(mesh, *fits)

    return jax.tree.map(leaf_sharding, tree, logical)


def from_processes(mesh: Mesh, value: int) -> jax.Array:
    """Returns int32 [devices] with the `value` of the process that each device belongs to."""
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size,), split, lambda _: np.full(1, value, np.int32))


def to_devices(mesh: Mesh, batch: Any) -> Any:
    """Converts host arrays [rows, ...] to global arrays sharded over the data axis.

    Every host must pass the same arrays.
    """
    split = sharding(mesh, "batch")
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, split, lambda index: np.asarray(x)[index]), batch
    )

"""Devices as a mesh of two axes, and the one table that says which logical axis lies along which of them."""

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
    """A (data, model) mesh over all devices. Raises `UserError` where the sizes do not fit.

    Args:
      config: sizes of the axes; data=0 takes what `model` leaves.
      row_multiple: rows of a microbatch are a multiple of this, and the data axis must divide it; 0: it need not.
    """
    devices = jax.device_count()
    data = data_size(config)
    if data * config.model != devices:
        raise UserError(
            f"config: parallel.data={config.data or 'rest'} x parallel.model={config.model} does not match the "
            f"{devices} devices"
        )
    if row_multiple and row_multiple % data:
        raise UserError(
            f"config: {data} data-parallel devices must divide data.row_multiple / train.accumulation = {row_multiple}"
            f"; set data.row_multiple to a multiple of {data} x train.accumulation"
        )
    return jax.make_mesh((data, config.model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def data_size(config: ParallelConfig) -> int:
    """Size of the mesh axis that splits batches."""
    return config.data or jax.device_count() // config.model


def sharding(mesh: Mesh, *logical: str | None) -> NamedSharding:
    """The sharding of an array whose axes have these logical names; None is not split."""
    return NamedSharding(mesh, PartitionSpec(*(LOGICAL_RULES[name] if name else None for name in logical)))


def shard_tree(mesh: Mesh, tree: Any, logical: Any) -> Any:
    """The sharding of each leaf of `tree`, given its axis names; an axis that the mesh does not divide stays whole."""

    def leaf_sharding(leaf: Any, names: tuple[str, ...]) -> NamedSharding:
        fits = (
            name if size % mesh.shape.get(LOGICAL_RULES[name] or "", 1) == 0 else None
            for size, name in zip(leaf.shape, names, strict=True)
        )
        return sharding(mesh, *fits)

    return jax.tree.map(leaf_sharding, tree, logical)


def to_devices(mesh: Mesh, batch: Any) -> Any:
    """Host arrays [rows, ...], the same on every host, as global arrays split by rows over the data axis."""
    split = sharding(mesh, "batch")
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, split, lambda index: np.asarray(x)[index]), batch
    )

"""The rows of a batch on the devices: each process makes the rows of its own devices, and no others."""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from branchnorm_jax.axes import MESH, ROWS
from branchnorm_jax.parallel.mesh import by_rows

B = TypeVar("B")
"""A tree of arrays [rows, ...]."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Splits the rows of batches over a mesh. Adds empty rows up to a multiple of `shards` x `parts`.

    Attributes:
      mesh: the device mesh.
      parts: number of parts into which each device divides its rows (`train.accumulation`).
    """

    mesh: Mesh
    parts: int = 1

    @functools.cached_property
    def shards(self) -> int:
        """Number of devices that share the rows."""
        return int(np.prod([self.mesh.shape[axis] for axis in ROWS]))

    @functools.cached_property
    def own(self) -> list[int]:
        """Which of the `shards` are on devices of this process."""
        devices = self.mesh.devices.reshape(self.shards, self.mesh.shape[MESH[-1]])
        here = jax.process_index()
        return [index for index, group in enumerate(devices) if any(device.process_index == here for device in group)]

    def total(self, rows: int) -> int:
        """Returns the number of rows with the empty ones, for a batch of `rows`."""
        multiple = self.shards * self.parts
        return -(-rows // multiple) * multiple

    def indices(self, rows: int) -> np.ndarray:
        """Returns the indices of this process' rows of a batch with `rows` rows. Indices >= `rows` are empty rows."""
        return np.arange(self.total(rows)).reshape(self.shards, -1)[self.own].ravel()

    def take(self, batch: B) -> B:
        """Returns this process' rows of a whole batch."""

        def of(array: np.ndarray) -> np.ndarray:
            empty = np.zeros((self.total(len(array)) - len(array), *array.shape[1:]), array.dtype)
            return np.concatenate([array, empty])[self.indices(len(array))]

        return jax.tree.map(of, batch)

    def put(self, own: Any) -> Any:
        """Makes global arrays from this process' rows of a batch."""
        split = by_rows(self.mesh)

        def of(array: np.ndarray) -> jax.Array:
            total = len(array) // len(self.own) * self.shards
            return jax.make_array_from_process_local_data(split, array, (total, *array.shape[1:]))

        return jax.tree.map(of, own)

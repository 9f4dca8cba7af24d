"""Digests of a train state: a hash for users and tests, and checksums for checkpoints.

Both are sums of integers on the devices. They gather no array, and are equal for any sharding of the state.
"""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.training.state import TrainState

SUMS = 8
"""Number of independent sums of each leaf in a hash."""


def sha256(state: TrainState) -> str:
    """Returns a digest of the parameters, the optimiser state and the moving average, as hexadecimal text.

    It is the SHA-256 hash of the path, the shape, the dtype and `SUMS` weighted sums of the bits of each leaf, in the
    order of the paths.
    """
    tree = (state.params, state.opt_state, state.ema)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sums = np.asarray(_mixed_sums(tree)).T
    digest = hashlib.sha256()
    for line in sorted(
        f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {row.tolist()}\n"
        for (path, leaf), row in zip(leaves, sums, strict=True)
    ):
        digest.update(line.encode())
    return digest.hexdigest()


@jax.jit
def checksums(state: Any) -> jax.Array:
    """Returns a checksum of each leaf in tree order, uint32 [leaves].

    The weights are odd and differ between elements, so any single flipped bit changes the sum. The cost is one pass
    over the state on the devices.
    """
    return jnp.stack([_weighted_sum(leaf) for leaf in jax.tree.leaves(state)])


@jax.jit
def _mixed_sums(tree: Any) -> jax.Array:
    """Returns sums of each leaf with different weights, uint32 [SUMS, leaves]."""

    def sums(seed: jax.Array) -> jax.Array:
        return jnp.stack([_weighted_sum(leaf, seed) for leaf in jax.tree.leaves(tree)])

    return jax.lax.map(sums, jnp.arange(1, SUMS + 1, dtype=jnp.uint32))


@jax.jit  # Leaves with the same shape are traced once.
def _weighted_sum(leaf: jax.Array, seed: jax.Array | None = None) -> jax.Array:
    """Returns the sum of the bits of a leaf, modulo 2^32, with weights that depend on the index and the seed.

    Integer addition is exact in any order.
    """
    weights = jnp.uint32(1)
    for axis, multiplier in zip(range(leaf.ndim), (0x9E3779B2, 0x85EBCA6A, 0xC2B2AE36, 0x27D4EB2E), strict=False):
        weights = weights + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(multiplier)
    if seed is not None:  # Mixes the bits. Without it, the sums of two seeds would be linear functions of each other.
        weights = (weights ^ seed * jnp.uint32(0x9E3779B1)) * jnp.uint32(0x85EBCA6B)
        weights = (weights ^ (weights >> 13)) * jnp.uint32(0xC2B2AE35)
        weights = weights ^ (weights >> 16)
    words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
    return jnp.sum(words * (weights | 1), dtype=jnp.uint32)

"""Digests of a train state: a hash for users and tests, and checksums for checkpoints.

Both are sums of integers on the devices. They gather no array, and are equal for any sharding of the state.
"""

import functools
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
    sums = np.asarray(_weighted_sums(tree, tuple(range(1, SUMS + 1))))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    digest = hashlib.sha256()
    for line in sorted(
        f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {row.tolist()}\n"
        for (path, leaf), row in zip(leaves, sums, strict=True)
    ):
        digest.update(line.encode())
    return digest.hexdigest()


def checksums(state: Any) -> jax.Array:
    """Returns a checksum of each leaf in tree order, uint32 [leaves].

    The weights are odd and differ between elements, so any single flipped bit changes the sum. The cost is one pass
    over the state on the devices.
    """
    return _weighted_sums(state, (0,))[:, 0]


@functools.partial(jax.jit, static_argnums=1)
def _weighted_sums(tree: Any, seeds: tuple[int, ...]) -> jax.Array:
    """Returns sums of the bits of each leaf, modulo 2^32, with weights that depend on the index and the seed.

    The result is uint32 [leaves, seeds]. Integer addition is exact in any order.
    """

    def weights(shape: tuple[int, ...], seed: int) -> jax.Array:
        index = jnp.uint32(1)
        for axis, multiplier in zip(range(len(shape)), (0x9E3779B2, 0x85EBCA6A, 0xC2B2AE36, 0x27D4EB2E), strict=False):
            index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(multiplier)
        if seed:  # Mixes the bits. Without it, the sums of two seeds would be linear functions of each other.
            index = (index ^ jnp.uint32(seed * 0x9E3779B1 & 0xFFFFFFFF)) * jnp.uint32(0x85EBCA6B)
            index = (index ^ (index >> 13)) * jnp.uint32(0xC2B2AE35)
            index = index ^ (index >> 16)
        return index | 1

    def sums(leaf: jax.Array) -> jax.Array:
        if leaf.dtype.itemsize == 4:
            words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        else:
            words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        return jnp.stack([jnp.sum(words * weights(leaf.shape, seed), dtype=jnp.uint32) for seed in seeds])

    return jnp.stack([sums(leaf) for leaf in jax.tree.leaves(tree)])

"""Digests of a train state: a SHA-256 hash for users and tests, and checksums on the device for checkpoints."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.training.state import TrainState


def sha256(state: TrainState) -> str:
    """Returns the hex digest of the parameters, the optimiser state and the moving average.

    The leaves are hashed in the order of their paths.
    """
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state, state.ema))
    for path, leaf in sorted((jax.tree_util.keystr(path), leaf) for path, leaf in leaves):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


@jax.jit
def checksums(state: Any) -> jax.Array:
    """Returns a checksum of each leaf in tree order: a weighted sum of its bits modulo 2^32, uint32 [leaves].

    The weights are odd and differ between elements, so any single flipped bit changes the sum. Integer addition is
    exact in any order, so the sums do not depend on the sharding of the state. The cost is one pass over the state on
    the device.
    """

    def checksum(leaf: jax.Array) -> jax.Array:
        if leaf.dtype.itemsize == 4:
            words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        else:
            words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        weights = jnp.uint32(1)
        for axis, multiplier in zip(range(leaf.ndim), (0x9E3779B2, 0x85EBCA6A, 0xC2B2AE36, 0x27D4EB2E), strict=False):
            weights = weights + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(multiplier)
        return jnp.sum(words * (weights | 1), dtype=jnp.uint32)

    return jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(state)])

"""Dropout as a pure function of a key and of each element's index: no mask is stored."""

import enum
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.axes import replica


class Site(enum.IntEnum):
    """Where in a layer dropout is applied. The number is folded into the layer's key."""

    SELF_BRANCH = 0
    CROSS_BRANCH = 1
    FFN_BRANCH = 2
    SELF_PROBABILITIES = 3
    CROSS_PROBABILITIES = 4
    FFN_ACTIVATION = 5


def site_key(key: jax.Array | None, site: int) -> jax.Array | None:
    """Returns the key of one site; None (no dropout) if `key` is None."""
    return None if key is None else jax.random.fold_in(key, site)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets each element to 0 with probability `rate` and divides the others by 1 - rate.

    Does nothing if `key` is None. The mask is a hash of the key and the element's index, about ten integer operations.
    XLA fuses them into the surrounding loop, and the backward pass repeats them, so the mask needs no memory. The mask
    does not depend on loop or scan, remat, a resume or the sharding of the array.
    """
    return x if key is None or rate == 0.0 else _drop(rate, x, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _drop(rate: float, x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(dropped(rate, x.shape, key), 0, x / (1 - rate)).astype(x.dtype)


def _forward(rate: float, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _drop(rate, x, key), key


def _backward(rate: float, key: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, Any]:
    return _drop(rate, cotangent, key), np.zeros(key.shape, jax.dtypes.float0)


_drop.defvjp(_forward, _backward)


def dropped(rate: float, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Returns a mask that is True with probability `rate`. The first axis of `shape` is the rows of a batch."""
    return random_bits(key, shape) < drop_threshold(rate)


def drop_threshold(rate: float) -> np.uint32:
    """Returns the number below which a share `rate` of all uint32 numbers lies."""
    return np.uint32(min(round(rate * 2**32), 2**32 - 1))


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a hash of the key and each element's index in the whole batch, uint32."""
    index, stride = jnp.uint32(replica()) * np.uint32(math.prod(shape) % 2**32), 1
    for axis in reversed(range(len(shape))):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    halves = jax.random.key_data(key)
    return hash_bits(index, halves[0], halves[-1])


def seed_of(key: jax.Array | None, size: int) -> jax.Array:
    """Returns what a kernel needs for the hash of `random_bits`, uint32 [3].

    These are the two halves of the key (0 without a key), and the index of the first of `size` elements in the whole
    batch.
    """
    halves = jnp.zeros(2, jnp.uint32) if key is None else jax.random.key_data(key)
    return jnp.stack([halves[0], halves[-1], jnp.uint32(replica()) * np.uint32(size % 2**32)])


def dropped_at(index: jax.Array, seed: tuple[jax.Array, jax.Array, jax.Array], rate: float) -> jax.Array:
    """Returns the mask of `dropped` at indices that count from a kernel's first element; `seed`: see `seed_of`."""
    return hash_bits(index + seed[2], seed[0], seed[1]) < drop_threshold(rate)


def hash_bits(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns a hash of numbers and of the two halves of a key, uint32.

    There are two rounds, each with one half of the key. After a single round, the masks of two keys would differ only
    in the order of their elements. The hash is good enough for masks, not for cryptography.
    """
    return _mix(_mix(index ^ first) + second)


def _mix(x: jax.Array) -> jax.Array:
    """Applies Wellons's integer hash lowbias32: each input bit flips each output bit about half of the time."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)

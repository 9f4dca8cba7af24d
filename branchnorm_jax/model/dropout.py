"""Dropout as a pure function of a key, so that loop, scan, remat and resume draw the same bits."""

import enum

import jax
import jax.numpy as jnp


class Site(enum.IntEnum):
    """Where in a layer a mask is drawn: folded into the layer's key."""

    SELF_BRANCH = 0
    CROSS_BRANCH = 1
    FFN_BRANCH = 2
    SELF_PROBABILITIES = 3
    CROSS_PROBABILITIES = 4
    FFN_ACTIVATION = 5


def site_key(key: jax.Array | None, site: int) -> jax.Array | None:
    """The key of one site; None (no dropout) stays None."""
    return None if key is None else jax.random.fold_in(key, site)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes each element with probability `rate` and divides the others by 1 - rate; the identity without a key.

    One 32-bit random word serves two elements, since drawing bits is what dropout costs: the rate is therefore a
    multiple of 2^-16, and the divisor is exact for the rate so rounded.
    """
    if key is None or rate == 0.0:
        return x
    threshold = round(rate * 2**16)
    words = jax.random.bits(key, (*x.shape[:-1], -(-x.shape[-1] // 2)), jnp.uint32)
    halves = jnp.stack([words & 0xFFFF, words >> 16], axis=-1).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    keep = halves >= threshold
    return jnp.where(keep, x / (1 - threshold / 2**16), 0).astype(x.dtype)

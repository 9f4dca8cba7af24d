"""Examples of attention for the tests of its kernels."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.tokens import EOS, PAD

B = 2

Arrays = tuple[jax.Array, ...]


def packed(length: int) -> jax.Array:
    """Returns rows [B, length] of three sentences each, with padding at the end."""
    tokens = np.full((B, length), 7)
    tokens[0, [length // 4, length // 2, length - 4]] = EOS
    tokens[1, [2, length // 3, length - 1]] = EOS
    tokens[0, length - 3 :] = PAD
    return jnp.array(tokens)


def example(length: int, keys: int, heads: int, width: int, dtype: jnp.dtype = jnp.float32) -> Arrays:
    """Returns q, k, v and the cotangent of the output."""
    draw = np.random.default_rng(length + keys).normal
    return tuple(jnp.array(draw(size=(B, size, heads, width)), dtype) for size in (length, keys, keys, length))


def shapes(arrays: Arrays) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of the queries and of the keys."""
    q, k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:2])
    return q, k


def results(function: Callable[..., jax.Array], arrays: Arrays, mask: jax.Array, rate: float = 0.0) -> Arrays:
    """Returns the output and the gradients of q, k and v."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Arrays:
        y, backward = jax.vjp(lambda *qkv: function(*qkv, mask, rate, jax.random.key(5)), q, k, v)
        return y, *backward(dy)

    return run(*arrays)


def errors(actual: Arrays, expected: Arrays, size: Callable[[np.ndarray], np.floating] = np.max) -> list[float]:
    """Returns the size of each array's differences, divided by the size of the expected values."""
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(actual, expected, strict=True)]
    return [float(size(abs(x - y)) / size(abs(y))) for x, y in pairs]

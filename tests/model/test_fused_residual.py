"""The fused residual addition equals its plain twin, interpreted on this machine."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.axes import REPLICA
from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.fused_residual import Weights, fused_residual, supported
from branchnorm_jax.model.norms import layer_norm

ROWS, LENGTH, WIDTH = 16, 32, 128


def inputs(dtype: Any, seed: int = 0) -> tuple[jax.Array, jax.Array, Weights, jax.Array]:
    """Returns x, h, the weights and the gradient of y."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    shape = ROWS, LENGTH, WIDTH
    weights = Weights(jnp.float32(0.7), jnp.float32(1.3), normal(WIDTH).astype(jnp.float32), normal(WIDTH))
    return normal(*shape), normal(*shape), weights._replace(bias=weights.bias.astype(jnp.float32)), normal(*shape)


def plain(x: jax.Array, h: jax.Array, weights: Weights, rate: float, key: jax.Array | None) -> jax.Array:
    exact = jnp.promote_types(x.dtype, jnp.float32)
    y = weights.skip * x.astype(exact) + weights.branch * dropout(h.astype(exact), rate, key)
    return layer_norm(y, weights.scale, weights.bias).astype(x.dtype)


def both(dtype: Any, rate: float, key: jax.Array | None) -> tuple[list[Any], list[Any]]:
    """Returns y and the gradients of x, h and the weights: of the twin, and of the kernel."""
    x, h, weights, by_y = inputs(dtype)
    results = []
    for function in (plain, functools.partial(fused_residual, "cpu")):
        run = jax.jit(lambda *args, function=function: function(*args, rate, key))
        y, gradient = jax.vjp(run, x, h, weights)
        results.append(jax.tree.leaves((y, gradient(by_y))))
    return results[0], results[1]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_equals_the_twin_in_float32(rate: float) -> None:
    """The gradients of a and b are sums of 65,536 numbers, whose rounding errors grow with its root."""
    y, *gradients = zip(*both(jnp.float32, rate, jax.random.key(3)), strict=True)
    for expected, result in (y, *gradients):
        limit = 2.0**-24 * 256 if expected.ndim == 0 else 1e-6
        assert float(jnp.abs(result - expected).max() / jnp.abs(expected).max()) < limit


@pytest.mark.slow
def test_is_as_near_to_float64_as_the_twin_with_narrow_inputs() -> None:
    """float16 stream and bfloat16 branch: errors are the rounding of the results, and not larger than the twin's."""
    x, h, weights, by_y = inputs(jnp.float32)
    x, h, by_y = x.astype(jnp.float16), h.astype(jnp.bfloat16), by_y.astype(jnp.float16)
    key = jax.random.key(1)

    def error(function: Any) -> list[float]:
        y, gradient = jax.vjp(lambda *args: function(*args, 0.1, key), x, h, weights)
        ours = jax.tree.leaves((y, gradient(by_y)))
        return [float(np.abs(np.asarray(a, float) - b).max()) for a, b in zip(ours, exact, strict=True)]

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (x, h, weights))
        y, gradient = jax.vjp(lambda x, h, weights: plain(x, h, weights, 0.1, key), *wide)
        exact = [np.asarray(leaf) for leaf in jax.tree.leaves((y, gradient(by_y.astype(jnp.float64))))]
    for ours, twin, value in zip(error(functools.partial(fused_residual, "cpu")), error(plain), exact, strict=True):
        # a and b have sums of 65,536 numbers as gradients, whose rounding errors in float32 grow with its root.
        assert ours <= 1.01 * twin + 2.0**-24 * 256 * np.abs(value).max()


def test_mask_depends_on_the_replica() -> None:
    """Each replica of a mesh has its own masks, those of the twin."""
    x, h, weights, _ = inputs(jnp.float32)

    def split(function: Any) -> jax.Array:
        run = functools.partial(function, weights=weights, rate=0.5, key=jax.random.key(0))
        halves = [array.reshape(2, -1, *array.shape[1:]) for array in (x, h)]
        return jax.vmap(lambda x, h: run(x, h), axis_name=REPLICA)(*halves)

    fused = functools.partial(fused_residual, "cpu")
    np.testing.assert_allclose(split(fused), split(plain), rtol=1e-5, atol=1e-5)


def test_supported_shapes() -> None:
    weights = inputs(jnp.float32)[2]
    stream = jnp.zeros((8, 16, 512), jnp.float16)
    assert supported("gpu", stream, weights)
    assert not supported("", stream, weights)
    assert not supported("tpu", stream, weights)
    assert not supported("gpu", stream[..., :384], weights)
    assert not supported("gpu", stream[:3], weights)
    assert not supported("gpu", stream, weights._replace(branch=jnp.ones(512)))

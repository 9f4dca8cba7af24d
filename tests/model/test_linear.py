"""Compares the matrix product and its derivatives with their formulas in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.linear import product as joint_product
from branchnorm_jax.model.linear import spread

AXES = "embed", "ffn"


def product(x: jax.Array, *kernels: jax.Array, again: bool = True) -> jax.Array:
    return joint_product(x, kernels, AXES, again)


@pytest.mark.parametrize("leading", [(), (5,), (3, 4), (2, 3, 4)])
def test_derivatives_of_the_product_equal_their_formulas(leading: tuple[int, ...]) -> None:
    """Reverse mode sums over all tokens; forward mode is (dx) W + x (dW)."""
    draw = np.random.default_rng(len(leading)).normal
    x, kernel, cotangent = draw(size=(*leading, 6)), draw(size=(6, 7)), draw(size=(*leading, 7))
    x_change, kernel_change = draw(size=x.shape), draw(size=kernel.shape)
    arguments = tuple(jnp.asarray(value, jnp.float32) for value in (x, kernel))
    y, pull = jax.vjp(product, *arguments)
    by_x, by_kernel = pull(jnp.asarray(cotangent, jnp.float32))
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_x, cotangent @ kernel.T, rtol=1e-5, atol=1e-5)
    expected = np.zeros_like(kernel)
    for index in np.ndindex(*leading):
        expected += np.outer(x[index], cotangent[index])
    np.testing.assert_allclose(by_kernel, expected, rtol=1e-5, atol=1e-5)
    changes = tuple(jnp.asarray(value, jnp.float32) for value in (x_change, kernel_change))
    _, change = jax.jvp(product, arguments, changes)
    np.testing.assert_allclose(change, x_change @ kernel + x @ kernel_change, rtol=1e-5, atol=1e-5)


def test_per_example_gradients_and_second_derivatives() -> None:
    """d/dW of |x W|^2 / 2 is x^T x W; per example by vmap, and its directional derivative x^T x V."""
    draw = np.random.default_rng(0).normal
    x, kernel, direction = draw(size=(4, 3, 6)), draw(size=(6, 7)), draw(size=(6, 7))

    def gradient(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return jax.grad(lambda kernel: 0.5 * jnp.square(product(x, kernel)).sum())(kernel)

    each = jax.vmap(gradient, (None, 0))(jnp.asarray(kernel, jnp.float32), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(each, np.einsum("btd,bte,ef->bdf", x, x, kernel), rtol=1e-4, atol=1e-4)
    arguments = (jnp.asarray(kernel, jnp.float32),), (jnp.asarray(direction, jnp.float32),)
    _, second = jax.jvp(lambda kernel: gradient(kernel, jnp.asarray(x, jnp.float32)), *arguments)
    np.testing.assert_allclose(second, np.einsum("btd,bte,ef->df", x, x, direction), rtol=1e-4, atol=1e-4)


def test_backward_pass_stores_the_input_itself() -> None:
    """Several products of one input share the stored array. A reshaped copy for each would need more memory."""
    x, kernel = jnp.ones((3, 5, 6)), jnp.ones((6, 7))
    pull = jax.vjp(lambda kernel: product(x, kernel), kernel)[1]
    assert any(leaf is x for leaf in jax.tree.leaves(pull))
    assert not any(leaf.shape == (15, 6) for leaf in jax.tree.leaves(pull))


@pytest.mark.parametrize("again", [True, False])
def test_products_of_several_matrices_stand_side_by_side(again: bool) -> None:
    draw = np.random.default_rng(0).normal
    x, first, second = (jnp.asarray(draw(size=size), jnp.float32) for size in ((2, 3, 6), (6, 7), (6, 2)))
    y, pull = jax.vjp(functools.partial(product, again=again), x, first, second)
    np.testing.assert_allclose(y, np.concatenate([x @ first, x @ second], axis=-1), rtol=1e-5, atol=1e-5)
    cotangent = draw(size=y.shape)
    _, by_first, by_second = pull(jnp.asarray(cotangent, jnp.float32))
    expected = np.einsum("btd,bte->de", x, cotangent)
    np.testing.assert_allclose(np.concatenate([by_first, by_second], axis=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("again", [True, False])
def test_backward_pass_stores_either_the_parameters_or_what_it_multiplies_by(again: bool) -> None:
    x, kernels = jnp.ones((3, 5, 6), jnp.bfloat16), (jnp.ones((6, 7)), jnp.ones((6, 7)))
    stored = jax.tree.leaves(jax.vjp(functools.partial(product, again=again), x, *kernels)[1])
    parameters = sum(kernel.nbytes for kernel in kernels)
    assert sum(leaf.nbytes for leaf in stored) == x.nbytes + (parameters if again else parameters // 2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(), (7,), (5, 1)])
def test_the_gradient_of_a_spread_parameter_is_a_float32_sum(shape: tuple[int, ...], dtype: jnp.dtype) -> None:
    """A sum of 100,000 in bfloat16 would stop at 256 times its terms, and one in float16 would overflow."""
    draw = np.random.default_rng(0)
    parameter = jnp.asarray(draw.normal(size=shape), jnp.float32)
    cotangent = jnp.asarray(draw.uniform(5, 15, size=(10_000, 5, 7)), dtype)
    y, pull = jax.vjp(lambda parameter: spread(parameter, cotangent.shape, dtype), parameter)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, np.broadcast_to(parameter.astype(dtype), y.shape))
    (by_parameter,) = pull(cotangent)
    axes = {(): (0, 1, 2), (7,): (0, 1), (5, 1): (0, 2)}[shape]
    assert by_parameter.dtype == jnp.float32
    expected = np.asarray(cotangent, np.float64).sum(axes).reshape(shape)
    np.testing.assert_allclose(by_parameter, expected, rtol=1e-4)
    _, change = jax.jvp(lambda parameter: spread(parameter, y.shape, dtype), (parameter,), (2 * parameter,))
    np.testing.assert_allclose(np.asarray(change, np.float32), 2 * np.asarray(y, np.float32), rtol=1e-2)

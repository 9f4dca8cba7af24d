"""Compares the matrix product and its derivatives with their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.linear import product


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

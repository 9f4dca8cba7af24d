"""The toy network: gradient descent compared with automatic differentiation, and the paper's claim."""

import jax
import numpy as np
import pytest

from experiments import toy


@pytest.mark.parametrize(("rezero", "rate"), [(False, 0.0017), (True, 0.01)])
def test_updates_are_those_of_gradient_descent_with_jax(rezero: bool, rate: float) -> None:
    depth = 4

    def cost(a: float, w: float) -> float:
        return 0.5 * ((1 + a * w) ** depth - toy.TARGET) ** 2

    slopes = jax.grad(cost, argnums=(0, 1))
    updates = 0
    with jax.enable_x64(True):
        a, w = np.float64(0.0 if rezero else 1.0), np.float64(1.0)
        while cost(a, w) >= toy.COST:
            by_a, by_w = slopes(a, w)
            a, w, updates = (a - rate * by_a if rezero else a), w - rate * by_w, updates + 1
    assert 5 < updates < 100
    # A tiny rate never arrives.
    assert toy.updates_needed(rezero, depth, np.array([rate, 1e-60])).tolist() == [updates, np.inf]


def test_residual_networks_need_exponentially_many_updates_and_rezero_does_not() -> None:
    residual, rezero = (
        [toy.updates_needed(method, depth, toy.RATES).min() for depth in (2, 4, 8)] for method in (False, True)
    )
    assert residual[1] > 4 * residual[0] and residual[2] > 16 * residual[1]
    assert max(rezero) < 10

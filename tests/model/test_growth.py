"""Compares alpha per layer and update with the papers' formulas, and depth rules with closed forms."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.model import growth
from branchnorm_jax.model.recipe import Depth
from branchnorm_jax.options import ModelConfig

T, LAYERS = 24, {"encoder": 6, "decoder": 4}


def by_update(**options: Any) -> dict[str, np.ndarray]:
    """Returns alpha of every layer after 0 to T + 5 updates, [T + 6, L]."""
    config = ModelConfig(encoder_layers=6, decoder_layers=4, alpha_steps=T, **options)
    alphas: Any = jax.jit(jax.vmap(growth.alpha(config)))(jnp.arange(T + 6))
    return {stack: np.asarray(values, np.float64) for stack, values in alphas.items()}


def clip(x: float) -> float:
    return min(max(x, 0.0), 1.0)


# As printed in the paper: T is the first layer's warm-up, and l starts at 1.
PRORES: dict[str, Callable[[float, int, int, float], float]] = {
    "equal": lambda t, l, L, T: min(t / (T * L), 1),
    "linear": lambda t, l, L, T: min(t / (T * l), 1),
    "linear_sqrt": lambda t, l, L, T: min(t / (T * l), 1) ** 0.5,
    "linear_square": lambda t, l, L, T: min(t / (T * l), 1) ** 2,
    "reverse": lambda t, l, L, T: min(t / (T * (L - l + 1)), 1),
    "stagewise_0": lambda t, l, L, T: clip((t - T * (l - 1)) / T),
    "stagewise_L": lambda t, l, L, T: clip((t - T * (l - 1)) / T) * (1 - 1 / L) + 1 / L,
    "stagewise_sqrt_L": lambda t, l, L, T: clip((t - T * (l - 1)) / T) * (1 - 1 / math.sqrt(L)) + 1 / math.sqrt(L),
    "stagewise_sqrt_l": lambda t, l, L, T: clip((t - T * (l - 1)) / T) * (1 - 1 / math.sqrt(l)) + 1 / math.sqrt(l),
    "fix_L": lambda t, l, L, T: 1 / L,
    "fix_sqrt_L": lambda t, l, L, T: 1 / math.sqrt(L),
    "fix_sqrt_l": lambda t, l, L, T: 1 / math.sqrt(l),
}


@pytest.mark.parametrize("order", PRORES)
def test_orders_equal_progressive_residual_warmup(order: str) -> None:
    for stack, alphas in by_update(alpha_order=order).items():
        layers = LAYERS[stack]
        expected = [[PRORES[order](t, l, layers, T / layers) for l in range(1, layers + 1)] for t in range(T + 6)]
        np.testing.assert_allclose(alphas, expected, atol=1e-6)


def test_constant_orders_ignore_start_and_end() -> None:
    """Otherwise the recommended end of a method would make alpha grow."""
    for stack, alphas in by_update(alpha_order="fix_L", alpha_start="0", alpha_end="16/sqrt(n)").items():
        np.testing.assert_allclose(alphas, np.full_like(alphas, 1 / LAYERS[stack]), rtol=1e-6)


def test_every_order_is_tested() -> None:
    # training/test_schedules.py tests the last three.
    assert set(growth.ORDERS) == {*PRORES, "bottom_up", "top_down", "progressive"}


def test_equal_order_is_branchnorm_alpha_bit_for_bit() -> None:
    """alpha is min(1, t / T) in float32 in every layer."""
    alpha = jax.jit(growth.alpha(ModelConfig(alpha_steps=T, alpha_order="equal", alpha_start="0", alpha_end="1")))
    paper = jax.jit(lambda t: jnp.minimum(1.0, t.astype(jnp.float32) / T))
    for t in range(T + 6):
        alphas = alpha(jnp.int32(t))
        for values in alphas.values():
            assert values.shape == (6,) and values.dtype == jnp.float32
            np.testing.assert_array_equal(values, paper(jnp.int32(t)))


@pytest.mark.parametrize("kind", ["linear", "exp", "sigmoid"])
def test_start_and_end_rescale_alpha(kind: str) -> None:
    plain, rescaled = by_update(alpha_schedule=kind), by_update(alpha_schedule=kind, alpha_start="0.1", alpha_end="0.7")
    for stack in LAYERS:
        np.testing.assert_allclose(rescaled[stack], 0.1 + 0.6 * plain[stack], atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "encoder", "decoder"),
    [
        ("0.25", [0.25] * 4, [0.25] * 3),
        ("1e-2", [0.01] * 4, [0.01] * 3),
        ("1/n", [1 / 8] * 4, [1 / 9] * 3),
        ("2/sqrt(n)", [2 / math.sqrt(8)] * 4, [2 / 3] * 3),
        ("1.5/cbrt(n)", [1.5 / 2] * 4, [1.5 / 9 ** (1 / 3)] * 3),
        ("1/L", [1 / 4] * 4, [1 / 3] * 3),
        ("1/l", [1, 1 / 2, 1 / 3, 1 / 4], [1, 1 / 2, 1 / 3]),
        ("1/sqrt(l)", [1, 1 / math.sqrt(2), 1 / math.sqrt(3), 1 / 2], [1, 1 / math.sqrt(2), 1 / math.sqrt(3)]),
        ("6/sqrt(n)", [1] * 4, [1] * 3),  # 6 / sqrt(8) is above 1
        # 0.81 (N^4 M)^(1/16) and (3M)^(1/4) with N = 4, M = 3.
        ("deepnorm", [1 / (0.81 * (4**4 * 3) ** (1 / 16))] * 4, [9**-0.25] * 3),
    ],
)
def test_depth_rules_equal_their_closed_forms(rule: str, encoder: list[float], decoder: list[float]) -> None:
    for stack, expected in (("encoder", encoder), ("decoder", decoder)):
        np.testing.assert_allclose(growth.levels(rule, Depth(4, 3), stack), expected, rtol=1e-12)


def test_levels_are_at_most_1() -> None:
    """DeepNorm's skip weight of a shallow encoder is 0.81."""
    assert growth.levels("deepnorm", Depth(1, 1), "encoder").tolist() == [1.0]


@pytest.mark.parametrize("rule", ["", "-1", "1.5", "1/k", "6/sqrt(n", "6/sqrtn", "6/n)", "6/cbrt(n", "half", "nan"])
def test_invalid_depth_rules_are_rejected(rule: str) -> None:
    with pytest.raises(UserError, match="1/sqrt"):
        growth.levels(rule, Depth(4, 3), "encoder")


def test_shrinking_alpha_is_rejected() -> None:
    with pytest.raises(UserError, match=r"alpha cannot shrink: at 6L-6L model\.alpha_start=0\.5"):
        growth.alpha(ModelConfig(alpha_start="0.5", alpha_end="1/n"))


@pytest.mark.parametrize(
    ("options", "closed"),
    [
        ({}, False),
        ({"alpha_order": "linear"}, False),
        ({"alpha_order": "stagewise_0"}, True),
        ({"alpha_order": "stagewise_L"}, False),
        ({"alpha_order": "bottom_up"}, True),
        ({"alpha_order": "bottom_up", "alpha_stagger": 0.0}, False),
        ({"alpha_order": "bottom_up", "alpha_start": "0.1"}, False),
    ],
)
def test_starts_closed_detects_layers_that_wait(options: dict[str, Any], closed: bool) -> None:
    """Some layers wait if, at some update, alpha is 0 in one layer and above 0 in another."""
    config = ModelConfig(encoder_layers=6, decoder_layers=4, alpha_steps=T, **options)
    assert growth.starts_closed(config) == closed
    alphas = np.concatenate(list(by_update(**options).values()), axis=1)
    assert bool(((alphas == 0).any(1) & (alphas > 0).any(1)).any()) == closed

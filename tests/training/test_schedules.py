"""Learning rates and alpha at the values that the papers' code gives."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ModelConfig, TrainConfig
from branchnorm_jax.training import schedules


def at(schedule: Callable[[jax.Array], Any], *steps: int) -> list[float]:
    return [float(jax.jit(schedule)(jnp.int32(step))) for step in steps]


def test_inverse_sqrt_is_fairseqs() -> None:
    train = TrainConfig(learning_rate=5e-4, warmup_steps=4000, warmup_init=1e-7)
    found = at(schedules.learning_rate(train, 512), 0, 1, 2000, 4000, 16000, 100_000)
    np.testing.assert_allclose(found, [1e-7, 2.24975e-7, 2.5005e-4, 5e-4, 2.5e-4, 1e-4], rtol=1e-5)


def test_inverse_sqrt_without_warmup() -> None:
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0)
    np.testing.assert_allclose(at(schedules.learning_rate(train, 512), 0, 1, 4), [1e-3, 1e-3, 5e-4], rtol=1e-6)


@pytest.mark.parametrize(
    ("factor", "warmup", "step", "expected"),
    [
        (1, 8000, 1, 6.1763e-8),
        (1, 8000, 8000, 4.94106e-4),
        (1, 8000, 32000, 2.47053e-4),
        (2, 8000, 8000, 9.88212e-4),
        (1, 4000, 4000, 6.98771e-4),
    ],
)
def test_noam(factor: float, warmup: int, step: int, expected: float) -> None:
    train = TrainConfig(schedule="noam", learning_rate=factor, warmup_steps=warmup)
    np.testing.assert_allclose(at(schedules.learning_rate(train, 512), step - 1), [expected], rtol=1e-5)


def test_constant_after_warmup() -> None:
    train = TrainConfig(schedule="constant", learning_rate=3e-4, warmup_steps=10, warmup_init=0.0)
    np.testing.assert_allclose(at(schedules.learning_rate(train, 8), 0, 5, 10, 999), [0, 1.5e-4, 3e-4, 3e-4], rtol=1e-6)


def test_t_fixups_schedule_needs_no_warmup() -> None:
    train = TrainConfig(schedule="inverse_sqrt_nowarmup", learning_rate=5e-4, decay_steps=4000, warmup_steps=77)
    found = at(schedules.learning_rate(train, 512), 0, 4000, 12000)
    np.testing.assert_allclose(found, [5e-4, 3.53553e-4, 2.5e-4], rtol=1e-5)


def test_polynomial() -> None:
    train = TrainConfig(
        schedule="polynomial",
        learning_rate=1.0,
        warmup_steps=10,
        warmup_init=0.0,
        decay_steps=110,
        decay_power=2.0,
        end_learning_rate=0.2,
    )
    expected = [0.5, 1.0, 0.2 + 0.8 * 0.5**2, 0.2, 0.2]
    np.testing.assert_allclose(at(schedules.learning_rate(train, 8), 5, 10, 60, 110, 500), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("scores", "shrinks"),
    [
        ([5, 6, 7], False),
        ([5, 6, 7, 4], True),
        ([5, 6, 7, 5], False),
        ([9, 5, 6, 7, 6], False),
        ([1, 8, 9, 10, 7], True),
    ],
)
def test_val_decay(scores: list[float], shrinks: bool) -> None:
    assert schedules.val_decay(scores, 3) == shrinks


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [0.25, 0.5, 0.75]), ("exp", [0.1892, 0.4142, 0.6818]), ("sigmoid", [0.0701, 0.5, 0.9299])],
)
def test_alpha(kind: str, expected: list[float]) -> None:
    alpha = schedules.alpha(ModelConfig(alpha_schedule=kind, alpha_steps=4000))
    np.testing.assert_allclose(at(alpha, 1000, 2000, 3000), expected, atol=5e-5)
    assert at(alpha, 0, 4000, 4001, 100_000) == [0.0, 1.0, 1.0, 1.0]
    steps = np.array(at(alpha, *range(0, 4001, 250)))
    assert (np.diff(steps) > 0).all()


def test_alpha_of_one_step_is_one_after_the_first_update() -> None:
    assert at(schedules.alpha(ModelConfig(alpha_steps=1)), 0, 1, 2) == [0.0, 1.0, 1.0]


def test_unknown_schedule() -> None:
    with pytest.raises(UserError, match="inverse_sqrt"):
        schedules.learning_rate(TrainConfig(schedule="cosine"), 8)


def test_adaptive_alpha_waits_while_a_layer_has_no_gradient() -> None:
    """Grows by 1 / T, stays for `alpha_hold` updates after each update with a weak layer, and is 1 at the most."""
    model = ModelConfig(alpha_schedule="adaptive", alpha_steps=4, alpha_floor=0.1, alpha_hold=3)
    tick, alpha = jax.jit(schedules.tick(model)), schedules.alpha(model)
    good, weak, lost = ([1.0, 0.1], [1.0, 0.09], [float("nan"), 1.0])
    clock, held, found = jnp.int32(0), jnp.int32(0), []
    for gradient in [good, good, weak, good, good, good, good, lost, good, good, good, good]:
        clock, held = tick(clock, held, {"encoder": jnp.zeros(5), "decoder": jnp.array(gradient)})
        found += at(alpha, int(clock))
    assert found == [0.25, 0.5, 0.5, 0.5, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("held", "clock"), [(0, 4), (1, 3), (3, 1), (100, 0)])
def test_the_papers_schedules_do_not_listen_but_may_be_held(held: int, clock: int) -> None:
    tick = schedules.tick(ModelConfig(alpha_schedule="linear", alpha_steps=4))
    dead = {"encoder": jnp.zeros(3), "decoder": jnp.array([0.0, 1.0])}
    now, left = jnp.int32(0), jnp.int32(held)
    for _ in range(4):
        now, left = tick(now, left, dead)
    assert (int(now), int(left)) == (clock, max(0, held - 4))


@pytest.mark.parametrize(
    ("order", "layers", "expected"),
    [
        ("bottom_up", 5, [0, 1, 2, 3, 4]),
        ("top_down", 5, [4, 3, 2, 1, 0]),
        # Bits reversed: 0, 4, 2, 6, 1, 5, 3, 7.
        ("progressive", 8, [0, 4, 2, 6, 1, 5, 3, 7]),
        ("progressive", 6, [0, 3, 2, 5, 1, 4]),
        ("progressive", 1, [0]),
    ],
)
def test_order(order: str, layers: int, expected: list[int]) -> None:
    np.testing.assert_allclose(schedules.order(order, layers), np.array(expected) / max(1, layers - 1), rtol=1e-6)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    layers=st.integers(1, 40),
    total=st.integers(1, 300),
    stagger=st.floats(0, 0.99),
    order=st.sampled_from(["bottom_up", "top_down", "progressive"]),
    shape=st.sampled_from(["linear", "exp", "sigmoid"]),
)
def test_staggered_alpha(layers: int, total: int, stagger: float, order: str, shape: str) -> None:
    """0 at first, 1 at T, never falling, in the order of the ranks; without stagger the schedule of all."""
    model = ModelConfig(
        encoder_layers=layers,
        decoder_layers=3,
        alpha_steps=total,
        alpha_order=order,
        alpha_stagger=stagger,
        alpha_schedule=shape,
    )
    schedule: Any = jax.vmap(schedules.alpha(model))
    by_step = np.asarray(schedule(jnp.arange(total + 2))["encoder"])
    assert by_step.shape == (total + 2, layers)
    assert (by_step[0] == 0).all() and (by_step[total:] == 1).all()
    # But for the last digit of a float32.
    assert (np.diff(by_step, axis=0) >= -1e-6).all()
    first_to_last = np.argsort(schedules.order(order, layers))
    assert (np.diff(by_step[:, first_to_last], axis=1) <= 1e-6).all()
    same: Any = jax.vmap(schedules.alpha(dataclasses.replace(model, alpha_order="uniform")))
    uniform = np.asarray(same(jnp.arange(total + 2)))
    assert (by_step[:, first_to_last[0]] >= uniform - 1e-6).all()
    if layers > 1:
        assert (by_step[:, first_to_last[-1]] <= uniform + 1e-6).all()


def test_adaptive_alpha_does_not_ask_layers_that_wait() -> None:
    model = ModelConfig(
        encoder_layers=4,
        decoder_layers=4,
        alpha_schedule="adaptive",
        alpha_order="bottom_up",
        alpha_steps=8,
        alpha_floor=0.1,
        alpha_hold=3,
    )
    tick, alpha = schedules.tick(model), schedules.alpha(model)
    # At u = 2 of 8 the layers of rank 0 and 1/3 have begun.
    assert [float(x) > 0 for x in alpha(jnp.int32(2))["encoder"]] == [True, True, False, False]
    for gradient, expected in (([1.0, 0.5, 0.0, 0.0], 3), ([1.0, 0.01, 0.0, 0.0], 2)):
        layers = {"encoder": jnp.ones(4), "decoder": jnp.array(gradient)}
        assert int(tick(jnp.int32(2), jnp.int32(0), layers)[0]) == expected

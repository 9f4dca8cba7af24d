"""Compares learning rates and alpha with the values from the papers' code."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.config import from_config_dict
from branchnorm_jax.errors import UserError
from branchnorm_jax.model import growth
from branchnorm_jax.options import Config, ModelConfig, TrainConfig
from branchnorm_jax.training import schedules
from configs import ted


def at(schedule: Callable[[jax.Array], Any], *steps: int) -> list[float]:
    return [float(jax.jit(schedule)(jnp.int32(step))) for step in steps]


def top_layer(model: ModelConfig) -> Callable[[jax.Array], jax.Array]:
    """Returns alpha of the decoder's last layer as a function of the clock."""
    return lambda clock: growth.alpha(model)(clock)["decoder"][-1]


def test_inverse_sqrt_equals_fairseq() -> None:
    train = TrainConfig(learning_rate=5e-4, warmup_steps=4000, warmup_init=1e-7)
    rates = at(schedules.learning_rate(train, 512), 0, 1, 2000, 4000, 16000, 100_000)
    np.testing.assert_allclose(rates, [1e-7, 2.24975e-7, 2.5005e-4, 5e-4, 2.5e-4, 1e-4], rtol=1e-5)


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
def test_noam_schedule(factor: float, warmup: int, step: int, expected: float) -> None:
    train = TrainConfig(schedule="noam", learning_rate=factor, warmup_steps=warmup)
    np.testing.assert_allclose(at(schedules.learning_rate(train, 512), step - 1), [expected], rtol=1e-5)


def test_constant_after_warmup() -> None:
    train = TrainConfig(schedule="constant", learning_rate=3e-4, warmup_steps=10, warmup_init=0.0)
    np.testing.assert_allclose(at(schedules.learning_rate(train, 8), 0, 5, 10, 999), [0, 1.5e-4, 3e-4, 3e-4], rtol=1e-6)


def test_inverse_sqrt_nowarmup_ignores_the_warmup() -> None:
    train = TrainConfig(schedule="inverse_sqrt_nowarmup", learning_rate=5e-4, decay_steps=4000, warmup_steps=77)
    rates = at(schedules.learning_rate(train, 512), 0, 4000, 12000)
    np.testing.assert_allclose(rates, [5e-4, 3.53553e-4, 2.5e-4], rtol=1e-5)


def test_polynomial_schedule() -> None:
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


def test_ted_config_follows_equation_7_of_transformers_without_tears() -> None:
    """lambda D^-1/2 min(n^-1/2, n W^-3/2) with lambda = 1, W = 8000, at n = step + 1."""
    config = from_config_dict(ted.get_config("6L-6L"))
    updates = np.array([0, 1, 100, 4000, 7999, 8000, 32_000, 119_999])
    n = updates + 1.0
    expected = config.model.width**-0.5 * np.minimum(n**-0.5, n * 8000**-1.5)
    rates = at(schedules.learning_rate(config.train, config.model.width), *updates.tolist())
    np.testing.assert_allclose(rates, expected, rtol=5e-3)


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
def test_val_decay_compares_the_last_score_with_the_previous_ones(scores: list[float], shrinks: bool) -> None:
    assert schedules.val_decay(scores, 3) == shrinks


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [0.25, 0.5, 0.75]), ("exp", [0.1892, 0.4142, 0.6818]), ("sigmoid", [0.0701, 0.5, 0.9299])],
)
def test_alpha_schedules(kind: str, expected: list[float]) -> None:
    alpha = top_layer(ModelConfig(alpha_schedule=kind, alpha_steps=4000))
    np.testing.assert_allclose(at(alpha, 1000, 2000, 3000), expected, atol=5e-5)
    assert at(alpha, 0, 4000, 4001, 100_000) == [0.0, 1.0, 1.0, 1.0]
    steps = np.array(at(alpha, *range(0, 4001, 250)))
    assert (np.diff(steps) > 0).all()


def test_alpha_with_one_step_is_one_after_the_first_update() -> None:
    assert at(top_layer(ModelConfig(alpha_steps=1)), 0, 1, 2) == [0.0, 1.0, 1.0]


def test_range_test_schedule_is_geometric() -> None:
    """One tenth of the way through three decades multiplies the rate by 10^0.3."""
    train = TrainConfig(schedule="range_test", learning_rate=1e-2, warmup_steps=100, warmup_init=1e-5)
    rates = at(schedules.learning_rate(train, 8), 0, 10, 50, 100)
    np.testing.assert_allclose(rates, [1e-5, 1e-5 * 10**0.3, 10**-3.5, 1e-2], rtol=1e-5)


@pytest.mark.parametrize("name", schedules.LEARNING_RATES)
def test_peak_is_the_largest_rate_up_to_the_end_of_the_warm_up(name: str) -> None:
    train = TrainConfig(schedule=name, learning_rate=0.3, warmup_steps=40, decay_steps=90)
    rates = jax.vmap(schedules.learning_rate(train, 64))(jnp.arange(41))
    assert schedules.peak(train, 64) == pytest.approx(float(rates.max()), rel=1e-5)


def test_unknown_schedules_are_rejected() -> None:
    with pytest.raises(UserError, match="inverse_sqrt"):
        schedules.learning_rate(TrainConfig(schedule="cosine"), 8)


def test_adaptive_alpha_waits_while_a_layer_has_a_weak_gradient() -> None:
    """alpha grows by 1 / T up to 1, and is constant for `alpha_hold` updates after an update with a weak layer."""
    model = ModelConfig(alpha_schedule="adaptive", alpha_steps=4, alpha_floor=0.1, alpha_hold=3)
    tick, alpha = jax.jit(schedules.tick(model)), top_layer(model)
    good, weak, lost = ([1.0, 0.1], [1.0, 0.09], [float("nan"), 1.0])
    clock, held, alphas = jnp.int32(0), jnp.int32(0), []
    for gradient in [good, good, weak, good, good, good, good, lost, good, good, good, good]:
        clock, held = tick(clock, held, {"encoder": jnp.zeros(5), "decoder": jnp.array(gradient)})
        alphas += at(alpha, int(clock))
    assert alphas == [0.25, 0.5, 0.5, 0.5, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("held", "clock"), [(0, 4), (1, 3), (3, 1), (100, 0)])
def test_other_schedules_ignore_gradients_but_can_be_held(held: int, clock: int) -> None:
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
def test_ranks_of_staggered_orders(order: str, layers: int, expected: list[int]) -> None:
    """With a stagger of 1/2, the layer of rank r starts at r T / 2."""
    assert ranks(order, layers) == expected


def ranks(order: str, layers: int) -> list[int]:
    """Ranks of the encoder's layers by the start of their alpha; 0 starts first."""
    total = 1000
    model = ModelConfig(encoder_layers=layers, decoder_layers=2, alpha_steps=total, alpha_order=order)
    schedule: Any = jax.vmap(growth.alpha(model))
    by_step = np.asarray(schedule(jnp.arange(total + 1))["encoder"])
    starts = (by_step == 0).sum(0)
    np.testing.assert_allclose(starts, 1 + np.argsort(np.argsort(starts)) / max(1, layers - 1) * total / 2, atol=1)
    return np.argsort(np.argsort(starts)).tolist()


@pytest.mark.slow
@settings(max_examples=20)
@given(
    layers=st.integers(1, 40),
    total=st.integers(1, 300),
    stagger=st.floats(0, 0.99),
    order=st.sampled_from(["bottom_up", "top_down", "progressive"]),
    shape=st.sampled_from(["linear", "exp", "sigmoid"]),
)
def test_staggered_alpha_follows_the_ranks(layers: int, total: int, stagger: float, order: str, shape: str) -> None:
    """alpha is 0 at first and 1 at T, never falls and follows the ranks. Without stagger all layers are equal."""
    model = ModelConfig(
        encoder_layers=layers,
        decoder_layers=3,
        alpha_steps=total,
        alpha_order=order,
        alpha_stagger=stagger,
        alpha_schedule=shape,
    )
    schedule: Any = jax.vmap(growth.alpha(model))
    by_step = np.asarray(schedule(jnp.arange(total + 2))["encoder"])
    assert by_step.shape == (total + 2, layers)
    assert (by_step[0] == 0).all() and (by_step[total:] == 1).all()
    # The tolerance covers the last digit of a float32.
    assert (np.diff(by_step, axis=0) >= -1e-6).all()
    first_to_last = np.argsort(ranks(order, layers))
    assert (np.diff(by_step[:, first_to_last], axis=1) <= 1e-6).all()
    same: Any = jax.vmap(growth.alpha(dataclasses.replace(model, alpha_order="equal")))
    uniform = np.asarray(same(jnp.arange(total + 2))["encoder"])[:, 0]
    assert (by_step[:, first_to_last[0]] >= uniform - 1e-6).all()
    if layers > 1:
        assert (by_step[:, first_to_last[-1]] <= uniform + 1e-6).all()


def test_adaptive_alpha_ignores_layers_that_wait() -> None:
    model = ModelConfig(
        encoder_layers=4,
        decoder_layers=4,
        alpha_schedule="adaptive",
        alpha_order="bottom_up",
        alpha_steps=8,
        alpha_floor=0.1,
        alpha_hold=3,
    )
    tick, alpha = schedules.tick(model), growth.alpha(model)
    # At u = 2 of 8, the layers of ranks 0 and 1/3 have started.
    assert [float(x) > 0 for x in alpha(jnp.int32(2))["encoder"]] == [True, True, False, False]
    for gradient, expected in (([1.0, 0.5, 0.0, 0.0], 3), ([1.0, 0.01, 0.0, 0.0], 2)):
        layers = {"encoder": jnp.ones(4), "decoder": jnp.array(gradient)}
        assert int(tick(jnp.int32(2), jnp.int32(0), layers)[0]) == expected


@pytest.mark.parametrize(("method", "encoder", "decoder"), [("completep", 1, 1), ("depth_mup", 0.5, 2**-0.5)])
def test_rates_of_layers_follow_the_depth(method: str, encoder: float, decoder: float) -> None:
    """They are multiplied by m^(p - 1); m is 4 in the encoder and 2 in the decoder."""
    config = Config(model=ModelConfig(method=method, encoder_layers=12, decoder_layers=6, base_layers=3))
    result = schedules.rates(config)(jnp.int32(0), {}, jnp.float32(0.01))
    np.testing.assert_allclose([result["encoder"], result["decoder"]], [0.01 * encoder, 0.01 * decoder], rtol=1e-6)
    assert set(result) == {"encoder", "decoder"}


def test_rates_of_layers_follow_alpha_and_the_encoder_factor() -> None:
    """The rate is rate x alpha_l^p. The encoder multiplies it by its own factor for the first updates."""
    alpha = {"encoder": jnp.array([0.2, 0.5]), "decoder": jnp.array([0.0, 0.3, 1.0])}
    config = Config(
        model=ModelConfig(encoder_layers=2, decoder_layers=3),
        train=TrainConfig(branch_update_power=2.0, encoder_rate=0.1, encoder_rate_steps=5),
    )
    rates = schedules.rates(config)
    for step, factor in ((0, 0.1), (4, 0.1), (5, 1.0)):
        result = rates(jnp.int32(step), alpha, jnp.float32(0.01))
        np.testing.assert_allclose(result["encoder"], 0.01 * factor * np.array([0.04, 0.25]), rtol=1e-6)
        np.testing.assert_allclose(result["decoder"], 0.01 * np.array([0.0, 0.09, 1.0]), rtol=1e-6)


@pytest.mark.parametrize("method", ["post_ln", "deepnorm", "rezero"])
def test_rates_are_not_scaled_if_no_branch_grows(method: str) -> None:
    config = Config(model=ModelConfig(method=method), train=TrainConfig(branch_update_power=2.0))
    result = schedules.rates(config)(jnp.int32(0), jnp.float32(0.1), jnp.float32(0.01))
    assert {name: rate.tolist() for name, rate in result.items()} == dict.fromkeys(
        ("encoder", "decoder"), float(np.float32(0.01))
    )


def test_frozen_parts_are_those_of_the_model() -> None:
    train = TrainConfig(freeze="encoder, embedding")
    schedules.check_frozen(Config(train=train))
    assert {"encoder", "encoder_norm", "embedding"} < {*schedules.frozen_parts(train)}
    with pytest.raises(UserError, match="encoder is not one of decoder, embedding"):
        schedules.check_frozen(Config(ModelConfig(family="decoder", encoder_layers=0), train=train))


def test_a_rate_that_is_0_before_the_last_update_is_refused() -> None:
    train = TrainConfig(schedule="polynomial", decay_steps=100)
    for options, updates in (
        (train, 100),
        (dataclasses.replace(train, end_learning_rate=1e-5), 101),
        (dataclasses.replace(train, schedule="inverse_sqrt"), 101),
    ):
        assert schedules.with_end(options, updates) == options
    with pytest.raises(UserError, match=r"is 0 from update 100 on, but the run has 101.*train.decay_steps=101"):
        schedules.with_end(train, 101)


def test_without_decay_steps_the_decay_ends_with_the_run() -> None:
    options = schedules.with_end(TrainConfig(schedule="polynomial", warmup_steps=10, decay_steps=0), 50)
    rate = schedules.learning_rate(options, 512)
    assert [float(rate(jnp.int32(step))) == 0 for step in (30, 49, 50)] == [False, False, True]


SHORT: dict[str, dict[str, Any]] = {"train": {"warmup_steps": 100, "decay_steps": 1000}, "model": {"alpha_steps": 50}}
"""Alpha has grown when half of the warm-up is over."""


@pytest.mark.parametrize(
    ("train", "model", "updates", "clock", "found"),
    [
        ({}, {}, 1000, 0, ["alpha grows faster"]),
        ({}, {}, 1000, 49, ["alpha grows faster"]),
        ({}, {}, 1000, 50, []),
        ({}, {"alpha_steps": 100}, 1000, 0, []),
        ({}, {"alpha_steps": 100}, 100, 0, []),
        ({}, {"alpha_steps": 101}, 100, 0, ["alpha does not reach its end"]),
        ({"branch_update_power": 2.0}, {"alpha_steps": 199, "encoder_layers": 144}, 1000, 0, ["by default 200"]),
        ({"branch_update_power": 2.0}, {"alpha_steps": 200, "encoder_layers": 144}, 1000, 0, []),
        ({}, {"alpha_steps": 100, "encoder_layers": 144}, 1000, 0, []),
        ({}, {"alpha_start": "1", "alpha_end": "1"}, 1000, 0, []),
        ({}, {"alpha_order": "linear"}, 1000, 0, []),
        ({}, {"method": "pre_ln"}, 1000, 0, []),
        ({}, {"family": "decoder"}, 1000, 0, []),
        ({"schedule": "inverse_sqrt_nowarmup"}, {}, 50, 0, []),
        ({"warmup_init": 0.0}, {"method": "pre_ln"}, 25, 0, ["in its warm-up: at the end.* reached 25.0% of its peak"]),
        ({}, {"method": "pre_ln"}, 100, 0, []),
    ],
)
def test_doubts(train: dict[str, Any], model: dict[str, Any], updates: int, clock: int, found: list[str]) -> None:
    options = Config(
        train=TrainConfig(**{**SHORT["train"], "learning_rate": 1e-3, **train}),
        model=ModelConfig(**{**SHORT["model"], **model}),
    )
    lines = schedules.doubts(options, updates, 0, clock)
    assert len(lines) == len(found)
    assert all(re.search(*pair) for pair in zip(found, lines, strict=True)), lines


def test_doubts_of_resumed_and_fine_tuned_runs() -> None:
    """Alpha goes on where it was, and a run keeps its warm-up."""
    options = Config(train=TrainConfig(**SHORT["train"]), model=ModelConfig(method="branchnorm", alpha_steps=200))
    (line,) = schedules.doubts(options, 120, 20, 20)
    assert "at 120 of model.alpha_steps=200 updates; raise train.steps, or start another run with a lower" in line
    assert not schedules.doubts(options, 120, 0, 200)
    (line,) = schedules.doubts(options, 120, 0, 60)
    assert "at 180 of model.alpha_steps=200 updates; choose a lower" in line
    warmup = schedules.doubts(options, 50, 10, 200)
    assert [("in its warm-up" in line, "start another run" in line) for line in warmup] == [(True, True)]

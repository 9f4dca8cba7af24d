"""Compares updating each layer in the backward pass with updating all layers at once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.config import from_config_dict
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig, ParallelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training.loop import check_names
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, init_state
from branchnorm_jax.training.step import Metrics, make_train_step

MODEL = ModelConfig(
    encoder_layers=6, decoder_layers=4, width=32, ffn_width=64, heads=2, alpha_steps=40, attention_dropout=0.1
)
TRAIN = TrainConfig(steps=20, learning_rate=1e-3, warmup_steps=5)
BATCH = Batch(*jax.random.randint(jax.random.key(1), (2, 8, 12), 3, 60))


def compiled(model: ModelConfig, train: TrainConfig) -> tuple[Any, TrainState]:
    """Returns the compiled update and the state before the first update."""
    config = Config(model=model, train=train)
    network, optimizer = Transformer(model, 60, 60), make_optimizer(train)
    state = init_state(network, optimizer, make_mesh(ParallelConfig()), 0, BATCH)
    return jax.jit(make_train_step(network, optimizer, config), donate_argnums=0).lower(state, BATCH).compile(), state


def train(model: ModelConfig, train: TrainConfig) -> tuple[TrainState, Metrics]:
    """Returns the state after 20 updates and the metrics of the last update."""
    step, state = compiled(model, train)
    for _ in range(20):
        state, metrics = step(state, BATCH)
    return jax.device_get((state, metrics))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer", "remat", "changes"),
    [
        ("branchnorm", "adamw", "nested", {"group": 2, "alpha_order": "bottom_up", "shared_embeddings": "none"}),
        ("branchnorm", "adamw", "full", {}),
        ("pre_ln", "lamb", "nested", {}),
        ("pre_ln", "adamw", "full", {"positions": "relative", "head_width": 6, "decoder_start": "pad"}),
        ("admin", "radam", "full", {"carry_dtype": "float16"}),
        ("residual_dual", "adagrad", "full", {"alpha_schedule": "adaptive"}),
    ],
)
def test_updates_in_the_backward_pass_equal_updates_after_it(
    method: str, optimizer: str, remat: str, changes: dict[str, Any]
) -> None:
    """Runs 20 updates with dropout and compares every parameter, moment and metric, layer by layer.

    Adam divides by the size of the gradient. Some gradients are 0 in theory, as for the biases of the keys, and Adam
    turns their rounding errors into updates. With an epsilon above these errors, only rounding differences remain.
    """
    model = dataclasses.replace(MODEL, method=method, remat=remat, **changes)
    power = 2.0 if changes.get("alpha_order") else 0.0
    options = dataclasses.replace(TRAIN, optimizer=optimizer, adam_eps=1e-4, branch_update_power=power)
    (expected, by_all), (result, by_layer) = (
        train(model, dataclasses.replace(options, update_in_backward=backward)) for backward in (False, True)
    )
    rounding = 1e-3 if "carry_dtype" in changes else 2e-6
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=rounding), result.params, expected.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=rounding * max(1, np.abs(b).max())),
        result.opt_state,
        expected.opt_state,
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=500 * rounding, atol=1e-6), by_layer, by_all)
    assert int(result.step) == 20 and int(result.clock) == int(expected.clock)


@pytest.mark.slow
def test_gradients_need_no_memory() -> None:
    """The compiled update peaks at 12 bytes per parameter, for parameters and moments, instead of 16."""
    wide = dataclasses.replace(MODEL, width=64, ffn_width=256, encoder_layers=12, decoder_layers=12, remat="full")

    def peak(backward: bool) -> int:
        memory = compiled(wide, dataclasses.replace(TRAIN, update_in_backward=backward))[0].memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes + new

    assert peak(True) < 0.8 * peak(False)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"remat": "none"}},
        {"train": {"clip_norm": 1.0}},
        {"train": {"accumulation": 2}},
        {"train": {"nonfinite": "skip"}},
        {"train": {"spike": "skip"}},
        {"model": {"unroll": 2}},
        {"model": {"remat": "nested", "group": 4}},
        {"model": {"remat": "auto", "group": 4}},
    ],
)
def test_unsupported_options_are_rejected(changes: dict[str, dict[str, Any]]) -> None:
    good: dict[str, Any] = {"model": {"remat": "full"}, "train": {"update_in_backward": True}}
    from_config_dict(good)
    bad = {section: values | changes.get(section, {}) for section, values in good.items()}
    with pytest.raises(UserError, match="update_in_backward needs"):
        from_config_dict(bad)


def test_methods_that_combine_all_layers_are_rejected() -> None:
    config = Config(model=ModelConfig(method="dlcl", remat="full"), train=TrainConfig(update_in_backward=True))
    with pytest.raises(UserError, match="dlcl"):
        check_names(config)


@pytest.mark.slow
def test_updates_in_the_backward_pass_are_exact_in_float64() -> None:
    """Differences are far below one unit in the last place of a float32, with Adam's usual epsilon."""
    with jax.enable_x64(True):
        model = dataclasses.replace(MODEL, dtype="float64", carry_dtype="float64", dropout=0.0, attention_dropout=0.0)

        def run(backward: bool) -> Any:
            config = Config(
                model=dataclasses.replace(model, remat="full"),
                train=dataclasses.replace(TRAIN, update_in_backward=backward),
            )
            network, optimizer = Transformer(config.model, 60, 60), make_optimizer(config.train)
            state = init_state(network, optimizer, make_mesh(ParallelConfig()), 0, BATCH)
            double = jax.tree.map(lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, state)
            step = jax.jit(make_train_step(network, optimizer, config))
            for _ in range(20):
                double, _ = step(double, BATCH)
            return double.params

        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), run(True), run(False))

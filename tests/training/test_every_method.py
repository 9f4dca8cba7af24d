"""Every method trains, saves, resumes, decodes with a cache, and gives the same results in a loop and a scan."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branchnorm_jax.model import growth
from branchnorm_jax.model.depth_rules import layer_power
from branchnorm_jax.model.incremental import unstack_decoder
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.recipe import ONE, ZERO, Recipe, Weight, always
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig, ParallelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.tokens import PAD
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.digests import sha256
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, abstract_state, init_state
from branchnorm_jax.training.step import Metrics, make_train_step
from tests.decoding.cached import cached_logits

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def batch(family: str) -> Batch:
    """Sixteen sentences to memorise; some are padded."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(3, 20, (2, 16, 6))
    source[:, -1] = target[:, -1] = 1
    source[::3, 3:] = target[::4, 4:] = 0
    source[::3, 2] = target[::4, 3] = 1
    source, target = jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)
    return Batch(decoder_inputs(target) if family == "decoder" else source, target)


def make(method: str, family: str) -> tuple[Config, Transformer, Any, Any]:
    """Returns config, model, optimiser and abstract state of a tiny run with all kinds of dropout."""
    layers = 4 if METHODS[method].post_layers else 2
    model = ModelConfig(
        method=method,
        family=family,
        encoder_layers=0 if family == "decoder" else layers,
        decoder_layers=layers if family == "decoder" else 2,
        width=16,
        ffn_width=24,
        heads=2,
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        alpha_steps=20,
    )
    train = TrainConfig(learning_rate=4e-3, warmup_steps=5, warmup_init=1e-3, schedule="constant", batch_tokens=96)
    config = Config(model=model, train=train)
    optimizer = make_optimizer(train)
    network = Transformer(model, 20, 20)
    return config, network, optimizer, abstract_state(network, optimizer, make_mesh(ParallelConfig()))


class Results(NamedTuple):
    """The results for one method."""

    losses: list[float]
    """The nll of each of 50 updates on one batch."""
    resumes: bool
    """Whether training from the checkpoint of update 25 ends with the same digest."""
    cache_error: float
    """Largest difference of cached logits from teacher forcing, relative to the largest logit."""
    loss_error: float
    """Relative difference in loss between a loop over the layers and the scan."""
    gradient_error: float
    """Largest difference in gradient between loop and scan, relative to the gradient norm."""

    @property
    def learns(self) -> bool:
        """Whether every loss is finite and the last five are on average at least 10% below the first five."""
        return bool(np.isfinite(self.losses).all() and np.mean(self.losses[-5:]) < 0.9 * np.mean(self.losses[:5]))


def try_method(method: str, family: str, directory: Path) -> Results:
    """Trains, saves, resumes and decodes, and compares the loop with the scan."""
    config, model, optimizer, abstract = make(method, family)
    data = batch(family)
    fresh = state = init_state(model, optimizer, make_mesh(ParallelConfig()), 0, data)
    train_step: Any = jax.jit(make_train_step(model, optimizer, config)).lower(abstract, data).compile()
    losses, checkpoints = [], Checkpoints(directory / "checkpoints", config.train, print)
    for step in range(50):
        if step == 25:
            checkpoints.save(state, jnp.float32(0.5), {"half": True}, None)
            checkpoints.wait()
        state, metrics = train_step(state, data)
        losses.append(float(metrics.nll))
    restored = checkpoints.restore_latest(abstract)
    checkpoints.close()
    assert restored is not None and restored[1] == {"half": True}
    resumed = restored[0]
    for _ in range(25):
        resumed, _ = train_step(resumed, data)
    return Results(
        losses,
        sha256(resumed) == sha256(state),
        cache_error(model, state.params, data),
        *loop_errors(
            train_step, make_train_step(model, optimizer, config), dataclasses.replace(fresh, params=state.params), data
        ),
    )


def cache_error(model: Transformer, params: Any, data: Batch) -> float:
    """Compares cached decoding, with stacked and unstacked layers, with teacher forcing while alpha grows."""
    alpha = growth.alpha(model.config)(jnp.int32(13))
    inputs = decoder_inputs(data.target)
    expected = model(params, data.source, inputs, alpha)
    both = (
        cached_logits(model, each, data.source, inputs, alpha)[:, 0]
        for each in (params, unstack_decoder(model, params))
    )
    real = data.target != PAD
    return max(float(jnp.abs(cached - expected)[real].max() / jnp.abs(expected)[real].max()) for cached in both)


def loop_errors(scan: Step, loop: Step, fresh: TrainState, data: Batch) -> tuple[float, float]:
    """Errors in loss and gradient between loop and scan, for one update with the same dropout masks.

    After one update of a fresh optimiser, the first moments equal the gradient times 1 - b1.
    """
    placement = fresh.step.sharding
    at = dataclasses.replace(
        fresh, step=jax.device_put(jnp.int32(7), placement), clock=jax.device_put(jnp.int32(7), placement)
    )
    with jax.disable_jit():  # a scan is a Python loop there
        looped, loop_metrics = loop(at, data)
    scanned, scan_metrics = scan(at, data)
    ours, theirs = (optax.tree.get(state.opt_state, "mu") for state in (looped, scanned))
    difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), ours, theirs)
    loss_error = abs(float(loop_metrics.loss / scan_metrics.loss) - 1)
    return loss_error, max(jax.tree.leaves(difference)) / float(optax.tree.norm(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("method", METHODS)
def test_method_trains_resumes_and_decodes(method: str, family: str, tmp_path: Path) -> None:
    results = try_method(method, family, tmp_path)
    assert results.learns, results.losses
    assert results.resumes
    assert results.cache_error <= 1e-5
    assert results.loss_error <= 1e-6
    assert results.gradient_error <= 1e-6


@pytest.mark.slow
def test_new_methods_need_only_one_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Adds one recipe: the branch weight grows with alpha, and the skip weight is learned per layer."""
    recipe = Recipe(
        equation="x' = RMS(a x + alpha_t LN(F(x))), a learned from 1 / sqrt(l)",
        citation="this test",
        post=True,
        branch_norm=frozenset({"ffn"}),
        skip=Weight(layer_power(-0.5), learned="layer"),
        branch=Weight(start=ZERO, end=ONE),
        gain={"o": always(0.5)},
    )
    monkeypatch.setitem(METHODS, "new", recipe)
    results = try_method("new", "encoder_decoder", tmp_path)
    assert results.learns and results.resumes
    assert results.cache_error <= 1e-5 and results.loss_error <= 1e-6 and results.gradient_error <= 1e-6

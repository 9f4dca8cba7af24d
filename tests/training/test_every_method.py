"""The whole matrix: every method trains, saves, resumes, decodes with a cache, and is the same as loop and as scan."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branchnorm_jax.model.depth_rules import layer_power
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.recipe import ONE, ZERO, Recipe, Weight, always
from branchnorm_jax.model.transformer import Transformer, decoder_inputs, source_mask
from branchnorm_jax.options import Config, ModelConfig, ParallelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training import schedules
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, abstract_state, init_state, sha256
from branchnorm_jax.training.step import Metrics, make_train_step
from tests.reference.algebra import every_method

Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def batch() -> Batch:
    """Sixteen sentences to be learnt by heart; some are padded."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(3, 20, (2, 16, 6))
    source[:, -1] = target[:, -1] = 1
    source[::3, 3:] = target[::4, 4:] = 0
    source[::3, 2] = target[::4, 3] = 1
    return Batch(jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32))


def make(method: str) -> tuple[Config, Transformer, Any, Any]:
    """Config, model, optimiser and abstract state of a tiny run with dropout everywhere."""
    model = ModelConfig(
        method=method,
        encoder_layers=4 if METHODS[method].post_layers else 2,
        decoder_layers=2,
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
    return config, network, optimizer, abstract_state(network, optimizer, make_mesh(ParallelConfig(), 0))


@pytest.mark.parametrize("method", every_method())
def test_method(method: str, tmp_path: Path) -> None:
    config, model, optimizer, abstract = make(method)
    data = batch()
    state = init_state(model, optimizer, make_mesh(ParallelConfig(), 0), 0, data)
    fresh = state
    train_step: Any = jax.jit(make_train_step(model, optimizer, config)).lower(abstract, data).compile()
    eager_step = make_train_step(in_a_loop(model), optimizer, config)

    # It trains, and every loss is finite.
    losses, checkpoints = [], Checkpoints(tmp_path / "checkpoints", config.train, print)
    for step in range(50):
        if step == 25:
            checkpoints.save(state, {"half": True}, None)
            checkpoints.wait()
        state, metrics = train_step(state, data)
        losses.append(float(metrics.nll))
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])

    # What was saved half way goes on to the same end.
    restored = checkpoints.restore_latest(abstract)
    checkpoints.close()
    assert restored is not None and restored[1] == {"half": True}
    resumed = restored[0]
    for _ in range(25):
        resumed, _ = train_step(resumed, data)
    assert sha256(resumed) == sha256(state)

    check_cache(in_a_loop(model), state.params, data)
    check_loop(train_step, eager_step, fresh, state, data)


def in_a_loop(model: Transformer) -> Transformer:
    """The same network layer by layer: without jit nothing needs to be compiled, and nothing is fused."""
    return dataclasses.replace(model, config=dataclasses.replace(model.config, scan=False))


def check_cache(model: Transformer, params: Any, data: Batch) -> None:
    """Token by token with a cache, the logits are those of teacher forcing, at a growing alpha too."""
    alpha = schedules.alpha(model.config)(jnp.int32(13))
    inputs = decoder_inputs(data.target)

    memory, mask = model.encode(params, data.source, alpha), source_mask(data.source)
    cache = model.start_cache(params, memory, len(inputs), 8)
    expected = model(params, data.source, inputs, alpha)
    for position in range(inputs.shape[1]):
        logits, cache = model.step(params, cache, mask, inputs[:, position], jnp.int32(position), alpha)
        np.testing.assert_allclose(logits, expected[:, position], atol=1e-5 * float(jnp.abs(expected).max()))


def check_loop(scan: Step, loop: Step, fresh: TrainState, trained: TrainState, data: Batch) -> None:
    """A Python loop over the layers draws the same dropout masks and gives the same loss and gradient as the scan.

    The first moments of a fresh optimiser are the gradient times 1 - b1.
    """
    at = dataclasses.replace(fresh, params=trained.params, step=jax.device_put(jnp.int32(7), fresh.step.sharding))
    (looped, loop_metrics), (scanned, scan_metrics) = loop(at, data), scan(at, data)
    np.testing.assert_allclose(loop_metrics.loss, scan_metrics.loss, rtol=1e-6)
    ours, theirs = (optax.tree.get(state.opt_state, "mu") for state in (looped, scanned))
    difference = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), ours, theirs)
    assert max(jax.tree.leaves(difference)) <= 1e-6 * optax.tree.norm(theirs)


def test_a_new_method_is_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing but the table is touched: a scalar gate on the branch that grows with alpha and is learned per layer."""
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
    test_method("new", tmp_path)

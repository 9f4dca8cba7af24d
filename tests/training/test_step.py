"""The update: one compilation per shape, equal results on one and eight devices, gradient accumulation."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branchnorm_jax.data.batches import TextBatch
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh, sharding, to_devices
from branchnorm_jax.training.digests import checksums, sha256
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, abstract_state, init_state
from branchnorm_jax.training.step import make_train_step
from branchnorm_jax.training.update import loss_scale
from tests.conftest import ROOT

CONFIG = Config(
    model=ModelConfig(
        encoder_layers=2, decoder_layers=2, width=16, ffn_width=32, heads=2, alpha_steps=40, attention_dropout=0.1
    ),
    data=DataConfig(row_multiple=8),
    train=TrainConfig(warmup_steps=5, learning_rate=1e-2, steps=20),
)


def batches(count: int) -> list[TextBatch]:
    """Sentences of 2 to 9 words and EOS, in two shapes. Each target is its source reversed."""
    random = np.random.default_rng(0)
    found = []
    for index in range(count):
        rows, length = ((16, 6), (8, 10))[index % 2]
        source, target = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
        for row in range(rows):
            words = random.integers(3, 40, random.integers(2, length))
            source[row, : len(words) + 1] = [*words, 1]
            target[row, : len(words) + 1] = [*words[::-1], 1]
        found.append(TextBatch(source, target))
    return found


class Ran(NamedTuple):
    """The results of a few updates."""

    losses: list[float]
    """Losses and gradient norms, alternating."""
    layers: Any
    """`Metrics.layers` of the last update."""
    state: Any
    compiled: int
    """Number of compilations of the update."""


def run(config: Config, count: int = 20, words: int = 40) -> Ran:
    """Runs `count` updates of a network with a vocabulary of `words`."""
    mesh = make_mesh(config.parallel, config.data.row_multiple // config.train.accumulation)
    model, optimizer = Transformer(config.model, words, words), make_optimizer(config.train)
    first = Batch(*to_devices(mesh, batches(1)[0]))
    state = init_state(model, optimizer, mesh, config.train.seed, first)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    update: Any = jax.jit(
        make_train_step(model, optimizer, config), donate_argnums=0, out_shardings=(shardings, sharding(mesh))
    )
    found = []
    for batch in batches(count):
        state, metrics = update(state, Batch(*to_devices(mesh, batch)))
        found += [float(metrics.loss), float(metrics.grad_norm)]
    return Ran(found, jax.device_get(metrics.layers), state, update._cache_size())


@pytest.mark.slow
def test_one_compilation_per_shape_while_alpha_changes_at_every_step() -> None:
    ran = run(CONFIG)
    assert ran.compiled == 2
    assert int(ran.state.step) == 20
    assert ran.losses[-4] < ran.losses[0]


@pytest.mark.slow
def test_accumulation_gives_the_same_update() -> None:
    """Dropout is off, because its bits depend on the shape of a part."""
    model = dataclasses.replace(CONFIG.model, dropout=0.0, attention_dropout=0.0)
    config = dataclasses.replace(CONFIG, model=model)
    whole = run(config, 6)
    parts = run(dataclasses.replace(config, train=dataclasses.replace(config.train, accumulation=4)), 6)
    np.testing.assert_allclose(parts.losses, whole.losses, rtol=1e-5)
    assert int(parts.state.step) == int(whole.state.step) == 6


def test_checksums_see_every_bit_and_ignore_nothing() -> None:
    tree = {"a": jnp.arange(12.0).reshape(3, 4), "b": jnp.array(7, jnp.int32), "c": jnp.ones(5, jnp.bfloat16)}
    before = checksums(tree)
    assert checksums(tree).tolist() == before.tolist()
    for name, leaf in tree.items():
        for index in np.ndindex(leaf.shape):
            for bit in (0, 3, leaf.dtype.itemsize * 8 - 1):
                words = np.array(leaf).view(f"uint{leaf.dtype.itemsize * 8}")
                words[index] ^= words.dtype.type(1 << bit)
                changed = tree | {name: jnp.asarray(words.view(leaf.dtype))}
                assert checksums(changed).tolist() != before.tolist()
    swapped = tree | {"a": tree["a"].at[0, 0].set(1.0).at[0, 1].set(0.0)}
    assert checksums(swapped).tolist() != before.tolist()


def test_digest_covers_parameters_and_optimiser() -> None:
    mesh = make_mesh(ParallelConfig(), 8)
    model, optimizer = Transformer(CONFIG.model, 40, 40), make_optimizer(CONFIG.train)
    first = Batch(*to_devices(mesh, batches(1)[0]))
    state = init_state(model, optimizer, mesh, 0, first)
    assert sha256(state) == sha256(init_state(model, optimizer, mesh, 0, first))
    assert sha256(state) != sha256(init_state(model, optimizer, mesh, 1, first))
    moved = dataclasses.replace(state, opt_state=jax.tree.map(lambda leaf: leaf + 1, state.opt_state))
    assert sha256(state) != sha256(moved)


# Enough words for the loss to need several blocks of 1 MB. Each update has two parts.
MANY_WORDS = 20_000
IN_BLOCKS = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, logits_mb=1),
    train=dataclasses.replace(CONFIG.train, accumulation=2),
)
EIGHT_DEVICES = """
import dataclasses, json
import jax
from branchnorm_jax.options import ParallelConfig
from tests.training.test_step import CONFIG, IN_BLOCKS, MANY_WORDS, run
assert jax.device_count() == 8
mesh = ParallelConfig(data=4, model=2)
ran = run(dataclasses.replace(CONFIG, parallel=mesh))
split = len(ran.state.params["encoder"]["ffn"]["fc1"]["kernel"].addressable_shards[0].data.ravel())
layers = jax.tree.map(lambda leaf: leaf.tolist(), ran.layers)
blocks = run(dataclasses.replace(IN_BLOCKS, parallel=mesh), 1, MANY_WORDS).losses
print(json.dumps({"losses": ran.losses, "layers": layers, "compiled": ran.compiled, "shard": split, "blocks": blocks}))
"""


@pytest.mark.slow
def test_eight_devices_give_the_numbers_of_one() -> None:
    """Uses a 4 x 2 mesh of data and model parallelism, with dropout."""
    one = run(CONFIG)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    eight = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(eight["losses"], one.losses, rtol=1e-5)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-3),
        eight["layers"],
        {stack: {name: list(values) for name, values in found.items()} for stack, found in one.layers.items()},
    )
    np.testing.assert_allclose(eight["blocks"], run(IN_BLOCKS, 1, MANY_WORDS).losses, rtol=1e-5)
    assert eight["compiled"] == 2
    # Each device holds half of the feed-forward columns.
    assert eight["shard"] == 2 * 16 * 32 // 2


@pytest.mark.slow
@pytest.mark.parametrize(("floor", "grows"), [(0.0, True), (1.0, False)])
def test_adaptive_alpha_in_training(floor: float, grows: bool) -> None:
    """With a floor of 0 alpha grows linearly; with a floor of 1 it never starts to grow."""

    def last(kind: str) -> Any:
        model = dataclasses.replace(CONFIG.model, alpha_schedule=kind, alpha_floor=floor)
        return run(dataclasses.replace(CONFIG, model=model), 6)

    linear, adaptive = last("linear"), last("adaptive")
    if grows:
        assert int(adaptive.state.clock) == int(linear.state.clock) == 6
        np.testing.assert_allclose(adaptive.losses, linear.losses, rtol=1e-5)
    else:
        assert int(adaptive.state.clock) == 0
        assert int(adaptive.state.hold_steps) == CONFIG.model.alpha_hold - 1
    assert adaptive.compiled == linear.compiled


@pytest.mark.parametrize("tokens", [1, 2, 3, 127, 128, 4096, 65_535, 524_288])
def test_loss_scale(tokens: int) -> None:
    assert float(loss_scale(jnp.float32(tokens))) == 2 ** (tokens.bit_length() - 1)


@pytest.mark.slow
def test_a_float16_stream_carries_gradients_however_many_tokens_share_the_loss() -> None:
    """Compares the deep encoder's gradients in float16 and float32 streams, for one batch repeated 64 times."""
    deep = dataclasses.replace(CONFIG.model, encoder_layers=40, decoder_layers=40, method="deepnorm", dropout=0.0)
    words = batches(1)[0]
    many = Batch(*(jnp.tile(jnp.asarray(side), (64, 1)) for side in words))

    def gradient(carry: str) -> np.ndarray:
        model = dataclasses.replace(deep, carry_dtype=carry, attention_dropout=0.0)
        config = dataclasses.replace(CONFIG, model=model)
        network, optimizer = Transformer(model, 40, 40), make_optimizer(config.train)
        state = init_state(network, optimizer, make_mesh(ParallelConfig(), 0), 0, many)
        after, _ = jax.jit(make_train_step(network, optimizer, config))(state, many)
        # After the first update, the first moments equal the gradient times 1 - b1.
        moments = jax.tree.leaves(optax.tree.get(after.opt_state, "mu")["encoder"])
        return np.concatenate([np.ravel(leaf) for leaf in moments])

    exact, rounded = gradient("float32"), gradient("float16")
    assert np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)

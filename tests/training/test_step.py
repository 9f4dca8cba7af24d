"""The update: one compilation per shape, equal results on one and eight devices, gradient accumulation."""

import dataclasses
import functools
import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from branchnorm_jax.data.batches import TextBatch
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh, replicated
from branchnorm_jax.parallel.rows import Rows
from branchnorm_jax.training.digests import checksums, sha256
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, abstract_state, init_state
from branchnorm_jax.training.step import loss_sums, make_train_step
from branchnorm_jax.training.update import loss_scale
from tests.conftest import output_of

# Compilation takes nearly all the time of these tests, so the programs are small and `run` caches its results.
CONFIG = Config(
    model=ModelConfig(
        encoder_layers=2, decoder_layers=2, width=8, ffn_width=16, heads=2, alpha_steps=20, attention_dropout=0.1
    ),
    data=DataConfig(row_multiple=8),
    train=TrainConfig(warmup_steps=5, learning_rate=1e-2, steps=20, watch_every=0),
)
# Without dropout, because its random bits depend on the shape of a microbatch.
PLAIN = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dropout=0.0, attention_dropout=0.0))


def batches(count: int, shapes: int = 1) -> list[TextBatch]:
    """Returns sentences of 1 to 9 words and EOS, in one or two shapes. Each target is its source reversed."""
    random = np.random.default_rng(0)
    result = []
    for index in range(count):
        rows, length = ((16, 6), (8, 10))[index % shapes]
        source, target = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
        for row in range(rows):
            words = random.integers(3, 40, random.integers(1, length))
            source[row, : len(words) + 1] = [*words, 1]
            target[row, : len(words) + 1] = [*words[::-1], 1]
        result.append(TextBatch(source, target))
    return result


class RunResult(NamedTuple):
    """The results of a few updates."""

    losses: list[float]
    """Losses and gradient norms, alternating."""
    alphas: list[float]
    layers: Any
    """`Metrics.layers` of the last update."""
    state: Any
    compiled: int
    """Number of compilations of the update."""


@functools.cache
def run(config: Config, count: int = 6, words: int = 40, shapes: int = 1) -> RunResult:
    """Runs `count` updates of a network with a vocabulary of `words` on batches of one or two shapes."""
    mesh = make_mesh(config.parallel)
    model, optimizer = Transformer(config.model, words, words), make_optimizer(config.train)
    rows = Rows(mesh, config.train.accumulation)
    first = Batch(*rows.put(rows.take(batches(1)[0])))
    state = init_state(model, optimizer, mesh, config.train.seed, first)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh))
    update: Any = jax.jit(
        make_train_step(model, optimizer, config), donate_argnums=0, out_shardings=(shardings, replicated(mesh))
    )
    losses, alphas = [], []
    with jax.set_mesh(mesh):
        for batch in batches(count, shapes):
            state, metrics = update(state, Batch(*rows.put(rows.take(batch))))
            losses += [float(metrics.loss), float(metrics.grad_norm)]
            alphas.append(float(metrics.alpha))
    return RunResult(losses, alphas, jax.device_get(metrics.layers), state, update._cache_size())


def test_each_shape_is_compiled_once_while_alpha_changes() -> None:
    ran = run(CONFIG, 20, shapes=2)
    assert ran.compiled == 2
    assert int(ran.state.step) == 20
    np.testing.assert_allclose(ran.alphas, np.arange(20) / 20, rtol=1e-6)
    assert ran.losses[-4] < ran.losses[0]


def test_alpha_is_1_without_a_growing_branch() -> None:
    model = dataclasses.replace(PLAIN.model, method="pre_ln")
    assert run(dataclasses.replace(PLAIN, model=model), 2).alphas == [1.0, 1.0]


def test_accumulation_gives_the_same_update() -> None:
    """The microbatches have different numbers of target tokens."""
    parts = run(dataclasses.replace(PLAIN, train=dataclasses.replace(PLAIN.train, accumulation=4)))
    np.testing.assert_allclose(parts.losses, run(PLAIN).losses, rtol=1e-5)
    assert int(parts.state.step) == int(run(PLAIN).state.step) == 6


def test_checksums_depend_on_every_bit_and_its_position() -> None:
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


@pytest.mark.slow
def test_digest_covers_parameters_and_optimiser() -> None:
    mesh = make_mesh(ParallelConfig())
    model, optimizer = Transformer(CONFIG.model, 40, 40), make_optimizer(CONFIG.train)
    first = Batch(*map(jnp.asarray, batches(1)[0]))
    state = init_state(model, optimizer, mesh, 0, first)
    assert sha256(state) == sha256(init_state(model, optimizer, mesh, 0, first))
    assert sha256(state) != sha256(init_state(model, optimizer, mesh, 1, first))
    moved = dataclasses.replace(state, opt_state=jax.tree.map(lambda leaf: leaf + 1, state.opt_state))
    assert sha256(state) != sha256(moved)


# Dropout, layer statistics, two microbatches per update, and enough words for several loss blocks of 1 MB.
MANY_WORDS = 20_000
IN_BLOCKS = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, logits_mb=1),
    train=dataclasses.replace(CONFIG.train, accumulation=2, watch_every=1),
)
EIGHT_DEVICES = """
import dataclasses, json
import jax
from branchnorm_jax.options import ParallelConfig
from tests.training.test_step import IN_BLOCKS, MANY_WORDS, run
assert jax.device_count() == 8
ran = run(dataclasses.replace(IN_BLOCKS, parallel=ParallelConfig(data=2, fsdp=2, model=2)), words=MANY_WORDS)
states = ran.state.params, ran.state.opt_state
moments = jax.tree.map(lambda leaf: leaf.addressable_shards[0].data.size / leaf.size, states)
matrices = {share for leaf, share in zip(jax.tree.leaves(states), jax.tree.leaves(moments)) if leaf.ndim == 3}
layers = jax.tree.map(lambda leaf: leaf.tolist(), ran.layers)
print(json.dumps({"losses": ran.losses, "layers": layers, "compiled": ran.compiled, "shares": list(matrices)}))
"""


@pytest.mark.slow
def test_eight_devices_equal_one_device() -> None:
    """Uses a 2 x 2 x 2 mesh of data, fsdp and model, with dropout, accumulation and the loss in blocks."""
    output = output_of(EIGHT_DEVICES, devices=8, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    eight, one = json.loads(output.splitlines()[-1]), run(IN_BLOCKS, words=MANY_WORDS)
    np.testing.assert_allclose(eight["losses"], one.losses, rtol=1e-5)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-3),
        eight["layers"],
        {stack: {name: list(values) for name, values in by_name.items()} for stack, by_name in one.layers.items()},
    )
    assert eight["compiled"] == one.compiled == 1
    # Each device holds a quarter of every matrix and of its moments: half over model, and half of that over fsdp.
    assert eight["shares"] == [0.25]


FOUR_DEVICES = """
import jax, jax.numpy as jnp
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ParallelConfig
from branchnorm_jax.parallel.mesh import by_rows, make_mesh
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, init_state
from branchnorm_jax.training.step import make_eval_step
from tests.training.test_step import IN_BLOCKS, MANY_WORDS
mesh = make_mesh(ParallelConfig(data=4))
with jax.set_mesh(mesh):
    model = Transformer(IN_BLOCKS.model, MANY_WORDS, MANY_WORDS)
    rows = jax.device_put(jnp.full((64, 8), 5, jnp.int32), by_rows(mesh))
    state = init_state(model, make_optimizer(IN_BLOCKS.train), mesh, 0, Batch(rows, rows))
    print(jax.jit(make_eval_step(model, IN_BLOCKS)).lower(state, Batch(rows, rows)).compile().as_text())
"""


def test_validation_in_blocks_moves_no_rows_between_devices() -> None:
    """Each device computes the logits of its own rows; only sums are exchanged."""
    program = output_of(FOUR_DEVICES, devices=4)
    assert "all-reduce" in program
    assert "all-gather" not in program


@pytest.mark.parametrize(("floor", "grows"), [(0.0, True), (1.0, False)])
def test_adaptive_alpha_in_training(floor: float, grows: bool) -> None:
    """With a floor of 0 alpha grows linearly; with a floor of 1 it never starts to grow."""
    model = dataclasses.replace(PLAIN.model, alpha_schedule="adaptive", alpha_floor=floor)
    linear, adaptive = run(PLAIN), run(dataclasses.replace(PLAIN, model=model))
    if grows:
        assert int(adaptive.state.clock) == int(linear.state.clock) == 6
        np.testing.assert_allclose(adaptive.losses, linear.losses, rtol=1e-5)
    else:
        assert int(adaptive.state.clock) == 0
        assert int(adaptive.state.hold_steps) == model.alpha_hold - 1
    assert adaptive.compiled == linear.compiled == 1


@pytest.mark.parametrize("tokens", [1, 2, 3, 127, 128, 4096, 65_535, 524_288])
def test_loss_scale_is_a_power_of_two(tokens: int) -> None:
    assert float(loss_scale(jnp.float32(tokens))) == 2 ** (tokens.bit_length() - 1)


@pytest.mark.parametrize(
    ("method", "names", "dtypes"),
    [
        ("fixup", {"shift_in", "shift_out"}, {"dtype": "bfloat16"}),
        pytest.param("normformer", {"head_scale", "bias"}, {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        ("dlcl", {"weight"}, {"carry_dtype": "bfloat16"}),
    ],
)
def test_gradients_of_broadcast_parameters_are_as_exact_as_those_of_matrices(
    method: str, names: set[str], dtypes: dict[str, Any]
) -> None:
    """They are sums over all tokens, here 4,096. As sums in the narrow type they would have errors of 6 to 30 %."""
    exact = dataclasses.replace(PLAIN.model, method=method, width=32, heads=4, init="xavier_uniform")
    batch = Batch(*jax.random.randint(jax.random.key(1), (2, 128, 32), 3, 40))
    leaves, tree = jax.tree.flatten(Transformer(exact, 40, 40).init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    # Away from the start, at which many gradients are 0.
    moved = [leaf + 0.02 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    params = jax.tree.unflatten(tree, moved)

    def gradients(model: ModelConfig) -> dict[str, np.ndarray]:
        network = Transformer(model, 40, 40)
        alpha = {stack: jnp.ones(2) for stack in model.stacks}
        gradient = jax.jit(jax.grad(lambda params: loss_sums(network, params, batch, alpha, 0.1)[0].loss))(params)
        by_name: dict[str, list[np.ndarray]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
            by_name.setdefault(path[-1].key, []).append(np.ravel(leaf))
        return {name: np.concatenate(arrays) for name, arrays in by_name.items()}

    theirs, ours = gradients(exact), gradients(dataclasses.replace(exact, **dtypes))
    errors = {name: np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name]) for name in theirs}
    assert max(errors[name] for name in names) < 3 * errors["kernel"]


@pytest.mark.slow
def test_float16_stream_keeps_the_gradients_of_large_batches() -> None:
    """Compares the deep encoder's gradients in float16 and float32 streams, for one batch repeated 64 times."""
    deep = dataclasses.replace(PLAIN.model, encoder_layers=40, decoder_layers=40, method="deepnorm")
    words = batches(1)[0]
    many = Batch(*(jnp.tile(jnp.asarray(side), (64, 1)) for side in words))

    def gradient(carry: str) -> np.ndarray:
        model = dataclasses.replace(deep, carry_dtype=carry)
        config = dataclasses.replace(PLAIN, model=model)
        network, optimizer = Transformer(model, 40, 40), make_optimizer(config.train)
        state = init_state(network, optimizer, make_mesh(ParallelConfig()), 0, many)
        after, _ = jax.jit(make_train_step(network, optimizer, config))(state, many)
        # After the first update, the first moments equal the gradient times 1 - b1.
        moments = jax.tree.leaves(optax.tree.get(after.opt_state, "mu")["encoder"])
        return np.concatenate([np.ravel(leaf) for leaf in moments])

    exact, rounded = gradient("float32"), gradient("float16")
    assert np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)

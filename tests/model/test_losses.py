"""The smoothed loss: value and gradient compared with NumPy, minimum, and peak memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.model.losses import Blocks, LossSums, smoothed_cross_entropy
from branchnorm_jax.model.output import UNUSED_NLL, Output


def explicit(
    x: np.ndarray,
    table: np.ndarray,
    bias: np.ndarray,
    used: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    eps: float,
) -> tuple[float, float, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns loss, nll, and the gradients of x, table and bias, in float64.

    Unused words have log-probability -50.
    """
    logits = np.where(used, x @ table.T + bias, -np.inf)
    log_p = logits - logits.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    share = eps / (used.sum() - 1)
    known = used[targets]
    nll = -np.where(known, np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0], -UNUSED_NLL)
    loss = (1 - eps - share) * nll - share * np.where(used, log_p, 0.0).sum(-1)
    # d log p_v / d z = onehot(v) - p.
    p, certain = np.exp(log_p), (1 - eps - share) * known[..., None]
    onehot = np.eye(len(used))[targets]
    by_logits = certain * (p - onehot) + share * (used.sum() * p - used)
    by_logits = weights[..., None] * by_logits
    gradient = by_logits @ table, np.einsum("btv,btd->vd", by_logits, x), by_logits.sum((0, 1))
    return float((loss * weights).sum()), float((nll * weights).sum()), gradient


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    eps=st.floats(0, 0.9),
    length=st.integers(1, 7),
    positions=st.integers(1, 8),
    width=st.sampled_from([1, 4, 6, 8]),
    shards=st.sampled_from([1, 2, 4]),
    with_bias=st.booleans(),
)
def test_loss_and_gradient_equal_their_definition(
    seed: int, eps: float, length: int, positions: int, width: int, shards: int, with_bias: bool
) -> None:
    """Covers unused words and all block sizes, including sizes that do not divide the length."""
    random = np.random.default_rng(seed)
    words, rows = 11, 4
    x, table = random.normal(size=(rows, length, width)), random.normal(size=(words, width))
    bias = random.normal(size=words) * with_bias
    used = random.random(words) < 0.8
    used[:2] = True
    targets = random.integers(0, words, (rows, length))
    weights = random.integers(0, 2, (rows, length)).astype(np.float64)
    blocks = Blocks(4 * rows // shards * words * positions, shards)

    with jax.enable_x64(True):

        def loss(x: jax.Array, table: jax.Array, bias: jax.Array) -> tuple[jax.Array, LossSums]:
            output = Output(table, bias if with_bias else None, jnp.asarray(used))
            sums = smoothed_cross_entropy(x, output, jnp.asarray(targets), jnp.asarray(weights), eps, blocks)
            return 3 * sums.loss, sums

        alone = loss(*map(jnp.asarray, (x, table, bias)))[1]
        gradient, sums = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*map(jnp.asarray, (x, table, bias)))
    expected_loss, expected_nll, expected = explicit(x, table, bias, used, targets, weights, eps)
    np.testing.assert_allclose(sums, (expected_loss, expected_nll, weights.sum()), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(alone, sums, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradient[: 2 + with_bias], expected, strict=False):
        np.testing.assert_allclose(ours, 3 * theirs, rtol=1e-9, atol=1e-12)


def test_explicit_gradient_matches_finite_differences() -> None:
    """Checks the reference itself."""
    random = np.random.default_rng(0)
    x, table, bias = random.normal(size=(1, 2, 3)), random.normal(size=(5, 3)), random.normal(size=5)
    used, targets, weights = np.array([1, 1, 0, 1, 1], bool), np.array([[2, 1]]), np.ones((1, 2))
    direction = random.normal(size=x.shape)
    by_x = explicit(x, table, bias, used, targets, weights, 0.3)[2][0]
    up, down = (explicit(x + s * direction, table, bias, used, targets, weights, 0.3)[0] for s in (1e-6, -1e-6))
    np.testing.assert_allclose((up - down) / 2e-6, (by_x * direction).sum(), rtol=1e-8)


def test_bfloat16_products_with_float32_sums() -> None:
    """The results in blocks are close to float32, and each gradient has the dtype of its argument."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, table = jax.random.normal(keys[0], (2, 8, 16)), jax.random.normal(keys[1], (50, 16)) / 4
    targets, weights = jax.random.randint(keys[2], (2, 8), 0, 50), jnp.ones((2, 8))

    def loss(x: jax.Array, table: jax.Array, blocks: Blocks) -> jax.Array:
        output = Output(table, None, jnp.ones(50, bool))
        return smoothed_cross_entropy(x, output, targets, weights, 0.1, blocks).loss

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    expected, (expected_x, expected_table) = gradient(x, table, Blocks())
    result, (by_x, by_table) = gradient(x.astype(jnp.bfloat16), table, Blocks(4 * 2 * 50 * 3))
    assert (result.dtype, by_x.dtype, by_table.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(result, expected, rtol=3e-3)
    for ours, theirs in ((by_x, expected_x), (by_table, expected_table)):
        assert float(jnp.abs(ours - theirs).max()) < 0.02 * float(jnp.abs(theirs).max())


def loss_of_logits(logits: np.ndarray, targets: list[int], eps: float, used: np.ndarray | None = None) -> LossSums:
    """Returns the loss of given logits [n, V]. The logits form one row of x, and W is the identity."""
    words = logits.shape[-1]
    output = Output(jnp.eye(words), None, jnp.asarray(np.ones(words, bool) if used is None else used))
    x = jnp.asarray(logits, jnp.float32)[None]
    return smoothed_cross_entropy(x, output, jnp.array([targets]), jnp.ones((1, len(targets))), eps)


@pytest.mark.parametrize(
    ("vocabulary", "minimum"), [(10_000, 1.246107), (32_768, 1.364801), (40_000, 1.384744)], ids=str
)
def test_minimum_of_the_smoothed_loss(vocabulary: int, minimum: float) -> None:
    """The minimum is the entropy of the smoothed target q. A model that predicts q has this loss."""
    q = np.full(vocabulary, 0.1 / (vocabulary - 1))
    q[7] = 0.9
    output = Output(jnp.log(jnp.asarray(q, jnp.float32))[:, None], None, jnp.ones(vocabulary, bool))
    sums = smoothed_cross_entropy(jnp.ones((1, 1, 1)), output, jnp.array([[7]]), jnp.ones((1, 1)), 0.1)
    np.testing.assert_allclose(float(sums.loss), minimum, atol=2e-5)


def test_loss_without_smoothing_is_the_negative_log_likelihood() -> None:
    sums = loss_of_logits(np.array([[1.0, 2.0, 3.0]]), [0], 0.0)
    np.testing.assert_allclose(float(sums.loss), np.log(np.exp([1, 2, 3]).sum()) - 1, rtol=1e-6)
    np.testing.assert_allclose(float(sums.loss), float(sums.nll), rtol=1e-6)


def test_unused_words_have_a_large_but_finite_loss() -> None:
    sums = loss_of_logits(np.array([[1.0, 2.0, 3.0]]), [1], 0.1, np.array([True, False, True]))
    np.testing.assert_allclose(float(sums.nll), UNUSED_NLL)
    assert 40 < float(sums.loss) < UNUSED_NLL


def test_large_logits_stay_exact() -> None:
    logits = np.array([[1e4, 0.0, -1e4], [-3e4, -3e4, -3e4]])
    sums = loss_of_logits(logits, [0, 2], 0.0)
    np.testing.assert_allclose(float(sums.nll), np.log(3), rtol=1e-3)


def test_only_one_block_of_logits_is_in_memory() -> None:
    """Compiled for 512 positions and 4000 words: all logits take 8 MB, one block takes 1 MB."""
    x, table, used = jnp.zeros((16, 32, 8)), jnp.zeros((4000, 8)), jnp.ones(4000, bool)
    targets, weights = jnp.zeros((16, 32), int), jnp.ones((16, 32))

    def loss(x: jax.Array, table: jax.Array) -> jax.Array:
        return smoothed_cross_entropy(x, Output(table, None, used), targets, weights, 0.1, Blocks(2**20)).loss

    memory: Any = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, table).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * 2**20

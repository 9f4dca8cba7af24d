"""Label smoothing against its definition and its floor."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.model.losses import smoothed_cross_entropy


def explicit(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, eps: float) -> tuple[float, float]:
    """Cross-entropy against q(target) = 1 - eps, q(other) = eps / (V - 1), in float64."""
    logits = logits.astype(np.float64)
    log_p = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_p -= logits.max(-1, keepdims=True)
    vocabulary = logits.shape[-1]
    q = np.full(logits.shape, eps / (vocabulary - 1))
    np.put_along_axis(q, targets[..., None], 1 - eps, axis=-1)
    loss = -(q * log_p).sum(-1)
    nll = -np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return float((loss * weights).sum()), float((nll * weights).sum())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.floats(0, 0.9), st.floats(0.1, 30))
def test_equals_cross_entropy_with_the_smoothed_distribution(seed: int, eps: float, scale: float) -> None:
    random = np.random.default_rng(seed)
    logits = (scale * random.normal(size=(2, 3, 11))).astype(np.float32)
    targets = random.integers(0, 11, (2, 3))
    weights = random.integers(0, 2, (2, 3)).astype(np.float32)
    sums = smoothed_cross_entropy(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(weights), eps)
    np.testing.assert_allclose((sums.loss, sums.nll), explicit(logits, targets, weights, eps), rtol=2e-5, atol=1e-4)
    assert float(sums.tokens) == weights.sum()


@pytest.mark.parametrize(("vocabulary", "floor"), [(10_000, 1.246107), (32_768, 1.364801), (40_000, 1.384744)], ids=str)
def test_floor_of_the_smoothed_loss(vocabulary: int, floor: float) -> None:
    """A model that predicts q itself reaches the entropy of q, no less."""
    eps = 0.1
    q = np.full(vocabulary, eps / (vocabulary - 1))
    q[7] = 1 - eps
    sums = smoothed_cross_entropy(
        jnp.log(jnp.asarray(q, jnp.float32))[None, None], jnp.array([[7]]), jnp.ones((1, 1)), eps
    )
    np.testing.assert_allclose(float(sums.loss), floor, atol=2e-5)


def test_without_smoothing_it_is_the_negative_log_likelihood() -> None:
    logits = jnp.array([[[1.0, 2.0, 3.0]]])
    sums = smoothed_cross_entropy(logits, jnp.array([[0]]), jnp.ones((1, 1)), 0.0)
    np.testing.assert_allclose(float(sums.loss), np.log(np.exp([1, 2, 3]).sum()) - 1, rtol=1e-6)
    assert float(sums.loss) == float(sums.nll)

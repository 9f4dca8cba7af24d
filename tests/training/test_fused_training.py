"""A whole training with interpreted kernels, bfloat16 products and a float16 stream."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig, TrainConfig
from branchnorm_jax.tokens import EOS, UNK
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, first_state
from branchnorm_jax.training.step import make_train_step

UPDATES, WORDS, LENGTH = 300, 24, 16
FIRST = UNK + 1
COUNT = WORDS - FIRST
MODEL = ModelConfig(
    encoder_layers=1,
    decoder_layers=1,
    width=64,
    ffn_width=64,
    heads=4,
    dropout=0.1,
    attention_dropout=0.1,
    alpha_steps=50,
    dtype="bfloat16",
    carry_dtype="float16",
)


def batch(number: int, rows: int = 16) -> Batch:
    """Returns sentences that count up from a random word; each target is its source."""
    rng = np.random.default_rng(number)
    tokens = np.zeros((rows, LENGTH), np.int32)
    for row, length in enumerate(rng.integers(4, LENGTH, rows)):
        tokens[row, : length + 1] = [*(rng.integers(FIRST, WORDS) + np.arange(length)) % COUNT + FIRST, EOS]
    return Batch(jnp.asarray(tokens), jnp.asarray(tokens))


def nll(kernels: str, seed: int) -> float:
    """Trains for 300 updates; returns the negative log-likelihood per token of 256 other sentences."""
    config = Config(
        model=dataclasses.replace(MODEL, kernels=kernels),
        train=TrainConfig(warmup_steps=50, learning_rate=5e-3, steps=UPDATES, watch_every=0, seed=seed),
    )
    model, optimizer = Transformer(config.model, WORDS, WORDS), make_optimizer(config.train)
    state = jax.jit(lambda key: first_state(model.init(key), optimizer))(jax.random.key(seed))
    update = jax.jit(make_train_step(model, optimizer, config), donate_argnums=0)
    for number in range(UPDATES):
        state, _ = update(state, batch(1 + number))
    source, target = batch(0, 256)
    logits = model(state.params, source, decoder_inputs(target), jnp.float32(1))
    each = model.output(state.params).nll(logits, target)[0]
    return float(jnp.where(target != 0, each, 0).sum() / (target != 0).sum())


@pytest.mark.slow
def test_fused_kernels_train_to_the_same_loss() -> None:
    plain = [nll("plain", seed) for seed in (0, 1, 2)]
    assert max(plain) < 0.3 * np.log(WORDS), "the task is not learned, so the comparison means nothing"
    assert abs(nll("interpret", 0) - plain[0]) < np.std(plain, ddof=1)

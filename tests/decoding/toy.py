"""A language model small enough to enumerate all of its hypotheses, as `beam.Step`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.options import DecodeConfig

VOCABULARY = 6


class Toy(NamedTuple):
    """A language model whose next-token logits depend on a hash of the sentence's number and the whole prefix.

    The slots of its cache contain the tokens, so a hypothesis that attends to wrong slots hashes a wrong prefix.
    """

    sentence: jax.Array
    """[B]."""
    tokens: jax.Array
    """[B, slots]."""


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (97, VOCABULARY)).astype(np.float32)


def next_state(state: Any, token: Any) -> Any:
    return (state * 31 + token + 7) % 97


def toy_step(logits: jax.Array) -> Any:
    def step(
        cache: Toy, tokens: jax.Array, position: jax.Array, seen: jax.Array, slot: jax.Array
    ) -> tuple[jax.Array, jax.Array, Toy]:
        batch, k = tokens.shape
        ring = seen.shape[2] // k
        seen, kept = seen.reshape(batch, k, ring, k), cache.tokens.reshape(batch, 1, ring, k)
        state = jnp.broadcast_to(cache.sentence[:, None], (batch, k))
        for age in range(ring, 0, -1):
            time = (slot // k - age) % ring
            visible = seen[:, :, time].sum(-1)
            word = jnp.where(visible == 1, (seen[:, :, time] * kept[:, :, time]).sum(-1), 50)
            state = jnp.where((age <= position[:, None]) | (visible > 0), next_state(state, word), state)
        state = next_state(state, tokens)
        scores = logits[state]
        kept = jax.lax.dynamic_update_slice_in_dim(cache.tokens, tokens, slot, axis=1)
        return scores, jax.nn.logsumexp(scores, axis=-1), cache._replace(tokens=kept)

    return step


def decode_config(beam_size: int, **options: Any) -> DecodeConfig:
    return DecodeConfig(**({"beam_size": beam_size, "nbest": beam_size, "length_penalty": 1.0} | options))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())

"""Which sentence of its row a token belongs to, and its place there: known from the tokens alone, for EOS ends each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from branchnorm_jax.options import EOS, PAD


class Places(NamedTuple):
    """Where tokens stand: [B, T] each. Padding belongs to the sentence before it."""

    sentence: jax.Array
    """Which sentence of its row a token belongs to, int32, counted from 1."""
    position: jax.Array
    """How many tokens of that sentence come before it, int32."""
    real: jax.Array
    """Whether it is a token, not padding."""


def decoder_inputs(target_BT: jax.Array) -> jax.Array:
    """What the decoder reads under teacher forcing: of each sentence EOS, then the target without its last token.

    Where a row holds several sentences, the EOS that one ends with is what the next begins with.
    """
    return jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0)), constant_values=EOS)


def source_places(source_BS: jax.Array) -> Places:
    """Of sentences that each end in EOS; padding may stand on either side of them."""
    return _places(source_BS, jnp.pad(source_BS[:, :-1], ((0, 0), (1, 0))) == EOS)


def target_places(inputs_BT: jax.Array) -> Places:
    """Of decoder inputs: sentences that each begin with EOS."""
    return _places(inputs_BT, inputs_BT == EOS)


def _places(tokens_BT: jax.Array, begins_BT: jax.Array) -> Places:
    real_BT = tokens_BT != PAD
    before_BT = jnp.cumsum(real_BT, axis=1) - real_BT
    starts_BT = real_BT & (begins_BT | (before_BT == 0))
    start_BT = jax.lax.cummax(jnp.where(starts_BT, before_BT, 0), axis=1)
    return Places(jnp.cumsum(starts_BT, axis=1), before_BT - start_BT, real_BT)


def same_sentence(queries: Places, keys: Places) -> jax.Array:
    """[B, T, S], True where a query may look: at the tokens of its own sentence."""
    return (queries.sentence[:, :, None] == keys.sentence[:, None, :]) & keys.real[:, None, :]


def causal_mask(length: int) -> jax.Array:
    """[1, T, T], True where a position may look: at itself and before."""
    return jnp.tri(length, dtype=bool)[None]


def source_mask(source_BS: jax.Array) -> jax.Array:
    """[B, 1, S], True at real tokens."""
    return (source_BS != PAD)[:, None, :]

"""Segments: the sentences packed into a row of tokens. EOS ends each sentence, so the tokens alone determine them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from branchnorm_jax.tokens import EOS, PAD

MASKED = -1e9
"""Score of a key that a query does not attend to. Finite, so that a row in which all keys are padding gives a mean
instead of NaN."""


class Segments(NamedTuple):
    """Segment ids and positions of the tokens of a batch, [B, T] each. Padding belongs to the sentence before it."""

    ids: jax.Array
    """Segment ids: the number of the token's sentence in its row, counted from 1, int32."""
    positions: jax.Array
    """Position ids: the number of earlier tokens of the same sentence, int32."""
    real: jax.Array
    """False at padding."""


def decoder_inputs(target_BT: jax.Array) -> jax.Array:
    """Returns the decoder inputs for teacher forcing: EOS, then the target without its last token.

    In a row with several sentences, the EOS at the end of one sentence is also the first input of the next one.

    >>> decoder_inputs(jnp.array([[5, 6, EOS, 7, EOS, PAD]])).tolist()
    [[1, 5, 6, 1, 7, 1]]
    """
    return jnp.pad(target_BT[:, :-1], ((0, 0), (1, 0)), constant_values=EOS)


def source_segments(source_BS: jax.Array) -> Segments:
    """Returns the segments of sources, which end in EOS. Padding may be on either side of a sentence.

    >>> packed = source_segments(jnp.array([[5, 6, EOS, 7, EOS, PAD]]))
    >>> packed.ids.tolist(), packed.positions.tolist()
    ([[1, 1, 1, 2, 2, 2]], [[0, 1, 2, 0, 1, 2]])
    """
    return _segments(source_BS, jnp.pad(source_BS[:, :-1], ((0, 0), (1, 0))) == EOS)


def target_segments(inputs_BT: jax.Array) -> Segments:
    """Returns the segments of decoder inputs, which begin with EOS."""
    return _segments(inputs_BT, inputs_BT == EOS)


def _segments(tokens_BT: jax.Array, begins_BT: jax.Array) -> Segments:
    real_BT = tokens_BT != PAD
    before_BT = jnp.cumsum(real_BT, axis=1) - real_BT
    starts_BT = real_BT & (begins_BT | (before_BT == 0))
    start_BT = jax.lax.cummax(jnp.where(starts_BT, before_BT, 0), axis=1)
    return Segments(jnp.cumsum(starts_BT, axis=1), before_BT - start_BT, real_BT)


def same_sentence(queries: Segments, keys: Segments) -> jax.Array:
    """Returns a mask [B, T, S], True where a query attends: at the real tokens of its own sentence."""
    return (queries.ids[:, :, None] == keys.ids[:, None, :]) & keys.real[:, None, :]


def causal_mask(length: int) -> jax.Array:
    """Returns a mask [1, T, T], True where a position attends: at itself and at earlier positions."""
    return jnp.tri(length, dtype=bool)[None]


def source_mask(source_BS: jax.Array) -> jax.Array:
    """Returns a mask [B, 1, S], True at real tokens."""
    return (source_BS != PAD)[:, None, :]

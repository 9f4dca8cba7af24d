"""Lexical constraints: phrases that the translation of a sentence must contain, each as whole words.

The candidates of a step are divided into banks by the number of phrase tokens that they contain, and the banks get
equal shares of the beam. So a candidate competes only with candidates that contain the same number of phrase tokens.
This is dynamic beam allocation (Post and Vilar, 2018, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation
for Neural Machine Translation"). Which phrases are begun can be seen from the last tokens, so the search keeps only
which ones are complete.

Axes: B sentences, K hypotheses, C phrases of a sentence, P tokens of a phrase, N candidates of a hypothesis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NONE = -1
"""Padding of phrases; equal to no token."""


class Progress(NamedTuple):
    """How far hypotheses are with the phrases of their sentence."""

    suffix: jax.Array
    """Whether the last j tokens are the first j of the phrase: bool [B, K, C, P + 1], j = 0 ... P."""
    complete: jax.Array
    """Whether the hypothesis contains the phrase: bool [B, K, C]; True for padding."""


def lengths(phrases: jax.Array) -> jax.Array:
    """Returns the number of tokens of each phrase: int32 [B, C]."""
    return (phrases != NONE).sum(-1, dtype=jnp.int32)


def progress(tokens: jax.Array, position: jax.Array, before: jax.Array, phrases: jax.Array) -> Progress:
    """Returns the progress of hypotheses.

    Args:
      tokens: their tokens, int32 [B, K, T], undefined from `position` on.
      position: their lengths, int32 [B].
      before: `complete` without their last token.
      phrases: int32 [B, C, P], padded with `NONE`.
    """
    longest = phrases.shape[2]
    place = position[:, None] + jnp.arange(-longest, 0)
    last = jnp.take_along_axis(tokens, jnp.maximum(place, 0)[:, None], axis=2)
    last = jnp.where(place[:, None] < 0, NONE - 1, last)[:, :, None]
    equal = [(last[..., longest - j :] == phrases[:, None, :, :j]).all(-1) for j in range(longest + 1)]
    suffix = jnp.stack(equal, axis=-1)
    ended = jnp.take_along_axis(suffix, lengths(phrases)[:, None, :, None], axis=-1)[..., 0]
    return Progress(suffix, before | ended)


def next_tokens(state: Progress, phrases: jax.Array) -> jax.Array:
    """Returns the token that continues each phrase, or begins it: int32 [B, K, C]; `NONE` if it is complete."""
    longest = phrases.shape[2]
    done = longest - jnp.argmax(state.suffix[..., ::-1], axis=-1)
    token = jnp.take_along_axis(phrases[:, None], jnp.minimum(done, longest - 1)[..., None], axis=-1)[..., 0]
    return jnp.where(state.complete, NONE, token)


def banks(state: Progress, phrases: jax.Array, words: jax.Array) -> jax.Array:
    """Returns how many phrase tokens each hypothesis contains with one more token.

    They are the tokens of complete phrases, and the last tokens if they begin a phrase. Phrases that begin alike do not
    count twice: otherwise a beginning would be in a higher bank than its continuation.

    Args:
      state: the progress of the hypotheses.
      phrases: int32 [B, C, P].
      words: the further tokens, int32 [B, K, N].

    Returns:
      int32 [B, K, N].
    """
    longest = phrases.shape[2]
    grown = state.suffix[:, :, None, :, :longest] & (phrases[:, None, None] == words[..., None, None])
    begun = jnp.where(grown, jnp.arange(1, longest + 1), 0).max(-1)
    complete = state.complete[:, :, None]
    inside = jnp.where(complete, lengths(phrases)[:, None, None], 0).sum(-1)
    return inside + jnp.where(complete, 0, begun).max(-1)


def repeated(words: jax.Array) -> jax.Array:
    """Returns whether a token occurs earlier in the last axis: bool, the shape of `words`."""
    equal = words[..., :, None] == words[..., None, :]
    return jnp.any(equal & jnp.tril(jnp.ones(equal.shape[-2:], bool), -1), axis=-1)


def allocated(totals: jax.Array, bank: jax.Array, count: int) -> jax.Array:
    """Returns the indices of `count` candidates: the best of each bank, then the second best of each, and so on.

    Within a round, banks with more phrase tokens come first.

    Args:
      totals: log-probabilities, float32 [B, M]; -inf for candidates that must not be taken.
      bank: bank of each candidate, int32 [B, M].
      count: number of indices, at most M.

    Returns:
      int32 [B, count].
    """
    order = jnp.lexsort((-totals, -bank))
    sorted_bank = jnp.take_along_axis(bank, order, axis=1)
    index = jnp.arange(bank.shape[1])
    first = jnp.diff(sorted_bank, axis=1, prepend=-1) != 0
    round_ = index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    possible = jnp.take_along_axis(totals, order, axis=1) > -jnp.inf
    rank = jnp.argsort(jnp.where(possible, round_, bank.shape[1]), axis=1, stable=True)
    return jnp.take_along_axis(order, rank[:, :count], axis=1).astype(jnp.int32)


def banned(state: Progress, before: jax.Array, word_starts: jax.Array, end: int) -> jax.Array:
    """Returns the tokens that must not come next: bool [B, K, V].

    They are `end` as long as a phrase is missing, and tokens that would lengthen the last word of a phrase that has
    just become complete.

    Args:
      state: the progress of the hypotheses.
      before: `complete` without their last token.
      word_starts: the tokens that do not continue a word, bool [V].
      end: the token EOS.
    """
    just = (state.complete & ~before).any(-1, keepdims=True)
    missing = ~state.complete.all(-1, keepdims=True)
    return (just & ~word_starts) | (missing & (jnp.arange(len(word_starts)) == end))

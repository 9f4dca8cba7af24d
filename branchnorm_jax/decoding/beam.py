"""Beam search as a pure function of shapes known in advance.

The rules are fairseq's: of the 2K best continuations of a sentence's K hypotheses, those that end (EOS) among the best
K are finished, the best K others live on; a sentence is done when K hypotheses have finished, or at its length limit,
where only EOS is allowed. Finished hypotheses are ranked by log-probability over a length penalty. K = 1 is greedy
search.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from branchnorm_jax.options import EOS, PAD

C = TypeVar("C")
"""The model's cache: any tree of arrays."""

Step = Callable[[C, jax.Array, jax.Array], tuple[jax.Array, C]]
"""(cache, tokens [B*K], position []) -> (logits [B*K, V], cache)."""

Reorder = Callable[[C, jax.Array], C]
"""(cache, rows [B*K]) -> the cache whose row i is the old row rows[i]."""


class Hypotheses(NamedTuple):
    """Finished hypotheses, best first.

    tokens: int32 [B, K, T], ending in EOS, then padding. scores: float32 [B, K], log-probability over length penalty.
    log_probs: float32 [B, K], natural logarithm, EOS included.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probs: jax.Array


class _Search(NamedTuple):
    """What the loop carries: K live hypotheses and up to K finished ones per sentence."""

    position: jax.Array
    live: jax.Array  # [B, K, T]
    live_log_probs: jax.Array  # [B, K]
    finished: jax.Array  # [B, K, T]
    finished_log_probs: jax.Array  # [B, K]
    finished_scores: jax.Array  # [B, K]
    finished_count: jax.Array  # [B]
    cache: Any


def length_penalty(length: jax.Array, strength: float, kind: str) -> jax.Array:
    """The divisor of a hypothesis of `length` tokens, EOS included.

    "fairseq": length^strength, what the papers call length penalty.
    "gnmt": ((5 + length) / 6)^strength (Wu et al., 2016).
    """
    length = length.astype(jnp.float32)
    return length**strength if kind == "fairseq" else ((5 + length) / 6) ** strength


def beam_search(
    step: Step[C],
    reorder: Reorder[C],
    cache: C,
    max_lengths_B: jax.Array,
    *,
    beam_size: int,
    capacity: int,
    min_length: int = 1,
    penalty: float = 1.0,
    penalty_kind: str = "fairseq",
) -> Hypotheses:
    """Searches the best continuations of EOS.

    Args:
      step: the model, one token at a time.
      reorder: how to pick rows of its cache.
      cache: the model's state before the first token, of B * K rows.
      max_lengths_B: int32 [B], tokens of the longest hypothesis without EOS; 0 for rows that are only padding.
      beam_size: K.
      capacity: T, more than the largest of `max_lengths_B`.
      min_length: fewest tokens without EOS; before, EOS is impossible and the other probabilities are not rescaled.
      penalty: strength of the length penalty.
      penalty_kind: see `length_penalty`.
    """
    batch, k = max_lengths_B.shape[0], beam_size
    sentence = jnp.arange(batch)[:, None]
    nothing = jnp.full((batch, k), -jnp.inf)
    empty = jnp.full((batch, k, capacity), PAD, jnp.int32)

    def advance(s: _Search) -> _Search:
        last = jnp.where(s.position == 0, EOS, s.live[:, :, jnp.maximum(s.position - 1, 0)])
        logits_NV, cache = step(s.cache, last.reshape(-1), s.position)
        log_probs = jax.nn.log_softmax(logits_NV).reshape(batch, k, -1)
        vocabulary = log_probs.shape[-1]
        word = jnp.arange(vocabulary)
        at_limit = (s.position >= max_lengths_B)[:, None, None]
        banned = (word == PAD) | ((word == EOS) & (s.position < min_length) & ~at_limit) | ((word != EOS) & at_limit)
        log_probs = jnp.where(banned, -jnp.inf, log_probs)

        # Of the K hypotheses' continuations at most K end, so K of the best 2K live on.
        totals = (s.live_log_probs[:, :, None] + log_probs).reshape(batch, k * vocabulary)
        candidates, index = jax.lax.top_k(totals, 2 * k)
        parent, token = index // vocabulary, (index % vocabulary).astype(jnp.int32)
        tokens = s.live[sentence, parent].at[:, :, s.position].set(token)
        ends = token == EOS

        # Those that end take the free places of the finished list, in order of rank.
        place = s.finished_count[:, None] + jnp.cumsum(ends[:, :k], axis=1) - 1
        place = jnp.where(ends[:, :k] & (candidates[:, :k] > -jnp.inf), place, k)
        scores = candidates / length_penalty(s.position + 1, penalty, penalty_kind)
        finished = s.finished.at[sentence, place].set(tokens[:, :k], mode="drop")
        finished_log_probs = s.finished_log_probs.at[sentence, place].set(candidates[:, :k], mode="drop")
        finished_scores = s.finished_scores.at[sentence, place].set(scores[:, :k], mode="drop")
        finished_count = jnp.minimum(k, s.finished_count + (place < k).sum(1))

        # A stable sort keeps rank order among those that do not end.
        survivors = jnp.argsort(ends, axis=1, stable=True)[:, :k]
        rows = (sentence * k + parent[sentence, survivors]).reshape(-1)
        return _Search(
            position=s.position + 1,
            live=tokens[sentence, survivors],
            live_log_probs=jnp.where(ends[sentence, survivors], -jnp.inf, candidates[sentence, survivors]),
            finished=finished,
            finished_log_probs=finished_log_probs,
            finished_scores=finished_scores,
            finished_count=finished_count,
            cache=reorder(cache, rows),
        )

    def unfinished(s: _Search) -> jax.Array:
        return jnp.any((s.finished_count < k) & (s.position <= max_lengths_B))

    start = _Search(
        position=jnp.int32(0),
        live=empty,
        # All hypotheses are the same at first: let only one of them speak.
        live_log_probs=nothing.at[:, 0].set(0.0),
        finished=empty,
        finished_log_probs=nothing,
        finished_scores=nothing,
        finished_count=jnp.zeros(batch, jnp.int32),
        cache=cache,
    )
    end = jax.lax.while_loop(unfinished, advance, start)
    order = jnp.argsort(-end.finished_scores, axis=1, stable=True)
    return Hypotheses(
        end.finished[sentence, order], end.finished_scores[sentence, order], end.finished_log_probs[sentence, order]
    )

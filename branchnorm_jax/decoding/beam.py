"""Beam search as pure functions of shapes known in advance.

The rules are fairseq's: of the 2K best continuations of a sentence's K hypotheses, those that end (EOS) among the best
K are finished, the best K others live on; a sentence is done when K hypotheses have finished, or at its length limit,
where only EOS is allowed. Finished hypotheses are ranked by log-probability over a length penalty. K = 1 is greedy
search. A sentence is also done once none of its live hypotheses can come to be among the best that are asked for.

With a temperature the K hypotheses are drawn instead, each for itself.

Nothing but small tables of integers moves when hypotheses branch: keys and values stay in the slot that they were
written to, and the ancestors of a hypothesis say in which slots its own are. Slots are a ring that all rows write at
the same place, so a row can begin with a new sentence at any time: what it does not know it does not look at.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from branchnorm_jax.options import EOS, PAD, DecodeConfig

C = TypeVar("C")
"""The model's cache: any tree of arrays."""

Step = Callable[[C, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, C]]
"""(cache, tokens [B, K], positions [B], seen [B, K, slots], slot []) -> (scores [B, K, V], log_z [B, K], cache).

A word's log-probability is its score less log_z. `seen` says at which slots a hypothesis looks; the current tokens are
written to the K slots from `slot` on.
"""

_GROUP = 64
"""Words of which `top` first takes the best."""


class Hypotheses(NamedTuple):
    """Finished hypotheses, best first.

    tokens: int32 [B, K, T], ending in EOS, then padding. scores: float32 [B, K], log-probability over length penalty.
    log_probs: float32 [B, K], natural logarithm, EOS included. token_log_probs: float32 [B, K, T], of each token.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probs: jax.Array
    token_log_probs: jax.Array


class Live(NamedTuple):
    """K hypotheses per sentence that have not ended."""

    tokens: jax.Array
    """int32 [B, K, T]: so far, then anything."""
    token_log_probs: jax.Array
    """float32 [B, K, T]."""
    log_probs: jax.Array
    """Their sums, float32 [B, K]; -inf where there is none."""
    ancestors: jax.Array
    """int32 [B, K, N]: which hypothesis wrote its keys and values at each time of the ring."""


class Search(NamedTuple):
    """Beam searches of B sentences, each at its own position."""

    clock: jax.Array
    """Steps made, int32 []: those of the sentence of a row count from `start`."""
    start: jax.Array
    """int32 [B]."""
    limit: jax.Array
    """Tokens of the longest hypothesis without EOS, int32 [B]; -1: nothing is asked for."""
    least: jax.Array
    """Tokens of the shortest one without EOS, int32 [B]."""
    live: Live
    finished: Hypotheses
    """In order of their end; scores of -inf where there is none yet."""
    ended: jax.Array
    """Of those, how many there are, int32 [B]."""
    number: jax.Array
    """Which sentence a row has, int32 [B]: what is drawn depends on it."""
    prefix: jax.Array
    """Tokens that every hypothesis begins with, int32 [B, P], then -1."""
    nbest: jax.Array
    """How many of the best are asked for, int32 [B], at most K."""
    cache: Any

    @property
    def position(self) -> jax.Array:
        """Tokens of the live hypotheses, int32 [B]."""
        return self.clock - self.start


def length_penalty(length: jax.Array, strength: float, kind: str) -> jax.Array:
    """The divisor of a hypothesis of `length` tokens, EOS included.

    "fairseq": length^strength, what the papers call length penalty.
    "gnmt": ((5 + length) / 6)^strength (Wu et al., 2016).
    """
    length = length.astype(jnp.float32)
    return length**strength if kind == "fairseq" else ((5 + length) / 6) ** strength


def nothing(cache: Any, rows: int, beam_size: int, longest: int, ring: int, prefix: int = 0) -> Search:
    """A search that nothing is asked of yet.

    Args:
      cache: the model's, with ring x beam_size slots a row.
      rows: B.
      beam_size: K.
      longest: T, tokens of the longest hypothesis, EOS included.
      ring: N, times that the cache has slots for.
      prefix: P, tokens of the longest prefix.
    """
    k = beam_size
    # With its type: what goes on with a search would be compiled again for one whose numbers are weakly typed.
    tokens, log_probs = jnp.full((rows, k, longest), PAD, jnp.int32), jnp.full((rows, k), -jnp.inf, jnp.float32)
    each, count = jnp.zeros((rows, k, longest)), jnp.zeros(rows, jnp.int32)
    live = Live(tokens, each, log_probs, jnp.zeros((rows, k, ring), jnp.int32))
    return Search(
        clock=jnp.int32(0),
        start=count,
        limit=count - 1,
        least=count,
        live=live,
        finished=Hypotheses(tokens, log_probs, log_probs, each),
        ended=count,
        number=count,
        prefix=jnp.full((rows, prefix), -1, jnp.int32),
        nbest=count + 1,
        cache=cache,
    )


def begin(
    search: Search,
    rows: jax.Array,
    limits: jax.Array,
    config: DecodeConfig,
    numbers: jax.Array | None = None,
    prefixes: jax.Array | None = None,
    nbest: jax.Array | None = None,
    least: jax.Array | None = None,
) -> Search:
    """Sentences begin in these rows, a row number of B or more is none; arguments as the fields of `Search`."""

    def put(leaf: jax.Array, value: Any) -> jax.Array:
        return leaf.at[rows].set(value, mode="drop")

    # All hypotheses are the same at first: unless they are drawn, let only one of them speak.
    speaks = (jnp.arange(config.beam_size) == 0) | (config.temperature > 0)
    finished = search.finished
    return search._replace(
        start=put(search.start, search.clock),
        limit=put(search.limit, limits),
        least=put(search.least, config.min_length if least is None else least),
        live=search.live._replace(log_probs=put(search.live.log_probs, jnp.where(speaks, 0.0, -jnp.inf))),
        finished=finished._replace(
            tokens=put(finished.tokens, PAD),
            scores=put(finished.scores, -jnp.inf),
            log_probs=put(finished.log_probs, -jnp.inf),
            token_log_probs=put(finished.token_log_probs, 0.0),
        ),
        ended=put(search.ended, 0),
        number=search.number if numbers is None else put(search.number, numbers),
        prefix=search.prefix if prefixes is None else put(search.prefix, prefixes),
        nbest=put(search.nbest, config.nbest if nbest is None else nbest),
    )


def resized(search: Search, ring: int, take_slots: Callable[[Any, jax.Array], Any]) -> Search:
    """The same searches with another number of times, no fewer than any unfinished one needs.

    `take_slots` makes a cache whose slot i is the old slot slots[i], given slots [ring x K].
    """
    old, k = search.live.ancestors.shape[2], search.live.ancestors.shape[1]
    age = (search.clock - 1 - jnp.arange(ring)) % ring
    times = (search.clock - 1 - jnp.minimum(age, old - 1)) % old
    slots = times[:, None] * k + jnp.arange(k)
    live = search.live._replace(ancestors=search.live.ancestors[:, :, times])
    return search._replace(live=live, cache=take_slots(search.cache, slots.reshape(-1)))


def done(search: Search, config: DecodeConfig) -> jax.Array:
    """bool [B]: as many of the best hypotheses are known as are asked for."""
    full = (search.ended >= config.beam_size) | (search.position > search.limit)
    if config.temperature:
        return full
    # What a live hypothesis can come to at best, if all its further words were certain: at the shortest or the longest.
    best = search.live.log_probs.max(1)
    ends = (search.position + 1, search.limit + 1)
    reach = [best / length_penalty(end, config.length_penalty, config.length_penalty_kind) for end in ends]
    ranked = jax.lax.top_k(search.finished.scores, config.beam_size)[0]
    worst_asked_for = jnp.take_along_axis(ranked, search.nbest[:, None] - 1, axis=1)[:, 0]
    return full | ((worst_asked_for > -jnp.inf) & (worst_asked_for >= jnp.maximum(*reach)))


def run(step: Step[Any], search: Search, config: DecodeConfig, until: jax.Array) -> Search:
    """Goes on until `until` of the rows are done, or one needs more times than the ring has."""
    ring = search.live.ancestors.shape[2]

    def go_on(search: Search) -> jax.Array:
        ended = done(search, config)
        return (ended.sum() < until) & jnp.all(ended | (search.position < ring))

    return jax.lax.while_loop(go_on, lambda search: advance(step, search, config), search)


class Choice(NamedTuple):
    """Continuations of a sentence's hypotheses: all [B, C]."""

    parent: jax.Array
    """Which hypothesis is continued, int32."""
    token: jax.Array
    """With which word, int32."""
    log_prob: jax.Array
    """Its log-probability, float32."""
    place: jax.Array
    """Where in the finished list it goes, int32; K if it does not end, or finds no place."""
    survivors: jax.Array
    """Which of the continuations live on, int32 [B, K]."""


def advance(step: Step[Any], search: Search, config: DecodeConfig) -> Search:
    """One token more of every live hypothesis."""
    live, position = search.live, search.position
    batch, k, ring = live.ancestors.shape
    sentence, time = jnp.arange(batch)[:, None], search.clock % ring
    places = jnp.arange(live.tokens.shape[2])

    last = jnp.take_along_axis(live.tokens, jnp.maximum(position - 1, 0)[:, None, None], axis=2)[:, :, 0]
    last = jnp.where(position[:, None] == 0, EOS, last)
    known = (time - 1 - jnp.arange(ring)) % ring < position[:, None]
    seen = known[:, None, :, None] & (live.ancestors[..., None] == jnp.arange(k))
    scores, log_z, cache = step(search.cache, last, position, seen.reshape(batch, k, ring * k), time * k)

    scores = jnp.where(banned(search, config, scores.shape[-1]), -jnp.inf, scores)
    choice = (sample if config.temperature else best)(search, scores, log_z, config)
    here = places == position[:, None, None]
    tokens = jnp.where(here, choice.token[:, :, None], live.tokens[sentence, choice.parent])
    token_log_probs = jnp.where(here, choice.log_prob[:, :, None], live.token_log_probs[sentence, choice.parent])
    totals = live.log_probs[sentence, choice.parent] + choice.log_prob

    penalty = length_penalty(position + 1, config.length_penalty, config.length_penalty_kind)
    inside = places <= position[:, None, None]
    new = Hypotheses(
        jnp.where(inside, tokens, PAD), totals / penalty[:, None], totals, jnp.where(inside, token_log_probs, 0.0)
    )
    finished = jax.tree.map(lambda old, new: old.at[sentence, choice.place].set(new, mode="drop"), search.finished, new)
    alive = choice.survivors
    parents = choice.parent[sentence, alive]
    return search._replace(
        clock=search.clock + 1,
        live=Live(
            tokens[sentence, alive],
            token_log_probs[sentence, alive],
            jnp.where(choice.token == EOS, -jnp.inf, totals)[sentence, alive],
            # A hypothesis wrote at this time what its descendants see.
            jnp.where(jnp.arange(ring) == time, parents[:, :, None], live.ancestors[sentence, parents]),
        ),
        finished=finished,
        ended=search.ended + (choice.place < k).sum(1),
        cache=cache,
    )


def banned(search: Search, config: DecodeConfig, vocabulary: int) -> jax.Array:
    """bool [B, K, V] or less: what must not come next."""
    live, position, word = search.live, search.position[:, None, None], jnp.arange(vocabulary)
    at_limit = position >= search.limit[:, None, None]
    ban = (word == EOS) & (position < search.least[:, None, None]) & ~at_limit
    if n := config.no_repeat_ngram:
        # Where the last n - 1 tokens stood before, the word that followed them.
        length = live.tokens.shape[2]
        start = jnp.arange(length)
        same = start + n - 1 < position
        for j in range(n - 1):
            late = jnp.take_along_axis(live.tokens, jnp.maximum(position - n + 1 + j, 0), axis=2)
            same &= jnp.take(live.tokens, jnp.minimum(start + j, length - 1), axis=2) == late
        follower = jnp.take(live.tokens, jnp.minimum(start + n - 1, length - 1), axis=2)
        rows = (jnp.arange(len(live.tokens))[:, None, None], jnp.arange(live.tokens.shape[1])[:, None], follower)
        ban |= jnp.zeros((*live.tokens.shape[:2], vocabulary), bool).at[rows].max(same) & ~at_limit
    ban |= (word == PAD) | ((word != EOS) & at_limit)
    if search.prefix.shape[1]:
        place = jnp.minimum(position, search.prefix.shape[1] - 1)
        forced = jnp.take_along_axis(search.prefix[:, None], place, axis=2)
        forced = jnp.where(position < search.prefix.shape[1], forced, -1)
        ban = jnp.where(forced >= 0, word != forced, ban)
    return ban


def best(search: Search, scores: jax.Array, log_z: jax.Array, config: DecodeConfig) -> Choice:
    """The 2K best continuations: of K hypotheses at most K end, so K of them live on."""
    batch, k, _ = scores.shape
    values, words = top(_longer(scores, 2 * k), 2 * k)
    log_probs = values - log_z[:, :, None]
    totals, index = jax.lax.top_k((search.live.log_probs[:, :, None] + log_probs).reshape(batch, -1), 2 * k)
    token = jnp.take_along_axis(words.reshape(batch, -1), index, axis=1)
    ends = token == EOS
    # Those that end take the free places of the finished list, in order of rank.
    place = jnp.minimum(k, search.ended[:, None] + jnp.cumsum(ends, axis=1) - 1)
    taken = ends & (totals > -jnp.inf) & (jnp.arange(2 * k) < k)
    return Choice(
        parent=index // (2 * k),
        token=token,
        log_prob=jnp.take_along_axis(log_probs.reshape(batch, -1), index, axis=1),
        place=jnp.where(taken, place, k),
        # A stable sort keeps rank order among those that do not end.
        survivors=jnp.argsort(ends, axis=1, stable=True)[:, :k],
    )


def sample(search: Search, scores: jax.Array, log_z: jax.Array, config: DecodeConfig) -> Choice:
    """A word for each hypothesis, drawn by softmax(scores / temperature) from the `top_k`, and the `top_p`, likeliest.

    Draws depend on seed, sentence, hypothesis and position alone.
    """
    batch, k, vocabulary = scores.shape
    tempered = scores / config.temperature
    if config.top_k:
        least = top(tempered, min(config.top_k, vocabulary))[0][..., -1:]
        tempered = jnp.where(tempered < least, -jnp.inf, tempered)
    if config.top_p < 1:
        order = jnp.sort(tempered, axis=-1, descending=True)
        share = jax.nn.softmax(order)
        # Words until their sum reaches top_p: those before which it has not yet.
        needed = jnp.cumsum(share, axis=-1) - share < config.top_p
        least = jnp.min(jnp.where(needed, order, jnp.inf), axis=-1, keepdims=True)
        tempered = jnp.where(tempered < least, -jnp.inf, tempered)

    def draw(number: jax.Array, hypothesis: jax.Array, position: jax.Array, logits: jax.Array) -> jax.Array:
        key = jax.random.key(config.seed)
        for name in (number, hypothesis, position):
            key = jax.random.fold_in(key, name)
        return jax.random.categorical(key, logits)

    each = jnp.broadcast_to(jnp.arange(k), (batch, k))
    token = jax.vmap(jax.vmap(draw, (None, 0, None, 0)))(search.number, each, search.position, tempered)
    alive = search.live.log_probs > -jnp.inf
    return Choice(
        parent=each,
        token=token.astype(jnp.int32),
        log_prob=jnp.take_along_axis(scores, token[:, :, None], axis=2)[:, :, 0] - log_z,
        place=jnp.where((token == EOS) & alive, each, k),
        survivors=each,
    )


def ranked(search: Search) -> Hypotheses:
    """The finished hypotheses of each row, best first."""
    order = jnp.argsort(-search.finished.scores, axis=1, stable=True)
    return jax.tree.map(lambda leaf: leaf[jnp.arange(len(order))[:, None], order], search.finished)


def top(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of the last axis and their indices, as `jax.lax.top_k`, faster where there are many.

    They are in the `count` groups of `_GROUP` whose own largest are largest.
    """
    *lead, size = scores.shape
    groups = -(-size // _GROUP)
    if groups <= count:
        return jax.lax.top_k(scores, count)
    grouped = _longer(scores, groups * _GROUP).reshape(*lead, groups, _GROUP)
    chosen = jnp.sort(jax.lax.top_k(grouped.max(-1), count)[1], axis=-1)  # so that of equals the first comes first
    # Whole groups are gathered, which is faster than word by word.
    rows = chosen + jnp.arange(math.prod(lead)).reshape(*lead, 1) * groups
    inside = jnp.take(grouped.reshape(-1, _GROUP), rows, axis=0)
    values, index = jax.lax.top_k(inside.reshape(*lead, count * _GROUP), count)
    group = jnp.take_along_axis(chosen, index // _GROUP, axis=-1)
    return values, (group * _GROUP + index % _GROUP).astype(jnp.int32)


def _longer(scores: jax.Array, size: int) -> jax.Array:
    """With a last axis of at least `size`, filled up with -inf."""
    more = max(0, size - scores.shape[-1])
    return jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, more)], constant_values=-jnp.inf)

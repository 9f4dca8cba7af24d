"""Beam search and sampling as pure functions with static shapes.

The search follows fairseq. Each step takes the 2K best continuations of a sentence's K hypotheses. Continuations that
end with EOS and rank among the best K are finished; the K best of the others stay live. A sentence is done when K
hypotheses have finished, or at its length limit, where only EOS is allowed. It is also done as soon as no live
hypothesis can still enter the requested n best. Finished hypotheses are ranked by log-probability divided by a length
penalty. K = 1 is greedy search.

With a temperature, the K hypotheses are sampled independently instead.

When hypotheses branch, the cached keys and values are not moved. They stay in the slot they were written to, and an
integer table of ancestors records which slots belong to each hypothesis. The slots form a ring buffer, and all rows
write to the same slots at each step. A row can therefore start a new sentence at any step: the mask hides the slots of
its previous sentence.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from branchnorm_jax.decoding import constraints
from branchnorm_jax.decoding.constraints import Progress
from branchnorm_jax.options import DecodeConfig
from branchnorm_jax.tokens import EOS, PAD

C = TypeVar("C")
"""Type of the model's cache: any tree of arrays."""

Step = Callable[[C, jax.Array, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, C]]
"""(cache, tokens [B, K], positions [B], seen [B, K, slots], slot []) -> (scores [B, K, V], log_z [B, K], cache).

The log-probability of a token is its score minus log_z. `seen` masks the slots that each hypothesis attends to. The
current tokens are written to K consecutive slots, starting at `slot`.
"""

_GROUP = 64
"""Group size of the first stage of `top`."""


class Hypotheses(NamedTuple):
    """Finished hypotheses, best first.

    Attributes:
      tokens: token ids, ending in EOS and padded: int32 [B, K, T].
      scores: log-probability divided by the length penalty, which counts the language tags: float32 [B, K].
      log_probs: natural log-probability, EOS included, language tags not: float32 [B, K].
      token_log_probs: natural log-probability of each token: float32 [B, K, T].
    """

    tokens: jax.Array
    scores: jax.Array
    log_probs: jax.Array
    token_log_probs: jax.Array


class Live(NamedTuple):
    """The K unfinished hypotheses of each sentence."""

    tokens: jax.Array
    """Token ids, int32 [B, K, T]; undefined beyond the current position."""
    token_log_probs: jax.Array
    """Log-probability of each token, float32 [B, K, T]."""
    log_probs: jax.Array
    """Log-probability of each hypothesis, float32 [B, K]; -inf for an unused one."""
    ancestors: jax.Array
    """Hypothesis whose slot holds the keys and values of each time step of the ring, int32 [B, K, N]."""
    complete: jax.Array
    """Which required phrases ended before the last token, bool [B, K, C]."""


class Given(NamedTuple):
    """The requirements of new sentences. Each field has one value per new sentence; see `Search`."""

    limit: Any
    number: Any = 0
    prefix: Any = -1
    nbest: Any = None
    """By default `decode.nbest`."""
    tags: Any = 0
    prompt: Any = None
    """Tokens that the text starts with, int32 [B, P], padded with -1; none by default. The cache already holds EOS and
    all of them but the last, in the slots of hypothesis 0 of the steps before the current one."""
    may_be_cut: Any = False
    phrases: Any = constraints.NONE


class Search(NamedTuple):
    """Beam searches of B sentences, each at its own position."""

    clock: jax.Array
    """Number of steps made by all rows, int32 []."""
    start: jax.Array
    """Value of `clock` when the sentence of each row started, int32 [B]."""
    limit: jax.Array
    """Maximum number of tokens without EOS, int32 [B]; -1 for an empty row."""
    tags: jax.Array
    """Number of language tags at the start, int32 [B]. They are given, so they count as certain: log-probability 0."""
    prompt: jax.Array
    """Number of tokens at the start that are not part of the text to be found, int32 [B]. Neither a log-probability nor
    a length counts them."""
    may_be_cut: jax.Array
    """Whether a text that reaches its limit has no end, bool [B]. Neither a log-probability nor a length counts its
    EOS."""
    live: Live
    finished: Hypotheses
    """Finished hypotheses in the order in which they finished, or, if sampled, each in its own place. Unused entries
    have a score of -inf."""
    num_finished: jax.Array
    """Number of finished hypotheses, int32 [B]."""
    number: jax.Array
    """Number of the sentence in each row, int32 [B]; seeds its samples."""
    prefix: jax.Array
    """Tokens that every hypothesis starts with, int32 [B, P], padded with -1."""
    nbest: jax.Array
    """Number of hypotheses requested, int32 [B], at most K."""
    phrases: jax.Array
    """Phrases that every hypothesis contains, int32 [B, C, P], padded with -1."""
    word_starts: jax.Array
    """Tokens that do not continue a word, bool [V]; only needed with phrases."""
    cache: Any

    @property
    def position(self) -> jax.Array:
        """Length of the live hypotheses in tokens, int32 [B]."""
        return self.clock - self.start

    @property
    def longest(self) -> jax.Array:
        """Length of the longest hypotheses in tokens, int32 [B], EOS included if they have one."""
        return self.limit + 1 - self.may_be_cut

    def penalty(self, length: jax.Array, config: DecodeConfig) -> jax.Array:
        """Returns the divisor of the log-probability of hypotheses of `length` tokens, int32 [B], EOS included."""
        own = jnp.maximum(length - self.prompt, 1)  # No hypothesis ends in the prompt.
        return length_penalty(own, config.length_penalty, config.length_penalty_kind)


def length_penalty(length: jax.Array, strength: float, kind: str) -> jax.Array:
    """Returns the divisor of the log-probability of `length` tokens, EOS included.

    The divisor is length^strength ("fairseq") or ((5 + length) / 6)^strength ("gnmt", Wu et al., 2016).
    """
    length = length.astype(jnp.float32)
    return length**strength if kind == "fairseq" else ((5 + length) / 6) ** strength


def empty_search(
    cache: Any,
    rows: int,
    beam_size: int,
    longest: int,
    ring: int,
    prefix: int = 0,
    phrases: tuple[int, int] = (0, 0),
    word_starts: Any = (),
) -> Search:
    """Returns a search whose rows are all empty.

    Args:
      cache: the model's cache, with ring x beam_size slots per row.
      rows: B.
      beam_size: K.
      longest: T, maximum number of tokens of a hypothesis, EOS included.
      ring: N, number of time steps that the cache has slots for.
      prefix: maximum number of tokens of a prefix.
      phrases: C and P, the maximum number of phrases and of their tokens.
      word_starts: the tokens that do not continue a word, bool [V]; only needed with phrases.
    """
    k = beam_size
    # Types are explicit: weakly typed arrays would make jit compile the following steps a second time.
    tokens, log_probs = jnp.full((rows, k, longest), PAD, jnp.int32), jnp.full((rows, k), -jnp.inf, jnp.float32)
    each, count = jnp.zeros((rows, k, longest)), jnp.zeros(rows, jnp.int32)
    complete = jnp.zeros((rows, k, phrases[0]), bool)
    live = Live(tokens, each, log_probs, jnp.zeros((rows, k, ring), jnp.int32), complete)
    return Search(
        clock=jnp.int32(0),
        start=count,
        limit=count - 1,
        tags=count,
        prompt=count,
        may_be_cut=count > 0,
        live=live,
        finished=Hypotheses(tokens, log_probs, log_probs, each),
        num_finished=count,
        number=count,
        prefix=jnp.full((rows, prefix), -1, jnp.int32),
        nbest=count + 1,
        phrases=jnp.full((rows, *phrases), constraints.NONE, jnp.int32),
        word_starts=jnp.asarray(word_starts, bool),
        cache=cache,
    )


def begin(search: Search, rows: jax.Array, given: Given, config: DecodeConfig) -> Search:
    """Starts new sentences in the given rows; row numbers of B or more are ignored."""

    def put(leaf: jax.Array, value: Any) -> jax.Array:
        return leaf.at[rows].set(value, mode="drop")

    def put_first(leaf: jax.Array, value: Any) -> jax.Array:
        return leaf.at[rows, :, : prompt.shape[1]].set(value, mode="drop")

    prompt = jnp.full((1, 0), -1) if given.prompt is None else given.prompt
    read = (prompt >= 0).sum(1, dtype=jnp.int32)
    # The K hypotheses of a new sentence are identical, so beam search starts from one of them; sampling uses all.
    active = (jnp.arange(config.beam_size) == 0) | (config.temperature > 0)
    finished, phrases = search.finished, put(search.phrases, given.phrases)
    return search._replace(
        start=put(search.start, search.clock - read),
        limit=put(search.limit, given.limit),
        tags=put(search.tags, given.tags),
        prompt=put(search.prompt, read),
        may_be_cut=put(search.may_be_cut, given.may_be_cut),
        live=search.live._replace(
            tokens=put_first(search.live.tokens, prompt[:, None]),
            token_log_probs=put_first(search.live.token_log_probs, 0.0),
            ancestors=put(search.live.ancestors, 0),
            log_probs=put(search.live.log_probs, jnp.where(active, 0.0, -jnp.inf)),
            # Padding is complete from the start, so that no word seems to have just ended.
            complete=put(search.live.complete, False) | (phrases == constraints.NONE).all(-1)[:, None],
        ),
        finished=finished._replace(
            tokens=put(finished.tokens, PAD),
            scores=put(finished.scores, -jnp.inf),
            log_probs=put(finished.log_probs, -jnp.inf),
            token_log_probs=put(finished.token_log_probs, 0.0),
        ),
        num_finished=put(search.num_finished, 0),
        number=put(search.number, given.number),
        prefix=put(search.prefix, given.prefix),
        nbest=put(search.nbest, config.nbest if given.nbest is None else given.nbest),
        phrases=phrases,
    )


def resized(search: Search, ring: int, take_slots: Callable[[Any, jax.Array], Any]) -> Search:
    """Returns the searches with a ring of another size.

    The ring must be large enough for every unfinished sentence.

    Args:
      search: the searches.
      ring: new number of time steps.
      take_slots: (cache, slots [ring x K]) -> cache whose slot i is the old slot slots[i].
    """
    old, k = search.live.ancestors.shape[2], search.live.ancestors.shape[1]
    age = (search.clock - 1 - jnp.arange(ring)) % ring
    times = (search.clock - 1 - jnp.minimum(age, old - 1)) % old
    slots = times[:, None] * k + jnp.arange(k)
    live = search.live._replace(ancestors=search.live.ancestors[:, :, times])
    return search._replace(live=live, cache=take_slots(search.cache, slots.reshape(-1)))


def done(search: Search, config: DecodeConfig) -> jax.Array:
    """Returns whether the requested n best hypotheses of each row are final: bool [B]."""
    full = (search.num_finished >= config.beam_size) | (search.position > search.limit)
    if config.temperature:
        return full
    # Upper bound of a live hypothesis' score: all further tokens have probability 1. The penalty is monotonic in the
    # length, so the maximum is at the smallest or at the largest possible length.
    best = search.live.log_probs.max(1)
    ends = (jnp.minimum(search.position + 1, search.longest), search.longest)
    bounds = [best / search.penalty(end, config) for end in ends]
    ranked = jax.lax.top_k(search.finished.scores, config.beam_size)[0]
    worst_requested = jnp.take_along_axis(ranked, search.nbest[:, None] - 1, axis=1)[:, 0]
    return full | ((worst_requested > -jnp.inf) & (worst_requested >= jnp.maximum(*bounds)))


def run(step: Step[Any], search: Search, config: DecodeConfig, until: jax.Array) -> Search:
    """Advances all rows until `until` of them are done, or one outgrows the ring."""
    ring = search.live.ancestors.shape[2]

    def go_on(search: Search) -> jax.Array:
        ended = done(search, config)
        return (ended.sum() < until) & jnp.all(ended | (search.position < ring))

    return jax.lax.while_loop(go_on, lambda search: advance(step, search, config), search)


class Choice(NamedTuple):
    """The M continuations chosen for the hypotheses of each sentence."""

    parent: jax.Array
    """Hypothesis that is continued, int32 [B, M]."""
    token: jax.Array
    """Next token, int32 [B, M]."""
    log_prob: jax.Array
    """Log-probability of the token, float32 [B, M]."""
    place: jax.Array
    """Index in the finished list, int32 [B, M]; K if the continuation is not added to it."""
    survivors: jax.Array
    """Continuations that become the live hypotheses, int32 [B, K]."""


def advance(step: Step[Any], search: Search, config: DecodeConfig) -> Search:
    """Extends every live hypothesis by one token."""
    live, position = search.live, search.position
    batch, k, ring = live.ancestors.shape
    sentence, time = jnp.arange(batch)[:, None], search.clock % ring
    places = jnp.arange(live.tokens.shape[2])

    last = jnp.take_along_axis(live.tokens, jnp.maximum(position - 1, 0)[:, None, None], axis=2)[:, :, 0]
    last = jnp.where(position[:, None] == 0, EOS, last)
    known = (time - 1 - jnp.arange(ring)) % ring < position[:, None]
    seen = known[:, None, :, None] & (live.ancestors[..., None] == jnp.arange(k))
    scores, log_z, cache = step(search.cache, last, position, seen.reshape(batch, k, ring * k), time * k)

    certain = (position < search.tags) | (search.may_be_cut & (position >= search.limit))
    scores = jnp.where(certain[:, None, None], log_z[:, :, None], scores)
    state = constraints.progress(live.tokens, position, live.complete, search.phrases)
    scores = jnp.where(banned(search, state, config, scores.shape[-1]), -jnp.inf, scores)
    choice = sample(search, scores, log_z, config) if config.temperature else best(search, state, scores, log_z)
    here = places == position[:, None, None]
    tokens = jnp.where(here, choice.token[:, :, None], live.tokens[sentence, choice.parent])
    token_log_probs = jnp.where(here, choice.log_prob[:, :, None], live.token_log_probs[sentence, choice.parent])
    totals = live.log_probs[sentence, choice.parent] + choice.log_prob

    penalty = search.penalty(jnp.minimum(position + 1, search.longest), config)
    inside = places <= position[:, None, None]
    new = Hypotheses(
        jnp.where(inside, tokens, PAD), totals / penalty[:, None], totals, jnp.where(inside, token_log_probs, 0.0)
    )
    finished = jax.tree.map(lambda old, new: old.at[sentence, choice.place].set(new, mode="drop"), search.finished, new)
    alive = choice.survivors
    parents = choice.parent[sentence, alive]
    complete = state.complete[sentence, parents]
    if search.phrases.size:
        # A prefix may lengthen the last word of a phrase, which is not complete then.
        whole = search.word_starts[choice.token[sentence, alive]]
        complete = jnp.where(whole[..., None], complete, live.complete[sentence, parents])
    return search._replace(
        clock=search.clock + 1,
        live=Live(
            tokens[sentence, alive],
            token_log_probs[sentence, alive],
            jnp.where(choice.token == EOS, -jnp.inf, totals)[sentence, alive],
            # At this time step, the parent wrote the keys and values that its descendants read.
            jnp.where(jnp.arange(ring) == time, parents[:, :, None], live.ancestors[sentence, parents]),
            complete,
        ),
        finished=finished,
        num_finished=search.num_finished + (choice.place < k).sum(1, dtype=jnp.int32),
        cache=cache,
    )


def banned(search: Search, state: Progress, config: DecodeConfig, vocabulary: int) -> jax.Array:
    """Returns the tokens that must not come next: bool, broadcastable to [B, K, V].

    At its length limit, a hypothesis ends, or is lost if a phrase is missing.
    """
    live, position, word = search.live, search.position[:, None, None], jnp.arange(vocabulary)
    at_limit = position >= search.limit[:, None, None]
    shortest = config.min_length + (search.tags + search.prompt)[:, None, None]
    ban = (word == EOS) & (position < shortest) & ~at_limit
    if n := config.no_repeat_ngram:
        # Ban the token that followed each earlier occurrence of the last n - 1 tokens.
        length = live.tokens.shape[2]
        start = jnp.arange(length)
        same = start + n - 1 < position
        for j in range(n - 1):
            late = jnp.take_along_axis(live.tokens, jnp.maximum(position - n + 1 + j, 0), axis=2)
            same &= jnp.take(live.tokens, jnp.minimum(start + j, length - 1), axis=2) == late
        follower = jnp.take(live.tokens, jnp.minimum(start + n - 1, length - 1), axis=2)
        rows = (jnp.arange(len(live.tokens))[:, None, None], jnp.arange(live.tokens.shape[1])[:, None], follower)
        ban |= jnp.zeros((*live.tokens.shape[:2], vocabulary), bool).at[rows].max(same) & ~at_limit
    if search.phrases.size:
        ban |= constraints.banned(state, live.complete, search.word_starts, EOS)
    ban |= (word == PAD) | ((word != EOS) & at_limit)
    if search.prefix.shape[1]:
        place = jnp.minimum(position, search.prefix.shape[1] - 1)
        forced = jnp.take_along_axis(search.prefix[:, None], place, axis=2)
        forced = jnp.where(position < search.prefix.shape[1], forced, -1)
        ban = jnp.where(forced >= 0, word != forced, ban)
    return ban


def best(search: Search, state: Progress, scores: jax.Array, log_z: jax.Array) -> Choice:
    """Chooses the 2K best continuations: at most K end, so at least K stay live.

    If there are phrases, the continuations that begin or continue them are candidates too, and the beam is divided as
    described in `constraints`.
    """
    batch, k, _ = scores.shape
    values, words = top(_pad_last_axis(scores, 2 * k), 2 * k)
    if search.phrases.size:
        more = constraints.next_tokens(state, search.phrases)
        further = jnp.take_along_axis(scores, jnp.maximum(more, 0), axis=2)
        words = jnp.concatenate([words, more], axis=2)
        values = jnp.concatenate([values, further], axis=2)
        values = jnp.where(constraints.repeated(words) | (words == constraints.NONE), -jnp.inf, values)
    each = words.shape[2]
    log_probs = values - log_z[:, :, None]
    totals = (search.live.log_probs[:, :, None] + log_probs).reshape(batch, -1)
    if search.phrases.size:
        bank = constraints.banks(state, search.phrases, words).reshape(batch, -1)
        index = constraints.allocated(totals, bank, 2 * k)
    else:
        index = jax.lax.top_k(totals, 2 * k)[1]
    totals = jnp.take_along_axis(totals, index, axis=1)
    token = jnp.take_along_axis(words.reshape(batch, -1), index, axis=1)
    ends = token == EOS
    # Finished continuations take the free places of the finished list in order of rank.
    place = jnp.minimum(k, search.num_finished[:, None] + jnp.cumsum(ends, axis=1, dtype=jnp.int32) - 1)
    taken = ends & (totals > -jnp.inf) & (jnp.arange(2 * k) < k)
    return Choice(
        parent=index // each,
        token=token,
        log_prob=jnp.take_along_axis(log_probs.reshape(batch, -1), index, axis=1),
        place=jnp.where(taken, place, k),
        # The sort is stable, so the unfinished continuations keep their order of rank.
        survivors=jnp.argsort(ends, axis=1, stable=True)[:, :k].astype(jnp.int32),
    )


COLDEST = 1e-6
"""Smallest temperature: the division by a smaller one could give several infinite scores."""


def sample(search: Search, scores: jax.Array, log_z: jax.Array, config: DecodeConfig) -> Choice:
    """Samples a token for each hypothesis from softmax(scores / temperature).

    `top_k` and `top_p` restrict the distribution. A sample depends only on the seed, the sentence number, the
    hypothesis and the position.
    """
    batch, k, vocabulary = scores.shape
    tempered = scores / max(config.temperature, COLDEST)
    if config.top_k:
        threshold = top(tempered, min(config.top_k, vocabulary))[0][..., -1:]
        tempered = jnp.where(tempered < threshold, -jnp.inf, tempered)
    if config.top_p < 1:
        order = jnp.sort(tempered, axis=-1, descending=True)
        share = jax.nn.softmax(order)
        # Keep a token if the tokens before it sum to less than top_p.
        needed = jnp.cumsum(share, axis=-1) - share < config.top_p
        threshold = jnp.min(jnp.where(needed, order, jnp.inf), axis=-1, keepdims=True)
        tempered = jnp.where(tempered < threshold, -jnp.inf, tempered)

    def draw(number: jax.Array, hypothesis: jax.Array, position: jax.Array, logits: jax.Array) -> jax.Array:
        key = jax.random.key(config.seed)
        for name in (number, hypothesis, position):
            key = jax.random.fold_in(key, name)
        return jax.random.categorical(key, logits)

    each = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
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
    """Returns the finished hypotheses of each row, best first."""
    order = jnp.argsort(-search.finished.scores, axis=1, stable=True)
    return jax.tree.map(lambda leaf: leaf[jnp.arange(len(order))[:, None], order], search.finished)


def top(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `count` largest values of the last axis and their indices.

    Equivalent to `jax.lax.top_k`, but faster for a long axis: the values are searched only in the `count` groups of
    `_GROUP` elements that have the largest maxima.
    """
    *lead, size = scores.shape
    groups = -(-size // _GROUP)
    if groups <= count:
        return jax.lax.top_k(scores, count)
    grouped = _pad_last_axis(scores, groups * _GROUP).reshape(*lead, groups, _GROUP)
    chosen = jnp.sort(jax.lax.top_k(grouped.max(-1), count)[1], axis=-1)  # sorted, so that ties keep their order
    # Gathering whole groups is faster than gathering single elements.
    rows = chosen + jnp.arange(math.prod(lead)).reshape(*lead, 1) * groups
    inside = jnp.take(grouped.reshape(-1, _GROUP), rows, axis=0)
    values, index = jax.lax.top_k(inside.reshape(*lead, count * _GROUP), count)
    group = jnp.take_along_axis(chosen, index // _GROUP, axis=-1)
    return values, (group * _GROUP + index % _GROUP).astype(jnp.int32)


def _pad_last_axis(scores: jax.Array, size: int) -> jax.Array:
    """Pads the last axis with -inf to at least `size`."""
    more = max(0, size - scores.shape[-1])
    return jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, more)], constant_values=-jnp.inf)

"""Continuous decoding: rows whose sentence is done take the next one, so that a batch stays full to the end."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.decoding import beam
from branchnorm_jax.decoding.beam import Hypotheses, Search
from branchnorm_jax.model.cache import Caches, take_slots, write_sources
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.places import source_mask
from branchnorm_jax.model.transformer import BranchScale, Transformer
from branchnorm_jax.options import PAD, DecodeConfig

T = TypeVar("T")

SHORTEST = 16
"""Sources are padded to this length or twice, four times ... as much, so that few shapes are compiled."""

REFILL = 4
"""New sentences come in when a part of the rows as large as one over this is free."""

ALONG = 4
"""Shorter sentences, as a multiple of the rows, for which no other shape is taken."""


class Text(NamedTuple):
    """What decoding keeps of each row: the models' caches, and which source positions hold a token, bool [B, 1, S]."""

    caches: tuple[Caches, ...]
    mask_B1S: jax.Array


Weights = tuple[tuple[Params, BranchScale], ...]
"""Parameters and alpha_t of each model."""


class Asked(NamedTuple):
    """A sentence to translate."""

    source: Sequence[int]
    """Token ids, EOS last."""
    number: int
    """What is drawn depends on it."""
    prefix: Sequence[int] = ()
    """Token ids that its translations begin with, without EOS."""
    nbest: int = 1
    """How many of its best hypotheses are wanted, at most K; others may be there or not."""
    tags: int = 0
    """How many tokens of the prefix are language tags, which no length of a translation counts."""


class New(NamedTuple):
    """Sentences that begin, int32 arrays with an axis of rows: see `beam.begin`."""

    source: Any
    row: Any
    limit: Any
    number: Any
    prefix: Any
    nbest: Any
    least: Any


def padded_length(length: int) -> int:
    """The smallest of 16, 32, 64 ... that holds `length` tokens."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def padded_lengths(longest: int) -> list[int]:
    """Those of all sentences of up to `longest` tokens."""
    return [SHORTEST << doubled for doubled in range((padded_length(longest) // SHORTEST).bit_length())]


def rounded(count: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16 ... that is no less than `count`: again, to compile few shapes."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


def coarse(count: int) -> int:
    """The smallest of 1, 4, 16, 64 ... that is no less than `count`: so few that all can be compiled beforehand."""
    return 1 << ((count - 1).bit_length() + 1) // 2 * 2


def column(values: Sequence[int], rows: int) -> np.ndarray:
    """int32 [rows], filled up with -1."""
    return np.array([*values, *[-1] * (rows - len(values))], np.int32)


def pad(sentences: Sequence[Sequence[int]], rows: int, length: int, filling: int = PAD) -> np.ndarray:
    """int32 [rows, length] of token ids, filled up with padding."""
    out = np.full((rows, length), filling, np.int32)
    for row, ids in enumerate(sentences):
        out[row, : len(ids)] = ids
    return out


def vote(each: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """(scores, log_z) of the mean of the models' probabilities, from theirs: scores - log_z is a log-probability."""
    if len(each) == 1:
        return each[0]
    log_probs = jnp.stack([scores - log_z[..., None] for scores, log_z in each])
    return jax.nn.logsumexp(log_probs, axis=0), jnp.full(log_probs.shape[1:-1], jnp.log(len(each)))


def side_by_side(streams: Sequence[Iterator[Sequence[T]]]) -> Iterator[T]:
    """What all of them give, as it comes.

    As many threads as streams take turns, for what one thread asks of a CPU is done one after another.
    """
    if len(streams) == 1:
        yield from chain.from_iterable(streams[0])
        return
    with ThreadPoolExecutor(len(streams)) as threads:
        turns = {threads.submit(next, stream, None): stream for stream in streams}
        while turns:
            for turn in wait(turns, return_when=FIRST_COMPLETED).done:
                stream, found = turns.pop(turn), turn.result()
                if found is not None:
                    turns[threads.submit(next, stream, None)] = stream
                    yield from found


@dataclasses.dataclass(frozen=True)
class Engine:
    """Beam search with models whose parameters are given at each call, so that nothing compiles twice.

    Several models vote: a word's probability is the mean of theirs.

    Attributes:
      models: at least one.
      config: the options of decoding.
      rounding: rows for so many sentences, if the batch does not get full.
    """

    models: tuple[Transformer, ...]
    config: DecodeConfig
    rounding: Callable[[int], int] = rounded

    def search(self, weights: Weights, texts: Sequence[Asked]) -> Iterator[tuple[int, Hypotheses]]:
        """(index, hypotheses without axis B) of each text, as they are done: long ones first.

        A hypothesis does not depend on what else is decoded: its limit comes from its own source's length, and rows
        know nothing of each other.

        Several batches, the streams, are searched at the same time: many operations of a step are too small for all
        cores of a CPU. Which texts a stream has does not depend on which one is faster, so neither do rounding errors.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].source))
        weights = self._ready(weights)
        while order:
            length = padded_length(len(texts[order[-1]].source))
            same = sum(padded_length(len(texts[index].source)) == length for index in order)
            rows = self._rows(length)
            # A few shorter ones are not worth a shape of their own, which rows would wait for, and so come along.
            group = order[-max(same, rows) :] if len(order) - same > ALONG * rows else order[:]
            del order[-len(group) :]
            parts = [group[which :: self._streams] for which in range(min(self._streams, len(group)))]
            shape = min(rows, self.rounding(len(parts[0]))), length, max(len(texts[index].prefix) for index in group)
            yield from side_by_side([self._stream(weights, texts, part, *shape) for part in parts])

    def _stream(
        self,
        weights: Weights,
        texts: Sequence[Asked],
        waiting: list[int],
        rows: int,
        length: int,
        prefix: int,
    ) -> Iterator[list[tuple[int, Hypotheses]]]:
        """In so many rows texts of at most `length` tokens and prefixes of `prefix`, from the end of `waiting`."""
        chunk = max(1, rows // REFILL)
        prefix = padded_length(prefix) if prefix else 0
        rings = self._rings(length, prefix)
        ring = rings[0]
        search = self._start(weights, rows, length, ring, prefix)
        inside: dict[int, int] = {}
        while waiting or inside:
            free = [row for row in range(rows) if row not in inside]
            while waiting and free:
                count = min(chunk, len(free), len(waiting))
                taken = {free.pop(): waiting.pop() for _ in range(count)}
                inside |= taken
                given = [texts[index] for index in taken.values()]
                search = self._begin(weights, search, self._new(given, list(taken), rows, length, prefix))
            # While any wait, no row is free.
            until = chunk if waiting else rows
            search = self._run(weights, search, np.int32(until))
            done, positions, found = jax.device_get(self._look(search))
            over = [row for row in inside if done[row]]
            yield [(inside.pop(row), jax.tree.map(lambda leaf, row=row: leaf[row], found)) for row in over]
            needed = max((int(positions[row]) for row in inside), default=0)
            wanted = next(size for size in rings if size > needed)
            if wanted > ring or wanted * 2 < ring:
                ring = wanted
                search = self._resized(search, ring)

    def warm_up(self, weights: Weights, longest: int, prefix: int) -> None:
        """Compiles what sources of up to `longest` tokens need, however many come, with prefixes of `prefix` tokens."""
        prefix = padded_length(prefix) if prefix else 0
        weights = self._ready(weights)
        for length in padded_lengths(longest):
            full, rings = self._rows(length), self._rings(length, prefix)
            for rows in {min(full, self.rounding(count)) for count in range(1, full + 1)}:
                for index, ring in enumerate(rings):
                    # Of nothing asked for all is done, so this takes no time once it is compiled.
                    search = self._start(weights, rows, length, ring, prefix)
                    search = self._begin(weights, search, self._new([], [], rows, length, prefix))
                    search = self._run(weights, search, np.int32(rows))
                    self._look(search)
                    # As `_stream` does: to the next one, or to one of less than half the size.
                    for other in [*rings[index + 1 : index + 2], *(size for size in rings if size * 2 < ring)]:
                        self._resized(search, other)

    def _new(self, given: Sequence[Asked], places: Sequence[int], rows: int, length: int, prefix: int) -> New:
        """Sentences that begin in these of so many rows."""
        chunk = max(1, rows // REFILL)
        return New(
            pad([text.source for text in given], chunk, length),
            np.array([*places, *[rows] * (chunk - len(places))], np.int32),
            column([self.limit(len(text.source)) + len(text.prefix) for text in given], chunk),
            column([text.number for text in given], chunk),
            pad([text.prefix for text in given], chunk, prefix, -1),
            column([text.nbest for text in given], chunk),
            column([self.config.min_length + text.tags for text in given], chunk),
        )

    @property
    def _streams(self) -> int:
        """Batches that are searched at the same time, at most."""
        alone = jax.default_backend() == "cpu" and jax.device_count() == 1
        return self.config.streams or (2 if alone else 1)

    def _rows(self, length: int) -> int:
        """Sentences of this padded length in a full batch."""
        return max(1, self.config.batch_tokens // (length * self.config.beam_size))

    def limit(self, length: int) -> int:
        """Tokens of the longest translation of a source of `length` tokens, EOS not counted."""
        return int(self.config.max_length_a * length + self.config.max_length_b)

    def _rings(self, length: int, prefix: int) -> list[int]:
        """Times of the ring that sources and prefixes of these padded lengths may come to need, ascending."""
        longest = self.limit(length) + 1 + prefix
        sizes = [min(max(32, length), longest)]
        while sizes[-1] < longest:
            sizes.append(min(2 * sizes[-1], longest))
        return sizes

    def _ready(self, weights: Weights) -> Weights:
        """Weights of which those of no deep decoder lie in a stack."""
        return tuple(
            (model.apart(params) if model.config.decoder_layers <= self.config.unroll else params, branch_scale)
            for model, (params, branch_scale) in zip(self.models, weights, strict=True)
        )

    @functools.cached_property
    def _start(self) -> Callable[[Weights, int, int, int, int], Search]:
        @functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
        def start(weights: Weights, rows: int, length: int, ring: int, prefix: int) -> Search:
            k, caches = self.config.beam_size, []
            for model, (params, _) in zip(self.models, weights, strict=True):
                memory = jnp.zeros((rows, length, model.config.width), model.config.carry_dtype)
                caches.append(model.start_cache(params, memory, ring * k))
            text = Text(tuple(caches), jnp.zeros((rows, 1, length), bool))
            return beam.nothing(text, rows, k, self.limit(length) + 1 + prefix, ring, prefix)

        return start

    @functools.cached_property
    def _begin(self) -> Callable[[Weights, Search, New], Search]:
        @functools.partial(jax.jit, donate_argnums=1)
        def begin(weights: Weights, search: Search, new: New) -> Search:
            caches, mask = search.cache

            def filled(model: Transformer, params: Params, branch_scale: BranchScale, caches: Caches) -> Caches:
                made = model.start_cache(params, model.encode(params, new.source, branch_scale), 0)
                return write_sources(caches, made, new.row)

            members = zip(self.models, weights, caches, strict=True)
            text = Text(
                tuple(filled(model, *weight, cache) for model, weight, cache in members),
                mask.at[new.row].set(source_mask(new.source), mode="drop"),
            )
            given = new.number, new.prefix, new.nbest, new.least
            return beam.begin(search._replace(cache=text), new.row, new.limit, self.config, *given)

        return begin

    @functools.cached_property
    def _run(self) -> Callable[[Weights, Search, np.int32], Search]:
        @functools.partial(jax.jit, donate_argnums=1)
        def run(weights: Weights, search: Search, until: jax.Array) -> Search:
            longest = search.live.tokens.shape[2]
            tables = [model.positions(longest) for model in self.models]

            def step(
                text: Text, tokens: jax.Array, position: jax.Array, seen: jax.Array, slot: jax.Array
            ) -> tuple[jax.Array, jax.Array, Text]:
                place, caches, votes = jnp.minimum(position, longest - 1), [], []
                for model, table, (params, alpha), cache in zip(self.models, tables, weights, text.caches, strict=True):
                    logits, cache = model.step(
                        params, cache, text.mask_B1S, tokens, table[place][:, None], seen, slot, alpha
                    )
                    votes.append((logits, jax.nn.logsumexp(logits, axis=-1)))
                    caches.append(cache)
                return *vote(votes), text._replace(caches=tuple(caches))

            return beam.run(step, search, self.config, until)

        return run

    @functools.cached_property
    def _resized(self) -> Callable[[Search, int], Search]:
        def taken(text: Text, slots: jax.Array) -> Text:
            return text._replace(caches=tuple(take_slots(caches, slots) for caches in text.caches))

        @functools.partial(jax.jit, static_argnums=1)
        def resized(search: Search, ring: int) -> Search:
            return beam.resized(search, ring, taken)

        return resized

    @functools.cached_property
    def _look(self) -> Callable[[Search], tuple[jax.Array, jax.Array, Hypotheses]]:
        return jax.jit(lambda search: (beam.done(search, self.config), search.position, beam.ranked(search)))

"""Continuous batching: a row whose sentence is done takes the next sentence, so batches stay full."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from branchnorm_jax.decoding import beam
from branchnorm_jax.decoding.beam import Given, Hypotheses, Search
from branchnorm_jax.decoding.constraints import NONE
from branchnorm_jax.decoding.precision import narrowed, narrows
from branchnorm_jax.model import incremental
from branchnorm_jax.model.cache import Caches, split_heads, take_slots, write_sources
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.incremental import CurrentTokens, empty_caches, start_cache, unstack_decoder
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.segments import source_mask
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig
from branchnorm_jax.tokens import PAD

T = TypeVar("T")

SHORTEST = 16
"""Sources are padded to this length times a power of two, so that few shapes are compiled."""

REFILL = 4
"""Rows are refilled when 1 / REFILL of them are free."""

UNROLLED = 12
"""Decoders of up to this many layers run without a loop."""

LONG = 1000
"""On CPUs, deeper ones do so too if sentences of similar length have this many tokens per layer. Then they save more
time than their programs take to compile: 100L-100L of width 128 saves 15 %, 0.8 seconds for 2,000 tokens, and each of
about two programs compiles for 20 more seconds."""

MERGE_LIMIT = 4
"""If the shorter sentences fill at most this many batches, they are decoded with the longer ones in the same shape."""


class EncodedSources(NamedTuple):
    """The encoded texts of a batch: the models' caches, and a mask that is True at source tokens, bool [B, 1, S]."""

    caches: tuple[Caches, ...]
    mask_B1S: jax.Array


Weights = tuple[tuple[Params, Alpha], ...]
"""Parameters and alpha_t of each model."""

Devices = Mesh | AbstractMesh | None
"""The mesh that the parameters are on; None if they are on one device."""


class Query(NamedTuple):
    """A sentence to translate."""

    source: Sequence[int]
    """Token ids, EOS last."""
    number: int
    """Seeds the samples of this sentence."""
    prefix: Sequence[int] = ()
    """Token ids that every translation starts with, without EOS."""
    nbest: int = 1
    """Number of hypotheses requested, at most K. Hypotheses beyond the first `nbest` may be missing or not the best."""
    tags: int = 0
    """Number of language tags at the start of the prefix; see `beam.Search.tags`."""
    phrases: Sequence[Sequence[int]] = ()
    """Token ids of phrases that every translation contains."""

    @property
    def given(self) -> int:
        """Number of tokens that the translation contains in any case."""
        return len(self.prefix) + sum(map(len, self.phrases))


class Shape(NamedTuple):
    """Sizes of a batch."""

    rows: int
    length: int
    """Padded length of the sources."""
    prefix: int = 0
    """Padded length of the prefixes."""
    phrases: tuple[int, int] = (0, 0)
    """Number of phrases of a sentence and number of tokens of a phrase, both padded."""


class New(NamedTuple):
    """New sentences for some rows, as int32 arrays."""

    source: Any
    row: Any
    given: Given


def padded_length(length: int) -> int:
    """Returns the smallest of 16, 32, 64, ... that is at least `length`."""
    return max(SHORTEST, 1 << (length - 1).bit_length())


def padded_lengths(longest: int) -> list[int]:
    """Returns the padded lengths of all sentences of up to `longest` tokens."""
    return [SHORTEST << doubled for doubled in range((padded_length(longest) // SHORTEST).bit_length())]


def encoded_lengths(length: int) -> list[int]:
    """Returns the ascending lengths to which the encoder pads the sources of a batch of this padded length."""
    return [length // 2, length] if length > SHORTEST else [length]


def rounded(count: int) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, ..., so that few shapes are compiled."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power


def coarse(count: int) -> int:
    """Rounds up to 1, 4, 16, 64, ..., few enough to compile them all up front."""
    return 1 << ((count - 1).bit_length() + 1) // 2 * 2


def column(values: Sequence[int], rows: int) -> np.ndarray:
    """Converts values to int32 [rows], padded with -1."""
    return np.array([*values, *[-1] * (rows - len(values))], np.int32)


def padded_shape(rows: int, length: int, texts: Sequence[Query]) -> Shape:
    """Returns the shape of a batch of `rows` rows, sources of the padded length `length`, and these sentences."""
    prefix = max(len(text.prefix) for text in texts)
    count = max(len(text.phrases) for text in texts)
    longest = max((len(phrase) for text in texts for phrase in text.phrases), default=0)
    phrases = (coarse(count), coarse(longest)) if count else (0, 0)
    return Shape(rows, length, padded_length(prefix) if prefix else 0, phrases)


def pad(sentences: Sequence[Sequence[int]], rows: int, length: int, filling: int = PAD) -> np.ndarray:
    """Converts sentences to token ids, int32 [rows, length], padded with `filling`."""
    out = np.full((rows, length), filling, np.int32)
    for row, ids in enumerate(sentences):
        out[row, : len(ids)] = ids
    return out


def vote(each: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Combines (scores, log_z) of models into those of their mean probabilities.

    For each model and for the result, scores - log_z are log-probabilities.
    """
    if len(each) == 1:
        return each[0]
    log_probs = jnp.stack([scores - log_z[..., None] for scores, log_z in each])
    return jax.nn.logsumexp(log_probs, axis=0), jnp.full(log_probs.shape[1:-1], jnp.log(len(each)))


def mesh_of(weights: Weights) -> Devices:
    """Returns the mesh of the parameters."""
    sharding = getattr(jax.tree.leaves(weights)[0], "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) else None


def placed(search: Search, mesh: Devices) -> Search:
    """Divides the heads of the caches among the devices of the axis "model", and copies the rest to all devices.

    As each program leaves the search where it was, none is compiled again for another place.
    """
    if mesh is None:
        return search
    places = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), search)
    split = jax.tree.map(functools.partial(split_heads, mesh), search.cache.caches)
    return jax.lax.with_sharding_constraint(search, places._replace(cache=places.cache._replace(caches=split)))


def scorer(model: Transformer, params: Params, alpha: Alpha, longest: int) -> Callable[..., Any]:
    """Returns a model as a `beam.Step` for texts of up to `longest` tokens.

    A further argument of the step, the mask of the source, is optional. The parameters are those of the model, or the
    result of `prepared`.
    """
    table = model.positions(params, "decoder", longest)

    def score(
        caches: Caches,
        tokens: jax.Array,
        position: jax.Array,
        seen: jax.Array,
        slot: jax.Array,
        source_mask_B1S: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Caches]:
        current = CurrentTokens(tokens, table[jnp.minimum(position, longest - 1)][:, None], seen, slot)
        logits, caches = incremental.step(model, params, caches, source_mask_B1S, current, alpha)
        return logits, jax.nn.logsumexp(logits, axis=-1), caches

    return score


def prepared(config: DecodeConfig, model: Transformer, params: Params, tokens: int, rows: int, unrolled: int) -> Params:
    """Prepares parameters for a search.

    The matrices become bfloat16 where `precision.narrows`, and the layers of decoders that run without a loop are
    unstacked.

    Args:
      config: options of the search.
      model: the model.
      params: its parameters.
      tokens: number of source tokens of similar sentences, or of new tokens of a language model.
      rows: number of rows of a batch.
      unrolled: decoders of up to this many layers run without a loop, however few the tokens are.
    """
    layers, narrow = model.config.decoder_layers, narrows(config, model.config, rows * config.beam_size)
    # The narrow caches of a loop save more time than its copies take.
    long = jax.default_backend() == "cpu" and tokens >= LONG * layers and not narrow
    flat = layers <= config.unroll if config.unroll else layers <= unrolled or long
    params = narrowed(params) if narrow else params
    return unstack_decoder(model, params) if flat else params


def interleave(streams: Sequence[Iterator[Sequence[T]]]) -> Iterator[T]:
    """Merges streams of chunks and yields items as soon as any stream produces them.

    Each stream runs in a thread of its own, because work dispatched by a single thread runs sequentially on the CPU.
    """
    if len(streams) == 1:
        yield from chain.from_iterable(streams[0])
        return
    with ThreadPoolExecutor(len(streams)) as threads:
        turns = {threads.submit(next, stream, None): stream for stream in streams}
        while turns:
            for turn in wait(turns, return_when=FIRST_COMPLETED).done:
                stream, items = turns.pop(turn), turn.result()
                if items is not None:
                    turns[threads.submit(next, stream, None)] = stream
                    yield from items


@dataclasses.dataclass(frozen=True)
class Engine:
    """Beam search with one model or an ensemble.

    Parameters are arguments of each call, so new parameters do not cause a recompilation. The probability of a token is
    the mean over all models.

    Attributes:
      models: one or more models.
      config: decoding options.
      rounding: maps the number of sentences to the number of rows of a batch that is not full.
      word_starts: whether each token of the target does not continue a word; only needed with phrases.
    """

    models: tuple[Transformer, ...]
    config: DecodeConfig
    rounding: Callable[[int], int] = rounded
    word_starts: tuple[bool, ...] = ()

    def search(self, weights: Weights, texts: Sequence[Query]) -> Iterator[tuple[int, Hypotheses]]:
        """Yields (index, hypotheses) of each text as soon as it is done.

        Long texts come first. The hypotheses have no batch axis. The hypotheses of a text do not depend on the other
        texts, except for rounding: rows are independent, and the length limit depends only on the source.

        Several batches ("streams") are searched concurrently, because many operations of a step are too small to
        occupy all cores of a CPU. Texts are assigned to streams in advance, not by speed, so rounding errors are
        reproducible.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].source))
        while order:
            length = padded_length(len(texts[order[-1]].source))
            same = sum(padded_length(len(texts[index].source)) == length for index in order)
            rows = self._rows(length)
            # If only a few shorter sentences remain, decode them in this shape too, instead of in one of their own.
            group = order[-max(same, rows) :] if len(order) - same > MERGE_LIMIT * rows else order[:]
            del order[-len(group) :]
            parts = [group[stream :: self._streams] for stream in range(min(self._streams, len(group)))]
            rows = min(rows, self.rounding(len(parts[0])))
            shape = padded_shape(rows, length, [texts[index] for index in group])
            ready = self._ready(weights, sum(len(texts[index].source) for index in group), rows)
            yield from interleave([self._stream(ready, texts, part, shape) for part in parts])

    def _stream(
        self, weights: Weights, texts: Sequence[Query], waiting: list[int], shape: Shape
    ) -> Iterator[list[tuple[int, Hypotheses]]]:
        """Searches texts in one batch, and yields chunks of finished ones.

        Args:
          weights: parameters of the models.
          texts: all texts.
          waiting: indices of the texts to search, taken from the end.
          shape: shape of the batch.
        """
        rows = shape.rows
        chunk = max(1, rows // REFILL)
        rings = self._rings(shape)
        ring, mesh = rings[0], mesh_of(weights)
        search = self._start(weights, shape, ring, mesh)
        active: dict[int, int] = {}
        while waiting or active:
            free = [row for row in range(rows) if row not in active]
            while waiting and free:
                count = min(chunk, len(free), len(waiting))
                assigned = {free.pop(): waiting.pop() for _ in range(count)}
                active |= assigned
                queries = [texts[index] for index in assigned.values()]
                search = self._begin(weights, search, self._new(queries, list(assigned), shape), mesh)
            # If texts are waiting, all rows are busy: run until a chunk is done. Otherwise run until all are done.
            until = chunk if waiting else rows
            search = self._run(weights, search, np.int32(until), mesh)
            done, positions, hypotheses = jax.device_get(self._look(search))
            finished = [row for row in active if done[row]]
            yield [(active.pop(row), jax.tree.map(lambda leaf, row=row: leaf[row], hypotheses)) for row in finished]
            needed = max((int(positions[row]) for row in active), default=0)
            wanted = next(size for size in rings if size > needed)
            if wanted > ring or wanted * 2 < ring:
                ring = wanted
                search = self._resized(search, ring, mesh)

    def shapes(self, longest: int, prefix: int, phrases: tuple[int, int] = (0, 0)) -> list[Shape]:
        """Returns the shapes of batches of sources of up to `longest` tokens.

        They cover any number of sources, with prefixes of `prefix` tokens and these `Shape.phrases`.
        """
        prefix = padded_length(prefix) if prefix else 0
        found = []
        for length in padded_lengths(longest):
            full = self._rows(length)
            rows = {min(full, self.rounding(count)) for count in range(1, full + 1)}
            found += [Shape(each, length, prefix, phrases) for each in sorted(rows)]
        return found

    def compile(self, weights: Weights, shape: Shape) -> None:
        """Compiles the programs for batches of this shape."""
        rings, ready = self._rings(shape), self._ready(weights, 0, shape.rows)
        mesh = mesh_of(ready)
        for index, ring in enumerate(rings):
            # All rows are empty and hence done, so this only compiles.
            search = self._start(ready, shape, ring, mesh)
            for encoded in encoded_lengths(shape.length):
                none = self._new([Query([PAD] * encoded, 0)], [shape.rows], shape)
                search = self._begin(ready, search, none, mesh)
            search = self._run(ready, search, np.int32(shape.rows), mesh)
            self._look(search)
            # The same transitions as in `_stream`: to the next size, or to any of less than half the size.
            for other in [*rings[index + 1 : index + 2], *(size for size in rings if size * 2 < ring)]:
                self._resized(search, other, mesh)

    def _new(self, queries: Sequence[Query], row_numbers: Sequence[int], shape: Shape) -> New:
        """Converts queries to arrays for the given rows of a batch."""
        chunk = max(1, shape.rows // REFILL)
        longest = max(len(text.source) for text in queries)
        encoded = next(each for each in encoded_lengths(shape.length) if each >= longest)
        phrases = [pad(text.phrases, *shape.phrases, NONE) for text in queries]
        return New(
            pad([text.source for text in queries], chunk, encoded),
            np.array([*row_numbers, *[shape.rows] * (chunk - len(row_numbers))], np.int32),
            Given(
                limit=column([self.limit(len(text.source), text.given) for text in queries], chunk),
                number=column([text.number for text in queries], chunk),
                prefix=pad([text.prefix for text in queries], chunk, shape.prefix, -1),
                nbest=column([text.nbest for text in queries], chunk),
                tags=column([text.tags for text in queries], chunk),
                phrases=np.stack([*phrases, *[pad([], *shape.phrases, NONE)] * (chunk - len(phrases))]),
            ),
        )

    @property
    def _streams(self) -> int:
        """Maximum number of batches that are searched concurrently."""
        alone = jax.default_backend() == "cpu" and jax.device_count() == 1
        return self.config.streams or (2 if alone else 1)

    def _rows(self, length: int) -> int:
        """Returns the number of rows of a full batch of sentences of this padded length."""
        return max(1, self.config.batch_tokens // (length * self.config.beam_size))

    def limit(self, length: int, given: int = 0) -> int:
        """Returns the maximum length of a translation in tokens, EOS excluded.

        `length` is the length of the source; the translation contains `given` tokens in any case.
        """
        limit = int(self.config.max_length_a * length + self.config.max_length_b) + given
        return min(limit, self.longest - 1) if self.longest else limit

    @property
    def longest(self) -> int | None:
        """Length of the longest sentence that all models can read; None if there is no limit."""
        return min((model.config.longest for model in self.models if model.config.longest), default=None)

    def _longest(self, shape: Shape) -> int:
        """Returns the maximum number of tokens of a hypothesis, EOS included."""
        return self.limit(shape.length) + 1 + shape.prefix + math.prod(shape.phrases)

    def _rings(self, shape: Shape) -> list[int]:
        """Returns the ascending ring sizes of a batch."""
        longest = self._longest(shape)
        sizes = [min(max(32, shape.length), longest)]
        while sizes[-1] < longest:
            sizes.append(min(2 * sizes[-1], longest))
        return sizes

    def _ready(self, weights: Weights, tokens: int, rows: int) -> Weights:
        """Returns the parameters of all models as `prepared`."""
        each = zip(self.models, weights, strict=True)
        prepare = functools.partial(prepared, self.config, tokens=tokens, rows=rows, unrolled=UNROLLED)
        return tuple((prepare(model, params), alpha) for model, (params, alpha) in each)

    @functools.cached_property
    def _start(self) -> Callable[[Weights, Shape, int, Devices], Search]:
        """Returns a search whose rows are all empty."""

        @functools.partial(jax.jit, static_argnums=(1, 2, 3))
        def start(weights: Weights, shape: Shape, ring: int, mesh: Devices) -> Search:
            (rows, length, prefix, phrases), k = shape, self.config.beam_size
            caches = tuple(
                empty_caches(model, params, rows, length, ring * k)
                for model, (params, _) in zip(self.models, weights, strict=True)
            )
            text = EncodedSources(caches, jnp.zeros((rows, 1, length), bool))
            starts = self.word_starts if phrases[0] else ()
            return placed(beam.empty_search(text, rows, k, self._longest(shape), ring, prefix, phrases, starts), mesh)

        return start

    @functools.cached_property
    def _begin(self) -> Callable[[Weights, Search, New, Devices], Search]:
        @functools.partial(jax.jit, donate_argnums=1, static_argnums=3)
        def begin(weights: Weights, search: Search, new: New, mesh: Devices) -> Search:
            caches, mask = search.cache
            more = mask.shape[-1] - new.source.shape[1]

            def filled(model: Transformer, params: Params, alpha: Alpha, caches: Caches) -> Caches:
                memory = jnp.pad(model.encode(params, new.source, alpha), ((0, 0), (0, more), (0, 0)))
                return write_sources(caches, start_cache(model, params, memory, 0), new.row)

            members = zip(self.models, weights, caches, strict=True)
            new_mask = jnp.pad(source_mask(new.source), ((0, 0), (0, 0), (0, more)))
            text = EncodedSources(
                tuple(filled(model, *weight, cache) for model, weight, cache in members),
                mask.at[new.row].set(new_mask, mode="drop"),
            )
            return placed(beam.begin(search._replace(cache=text), new.row, new.given, self.config), mesh)

        return begin

    @functools.cached_property
    def _run(self) -> Callable[[Weights, Search, np.int32, Devices], Search]:
        @functools.partial(jax.jit, donate_argnums=1, static_argnums=3)
        def run(weights: Weights, search: Search, until: jax.Array, mesh: Devices) -> Search:
            longest = search.live.tokens.shape[2]
            scorers = [scorer(model, *weight, longest) for model, weight in zip(self.models, weights, strict=True)]

            def step(text: EncodedSources, *now: jax.Array) -> tuple[jax.Array, jax.Array, EncodedSources]:
                members = zip(scorers, text.caches, strict=True)
                votes = [score(cache, *now, text.mask_B1S) for score, cache in members]
                caches = tuple(cache for *_, cache in votes)
                return *vote([vote[:2] for vote in votes]), text._replace(caches=caches)

            return placed(beam.run(step, search, self.config, until), mesh)

        return run

    @functools.cached_property
    def _resized(self) -> Callable[[Search, int, Devices], Search]:
        def taken(text: EncodedSources, slots: jax.Array) -> EncodedSources:
            return text._replace(caches=tuple(take_slots(caches, slots) for caches in text.caches))

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def resized(search: Search, ring: int, mesh: Devices) -> Search:
            return placed(beam.resized(search, ring, taken), mesh)

        return resized

    @functools.cached_property
    def _look(self) -> Callable[[Search], tuple[jax.Array, jax.Array, Hypotheses]]:
        return jax.jit(lambda search: (beam.done(search, self.config), search.position, beam.ranked(search)))

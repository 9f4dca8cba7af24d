"""Phrases that translations must contain, against exhaustive search and plain Python."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchnorm_jax.decoding import beam, constraints
from branchnorm_jax.decoding.beam import Given
from branchnorm_jax.tokens import EOS, PAD
from tests.cases import quick_and_slow
from tests.decoding.toy import VOCABULARY, Toy, decode_config, log_softmax, next_state, table, toy_step

Phrases = Sequence[Sequence[int]]

WORDS = [token for token in range(VOCABULARY) if token not in (PAD, EOS)]


@functools.cache
def searcher(beam_size: int, limit: int, word_starts: tuple[bool, ...], prefix: tuple[int, ...]) -> Any:
    """Returns a search of two sentences, each with at most two phrases of at most three tokens."""
    config = decode_config(beam_size, min_length=0, length_penalty=0.0)
    longest = limit + 1

    @jax.jit
    def decode(logits: jax.Array, phrases: jax.Array) -> Any:
        cache = Toy(jnp.arange(2), jnp.zeros((2, longest * beam_size), jnp.int32))
        empty = beam.empty_search(cache, 2, beam_size, longest, longest, len(prefix), (2, 3), word_starts)
        given = Given(jnp.full(2, limit), prefix=jnp.array([prefix] * 2, jnp.int32), phrases=phrases)
        started = beam.begin(empty, jnp.arange(2), given, config)
        return beam.ranked(beam.run(toy_step(logits), started, config, jnp.int32(2)))

    return decode


def search(
    seed: int,
    phrases: Sequence[Phrases],
    beam_size: int,
    limit: int,
    joins: Sequence[int] = (),
    prefix: tuple[int, ...] = (),
) -> list[list[tuple[list[int], float]]]:
    """Returns (tokens without EOS, log-probability) of the hypotheses of both sentences; `joins` continue words."""
    padded = np.full((2, 2, 3), constraints.NONE)
    for row, each in enumerate(phrases):
        for index, phrase in enumerate(each):
            padded[row, index, : len(phrase)] = phrase
    starts = tuple(token not in joins for token in range(VOCABULARY))
    found = jax.device_get(searcher(beam_size, limit, starts, prefix)(table(seed), jnp.array(padded, jnp.int32)))
    return [
        [
            (row[: row.index(EOS)], float(total))
            for row, total in zip(found.tokens[sentence].tolist(), found.log_probs[sentence], strict=True)
            if total > -np.inf
        ]
        for sentence in range(2)
    ]


def contains(tokens: Sequence[int], phrase: Sequence[int], joins: Sequence[int] = ()) -> bool:
    """Returns whether the phrase occurs, first without a longer last word."""
    for start in range(len(tokens) - len(phrase) + 1):
        end = start + len(phrase)
        if list(tokens[start:end]) == list(phrase):
            return end == len(tokens) or tokens[end] not in joins
    return False


def log_prob(seed: int, sentence: int, tokens: Sequence[int]) -> float:
    state, total = next_state(sentence, EOS), 0.0
    for token in (*tokens, EOS):
        total += log_softmax(table(seed)[state])[token]
        state = next_state(state, token)
    return total


@pytest.mark.parametrize("joins", [(), (4, 5)], ids=str)
@pytest.mark.parametrize(
    "phrases", quick_and_slow([[[3, 4]], [[3], [5, 2]], [[2, 2, 3]], [[4], [4, 5]]], [[[3, 4]], [[4], [4, 5]]]), ids=str
)
def test_wide_beam_finds_the_best_hypothesis_that_contains_all_phrases(phrases: Phrases, joins: Sequence[int]) -> None:
    limit, changed = 4, 0
    everything = [tokens for n in range(limit + 1) for tokens in itertools.product(WORDS, repeat=n)]
    for seed in (5, 6, 9, 11):
        free, constrained = search(seed, [[], phrases], 100, limit, joins)
        scored = {tokens: log_prob(seed, 1, tokens) for tokens in everything}
        allowed = [tokens for tokens in everything if all(contains(tokens, phrase, joins) for phrase in phrases)]
        expected = max(allowed, key=scored.__getitem__)
        assert constrained[0][0] == list(expected)
        np.testing.assert_allclose(constrained[0][1], scored[expected], atol=1e-4)
        changed += expected != max(everything, key=scored.__getitem__)
        # The other sentence has no phrases, so nothing is asked of it.
        unconstrained = max(everything, key=lambda tokens: log_prob(seed, 0, tokens))
        assert unconstrained and free[0][0] == list(unconstrained)
    assert changed


def test_a_phrase_that_a_prefix_lengthens_is_still_missing() -> None:
    """The prefix is the phrase and a token that continues its last word."""
    limit, prefix, phrase, joins = 5, (4, 5), [4], (5,)
    everything = [prefix + more for n in range(limit - 1) for more in itertools.product(WORDS, repeat=n)]
    for seed in (5, 6, 9):
        (tokens, total), *_ = search(seed, [[], [phrase]], 100, limit, joins, prefix)[1]
        allowed = [each for each in everything if contains(each[len(prefix) :], phrase, joins)]
        expected = max(allowed, key=lambda each: log_prob(seed, 1, each))
        assert tokens == list(expected)
        np.testing.assert_allclose(total, log_prob(seed, 1, expected), atol=1e-4)


@settings(max_examples=30)
@given(
    st.integers(0, 10_000),
    st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3), min_size=1, max_size=2),
    st.sampled_from([(), (3,)]),
)
@example(5, [[2, 3, 4], [2, 4, 5]], ())
def test_narrow_beam_satisfies_all_phrases(seed: int, phrases: Phrases, joins: Sequence[int]) -> None:
    """With more hypotheses than phrase tokens, and enough room before the length limit."""
    limit = 20
    for sentence, each in enumerate(search(seed, [phrases, phrases], 8, limit, joins)):
        tokens, total = each[0]
        assert all(contains(tokens, phrase, joins) for phrase in phrases)
        np.testing.assert_allclose(total, log_prob(seed, sentence, tokens), atol=1e-3)


@settings(max_examples=50)
@given(
    st.lists(st.sampled_from([2, 3]), max_size=8),
    st.lists(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_progress_equals_plain_python(tokens: list[int], phrases: Phrases) -> None:
    """Phrases overlap with themselves and each other, since there are only two words."""
    padded = np.full((1, 2, 3), constraints.NONE)
    for index, phrase in enumerate(phrases):
        padded[0, index, : len(phrase)] = phrase
    complete, array = np.zeros((1, 1, 2), bool), np.full((1, 1, 8), 2)
    array[0, 0, : len(tokens)] = tokens
    for length in range(len(tokens) + 1):
        state = constraints.progress(jnp.array(array), jnp.array([length]), jnp.array(complete), jnp.array(padded))
        complete, before = np.asarray(state.complete), tokens[:length]
        following = constraints.next_tokens(state, jnp.array(padded))[0, 0].tolist()
        bank = constraints.banks(state, jnp.array(padded), jnp.array([[[2, 3]]]))[0, 0].tolist()
        inside, begun = 0, {2: [0], 3: [0]}
        for index, phrase in enumerate(phrases):
            assert complete[0, 0, index] == contains(before, phrase)
            ends = [j for j in range(len(phrase) + 1) if j <= length and before[length - j :] == list(phrase[:j])]
            assert following[index] == (constraints.NONE if contains(before, phrase) else phrase[max(ends)])
            inside += len(phrase) if contains(before, phrase) else 0
            for word in (2, 3) if not contains(before, phrase) else ():
                begun[word] += [j + 1 for j in ends if j < len(phrase) and phrase[j] == word]
        assert bank == [inside + max(begun[word]) for word in (2, 3)]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 0)), min_size=6, max_size=12), st.integers(1, 6))
def test_banks_share_the_beam_in_rounds(candidates: list[tuple[int, int]], count: int) -> None:
    banks, totals = zip(*candidates, strict=True)
    totals = tuple(-np.inf if total == -9 else float(total) for total in totals)
    index = constraints.allocated(jnp.array([totals]), jnp.array([banks]), count)[0].tolist()
    queues = {
        bank: sorted((i for i, each in enumerate(banks) if each == bank), key=lambda i: -totals[i])
        for bank in sorted(set(banks), reverse=True)
    }
    rounds = [i for turn in itertools.zip_longest(*queues.values()) for i in turn if i is not None]
    possible = [i for i in rounds if totals[i] > -np.inf]
    assert index[: len(possible)] == possible[:count]

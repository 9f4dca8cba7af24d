"""Beam search against a plain-Python reference with explicit lists, and against exhaustive search."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.decoding import beam
from branchnorm_jax.decoding.beam import Given, length_penalty, top
from branchnorm_jax.options import DecodeConfig
from branchnorm_jax.tokens import EOS, PAD
from tests.cases import quick_and_slow
from tests.decoding.toy import VOCABULARY, Toy, decode_config, log_softmax, next_state, table, toy_step


def search(seed: int, limits: list[int], beam_size: int, **options: Any) -> Any:
    return jax.device_get(
        searcher(decode_config(beam_size, **options), len(limits), max(limits) + 1)(
            table(seed), np.array(limits, np.int32)
        )
    )


@functools.cache
def searcher(config: DecodeConfig, rows: int, longest: int) -> Any:
    """Returns a search that is compiled once for all tables and limits."""
    k = config.beam_size

    @jax.jit
    def decode(logits: jax.Array, limits: jax.Array) -> Any:
        cache = Toy(jnp.arange(rows), jnp.zeros((rows, longest * k), jnp.int32))
        started = beam.begin(
            beam.empty_search(cache, rows, k, longest, longest), jnp.arange(rows), Given(limits), config
        )
        return beam.ranked(beam.run(toy_step(logits), started, config, jnp.int32(rows)))

    return decode


def reference_beam(
    log_probs: Callable[[list[int]], np.ndarray], limit: int, beam: int, min_length: int, penalty: float, kind: str
) -> list[tuple[list[int], float]]:
    """Beam search with fairseq's rules on Python lists; returns (tokens with EOS, score), best first.

    `log_probs` returns the log-probabilities of the next token after a prefix.
    """
    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for position in itertools.count():
        candidates = []
        for rank, (tokens, total) in enumerate(live):
            for token, log_p in enumerate(log_probs(tokens)):
                at_limit = position >= limit
                if token == PAD or (token == EOS and position < min_length and not at_limit):
                    continue
                if at_limit and token != EOS:
                    continue
                candidates.append((total + log_p, -rank, -token, tokens))
        candidates.sort(key=lambda c: c[:3], reverse=True)
        candidates = candidates[: 2 * beam]
        divisor = (position + 1) ** penalty if kind == "fairseq" else ((5 + position + 1) / 6) ** penalty
        for total, _, token, tokens in candidates[:beam]:
            if -token == EOS and len(finished) < beam:
                finished.append(([*tokens, EOS], total / divisor))
        live = [([*tokens, -token], total) for total, _, token, tokens in candidates if -token != EOS][:beam]
        if len(finished) == beam or position >= limit:
            break
    return sorted(finished, key=lambda hypothesis: -hypothesis[1])


@settings(max_examples=12)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([(0.0, "fairseq"), (0.6, "fairseq"), (1.0, "fairseq"), (0.6, "gnmt")]),
)
def test_search_equals_the_reference(seed: int, beam_size: int, min_length: int, penalty: tuple[float, str]) -> None:
    limits = [5, 8, 2]
    options: dict[str, Any] = dict(length_penalty=penalty[0], length_penalty_kind=penalty[1])
    result = search(seed, limits, beam_size, min_length=min_length, **options)
    for sentence, limit in enumerate(limits):

        def log_probs(prefix: list[int], sentence: int = sentence) -> np.ndarray:
            state = sentence
            for token in (EOS, *prefix):
                state = next_state(state, token)
            return log_softmax(table(seed)[state])

        expected = reference_beam(log_probs, limit, beam_size, min_length, *penalty)
        for rank, (tokens, score) in enumerate(expected):
            row = result.tokens[sentence, rank]
            assert row[: len(tokens)].tolist() == tokens
            assert not row[len(tokens) :].any()
            np.testing.assert_allclose(result.scores[sentence, rank], score, atol=1e-4)
            each = result.token_log_probs[sentence, rank]
            forced = [log_probs(tokens[:place])[token] for place, token in enumerate(tokens)]
            np.testing.assert_allclose(each[: len(tokens)], forced, atol=1e-4)
            assert not each[len(tokens) :].any()
            np.testing.assert_allclose(result.log_probs[sentence, rank], sum(forced), atol=1e-4)


@pytest.mark.parametrize(
    "penalty",
    quick_and_slow(
        [(-0.5, "fairseq"), (0.0, "fairseq"), (0.6, "fairseq"), (0.6, "gnmt")], [(-0.5, "fairseq"), (0.6, "gnmt")]
    ),
    ids=str,
)
def test_early_stopping_returns_the_same_n_best(penalty: tuple[float, str]) -> None:
    """Some hypotheses beyond the n best are missing, which shows that the search does stop early."""
    options: dict[str, Any] = dict(length_penalty=penalty[0], length_penalty_kind=penalty[1])
    fewer = 0
    for seed in range(20):
        every, best = search(seed, [12] * 6, 4, **options), search(seed, [12] * 6, 4, nbest=2, **options)
        np.testing.assert_array_equal(best.tokens[:, :2], every.tokens[:, :2])
        np.testing.assert_array_equal(best.scores[:, :2], every.scores[:, :2])
        fewer += int((best.scores == -np.inf).sum())
    assert fewer > 0


def test_nbest_can_differ_per_sentence() -> None:
    """The n best of a sentence do not depend on other sentences, and the search stops when they are known."""
    config, mixed = decode_config(4, length_penalty=0.0), [1, 2, 3, 4, 1, 4]

    @jax.jit
    def decode(logits: jax.Array, nbest: jax.Array) -> Any:
        cache = Toy(jnp.arange(6), jnp.zeros((6, 13 * 4), jnp.int32))
        state = beam.empty_search(cache, 6, 4, 13, 13)
        state = beam.begin(state, jnp.arange(6), Given(jnp.full(6, 12), nbest=nbest), config)
        state = beam.run(toy_step(logits), state, config, jnp.int32(6))
        return beam.ranked(state), state.clock

    sooner = 0
    for seed in range(10):
        together, _ = jax.device_get(decode(table(seed), jnp.array(mixed)))
        for row, count in enumerate(mixed):
            alone = search(seed, [12] * 6, 4, length_penalty=0.0, nbest=count)
            np.testing.assert_array_equal(together.tokens[row, :count], alone.tokens[row, :count])
            np.testing.assert_array_equal(together.scores[row, :count], alone.scores[row, :count])
        sooner += int(decode(table(seed), jnp.full(6, 1))[1]) < int(decode(table(seed), jnp.full(6, 4))[1])
    assert sooner > 0


@pytest.mark.slow
@settings(max_examples=4)
@given(st.integers(0, 1000), st.lists(st.integers(0, 9), min_size=3, max_size=6), st.sampled_from([1, 3]))
def test_rows_can_start_the_next_sentence_at_any_time(seed: int, limits: list[int], beam_size: int) -> None:
    """Two rows decode all sentences, with a ring that grows and shrinks; results equal those of separate searches."""
    config, longest = decode_config(beam_size), 10
    run = runner(config)
    cache = Toy(jnp.zeros(2, jnp.int32), jnp.zeros((2, 2 * beam_size), jnp.int32))
    state, waiting = beam.empty_search(cache, 2, beam_size, longest, 2), list(range(len(limits)))
    inside: dict[int, int] = {}
    while waiting or inside:
        for row in {0, 1} - set(inside):
            if waiting:
                inside[row] = waiting.pop()
                named = state.cache._replace(sentence=state.cache.sentence.at[row].set(inside[row]))
                state = beam.begin(
                    state._replace(cache=named), jnp.array([row]), Given(jnp.array([limits[inside[row]]])), config
                )
        state = run(table(seed), state, 1 + 2 - len(inside))
        done, ranked = np.asarray(beam.done(state, config)), jax.device_get(beam.ranked(state))
        for row in [row for row in inside if done[row]]:
            index = inside.pop(row)
            alone = search_one(seed, index, limits[index], beam_size)
            np.testing.assert_array_equal(ranked.tokens[row], alone.tokens[0])
            np.testing.assert_allclose(ranked.scores[row], alone.scores[0], rtol=1e-6)
        needed = max((int(state.position[row]) for row in inside), default=0)
        state = beam.resized(
            state,
            needed + 1 + seed % 3,
            lambda cache, slots: cache._replace(tokens=cache.tokens[:, slots]),
        )


@functools.cache
def runner(config: DecodeConfig) -> Any:
    return jax.jit(lambda logits, state, until: beam.run(toy_step(logits), state, config, until))


def search_one(seed: int, sentence: int, limit: int, beam_size: int) -> Any:
    """Searches one sentence alone."""
    result = searcher(decode_config(beam_size), 6, 10)(table(seed), np.array([limit] * 6, np.int32))
    return jax.tree.map(lambda leaf: leaf[sentence : sentence + 1], jax.device_get(result))


@settings(max_examples=30)
@given(st.integers(0, 1000), st.sampled_from([5, 63, 64, 65, 1000]), st.sampled_from([1, 4, 8]))
def test_top_equals_top_k_of_jax(seed: int, size: int, count: int) -> None:
    """The scores have few distinct values, so there are many ties."""
    scores = np.random.default_rng(seed).integers(0, 40, (2, 3, size)).astype(np.float32)
    scores[0, 0, size // 2 :] = -np.inf
    values, index = top(jnp.asarray(scores), min(count, size))
    expected, where = jax.lax.top_k(jnp.asarray(scores), min(count, size))
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(index[expected > -np.inf], where[expected > -np.inf])


def test_beam_as_wide_as_the_search_space_is_exhaustive() -> None:
    """Compared with an exhaustive search over all hypotheses of at most 2 tokens and EOS."""
    limit, words = 2, [token for token in range(VOCABULARY) if token not in (PAD, EOS)]
    for seed in range(5):
        everything = []
        for length in range(limit + 1):
            for tokens in itertools.product(words, repeat=length):
                state, total = next_state(0, EOS), 0.0
                for token in (*tokens, EOS):
                    total += log_softmax(table(seed)[state])[token]
                    state = next_state(state, token)
                everything.append((total, [*tokens, EOS]))
        everything.sort(reverse=True)
        # 21 hypotheses exist; with a penalty of 0 the score is the log-probability.
        result = search(seed, [limit], 21, min_length=0, length_penalty=0.0)
        np.testing.assert_allclose(result.scores[0], [total for total, _ in everything], atol=1e-4)
        assert result.tokens[0, 0][: len(everything[0][1])].tolist() == everything[0][1]


def test_beam_size_1_is_greedy() -> None:
    for seed in range(10):
        state, expected = next_state(0, EOS), []
        for position in range(9):
            log_p = log_softmax(table(seed)[state])
            log_p[PAD] = -np.inf
            if position == 0:
                log_p[EOS] = -np.inf
            token = EOS if position == 8 else int(log_p.argmax())
            expected.append(token)
            if token == EOS:
                break
            state = next_state(state, token)
        result = search(seed, [8], 1)
        assert result.tokens[0, 0][: len(expected)].tolist() == expected


def test_rows_of_padding_finish_immediately() -> None:
    result = search(3, [6, 0], 2)
    alone = search(3, [6], 2)
    np.testing.assert_array_equal(result.tokens[0], alone.tokens[0])
    assert result.tokens[1, 0, 0] == EOS


@pytest.mark.parametrize(("kind", "expected"), [("fairseq", 25**0.6), ("gnmt", (30 / 6) ** 0.6)])
def test_length_penalties_equal_their_formulas(kind: str, expected: float) -> None:
    np.testing.assert_allclose(float(length_penalty(jnp.int32(25), 0.6, kind)), expected, rtol=1e-6)


def sampled(rows: int, beam_size: int, **options: Any) -> Any:
    """Samples hypotheses of at most one token; rows have the same logits and different numbers."""
    config = decode_config(beam_size, **({"temperature": 1.0, "min_length": 0} | options))

    @jax.jit
    def sample() -> Any:
        cache = Toy(jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 2 * beam_size), jnp.int32))
        numbers = jnp.arange(rows)
        empty = beam.empty_search(cache, rows, beam_size, 2, 2)
        started = beam.begin(empty, numbers, Given(jnp.ones(rows, jnp.int32), numbers), config)
        return beam.run(toy_step(jnp.asarray(table(3))), started, config, jnp.int32(rows)).finished

    return jax.device_get(sample())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, 6),
        ({"temperature": 2.0}, 6),
        ({"top_k": 2}, 2),
        ({"top_p": 0.5}, 0),
        ({"temperature": 0.5, "top_p": 0.9}, 0),
    ],
    ids=str,
)
def test_tokens_are_sampled_at_their_probabilities(options: dict[str, Any], words: int) -> None:
    """Frequencies match softmax(logits / temperature) over the allowed tokens, within 5 standard deviations."""
    log_p = log_softmax(table(3)[next_state(0, EOS)])
    scores = log_p / options.get("temperature", 1.0)
    scores[PAD] = -np.inf
    p = np.exp(log_softmax(scores))
    order = np.argsort(-p)
    allowed = order[: words or np.searchsorted(np.cumsum(p[order]), options["top_p"]) + 1]
    expected = np.where(np.isin(np.arange(VOCABULARY), allowed), p, 0)
    expected /= expected.sum()
    result = sampled(1000, 4, **options)
    first = result.tokens[:, :, 0]
    share = np.bincount(first.ravel(), minlength=VOCABULARY) / first.size
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / first.size)).all()
    # The reported log-probabilities are the model's own, without temperature and truncation.
    np.testing.assert_allclose(result.token_log_probs[:, :, 0], log_p[first], atol=1e-4)


def test_samples_depend_only_on_seed_and_sentence_number() -> None:
    many, few = sampled(50, 4), sampled(10, 4)
    np.testing.assert_array_equal(many.tokens[:10], few.tokens)
    assert (sampled(50, 4, seed=1).tokens != many.tokens).any()
    assert len({row.tobytes() for row in many.tokens}) > 5


@pytest.mark.parametrize("prompt", [False, True])
def test_every_hypothesis_begins_with_the_prefix(prompt: bool) -> None:
    """With a beam as wide as the search space, the result is the best hypothesis with this prefix.

    The cache holds a prompt, which has probability 1, and which no length counts. What is cut off at the limit has no
    end, so the end has probability 1.
    """
    limit, prefix = 3, [4, 2]
    for seed in range(5):
        config = decode_config(21, min_length=0, length_penalty=1.0)
        cache = Toy(jnp.zeros(1, jnp.int32), jnp.zeros((1, 84), jnp.int32))
        empty = beam.empty_search(cache, 1, 21, 4, 4, prefix=0 if prompt else 4)
        given = Given(jnp.array([limit]), jnp.array([0]), jnp.array([[*prefix, -1, -1]]))
        if prompt:
            kept = cache.tokens.at[0, -42::21].set(jnp.array([EOS, prefix[0]]))
            empty = empty._replace(cache=cache._replace(tokens=kept))
            given = Given(jnp.array([limit]), prompt=jnp.array([[*prefix, -1]]), may_be_cut=True)
        started = beam.begin(empty, jnp.array([0]), given, config)
        result = jax.device_get(beam.ranked(runner(config)(table(seed), started, 1)))
        state, total = next_state(0, EOS), 0.0
        for token in prefix:
            total += 0 if prompt else log_softmax(table(seed)[state])[token]
            state = next_state(state, token)
        log_p = log_softmax(table(seed)[state])
        words = [token for token in range(VOCABULARY) if token not in (PAD, EOS)]
        cut = {token: 0 if prompt else log_softmax(table(seed)[next_state(state, token)])[EOS] for token in words}
        own = 0 if prompt else 2
        everything = [((total + log_p[EOS]) / (own + 1), [*prefix, EOS])]
        # What is cut off has two tokens of its own with the EOS, but only one counts.
        length = own + (1 if prompt else 2)
        everything += [((total + log_p[token] + cut[token]) / length, [*prefix, token, EOS]) for token in words]
        everything.sort(reverse=True)
        for rank, (expected, tokens) in enumerate(everything):
            assert result.tokens[0, rank, : len(tokens)].tolist() == tokens
            np.testing.assert_allclose(result.scores[0, rank], expected, atol=1e-4)


@pytest.mark.parametrize("n", [1, 2])
def test_no_ngram_is_repeated(n: int) -> None:
    changed = 0
    for seed in range(10):
        free, ban = (
            search(seed, [9] * 4, 3, length_penalty=2.0),
            search(seed, [9] * 4, 3, length_penalty=2.0, no_repeat_ngram=n),
        )
        for sentence in range(4):
            words = [token for token in ban.tokens[sentence, 0].tolist() if token != PAD]
            grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            assert len(set(grams)) == len(grams)
            other = [token for token in free.tokens[sentence, 0].tolist() if token != PAD]
            changed += other != words
    assert changed

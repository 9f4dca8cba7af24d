"""Beam search against a plain-Python reference with explicit lists, and against exhaustive search."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.decoding.beam import beam_search, length_penalty
from branchnorm_jax.options import EOS, PAD

VOCABULARY = 6


class Toy(NamedTuple):
    """A language model whose next-token logits depend on a hash of the whole prefix, kept in the cache."""

    state: jax.Array


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (97, VOCABULARY)).astype(np.float32)


def next_state(state: Any, token: Any) -> Any:
    return (state * 31 + token + 7) % 97


def search(seed: int, limits: list[int], beam: int, **options: Any) -> Any:
    logits = jnp.asarray(table(seed))

    def step(cache: Toy, tokens: jax.Array, position: jax.Array) -> tuple[jax.Array, Toy]:
        state = next_state(cache.state, tokens)
        return logits[state], Toy(state)

    start = Toy(jnp.repeat(jnp.arange(len(limits)), beam))
    capacity = max(limits) + 1
    return jax.device_get(
        beam_search(
            step,
            lambda cache, rows: Toy(cache.state[rows]),
            start,
            jnp.array(limits, jnp.int32),
            beam_size=beam,
            capacity=capacity,
            **options,
        )
    )


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def reference_beam(
    log_probs: Callable[[list[int]], np.ndarray], limit: int, beam: int, min_length: int, penalty: float, kind: str
) -> list[tuple[list[int], float]]:
    """fairseq's rules on Python lists: (tokens with EOS, score), best first. `log_probs` gives those after a prefix."""
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
    return sorted(finished, key=lambda found: -found[1])


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([(0.0, "fairseq"), (0.6, "fairseq"), (1.0, "fairseq"), (0.6, "gnmt")]),
)
def test_equals_the_reference(seed: int, beam: int, min_length: int, penalty: tuple[float, str]) -> None:
    limits = [5, 8, 2]
    found = search(seed, limits, beam, min_length=min_length, penalty=penalty[0], penalty_kind=penalty[1])
    for sentence, limit in enumerate(limits):

        def log_probs(prefix: list[int], sentence: int = sentence) -> np.ndarray:
            state = sentence
            for token in (EOS, *prefix):
                state = next_state(state, token)
            return log_softmax(table(seed)[state])

        expected = reference_beam(log_probs, limit, beam, min_length, *penalty)
        for rank, (tokens, score) in enumerate(expected):
            row = found.tokens[sentence, rank]
            assert row[: len(tokens)].tolist() == tokens
            assert not row[len(tokens) :].any()
            np.testing.assert_allclose(found.scores[sentence, rank], score, atol=1e-4)


def test_a_beam_as_wide_as_the_space_finds_the_best_of_all() -> None:
    """Exhaustive search over every hypothesis of at most 2 tokens and EOS."""
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
        found = search(seed, [limit], 21, min_length=0, penalty=0.0)
        np.testing.assert_allclose(found.scores[0], [total for total, _ in everything], atol=1e-4)
        assert found.tokens[0, 0][: len(everything[0][1])].tolist() == everything[0][1]


def test_beam_one_is_greedy() -> None:
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
        found = search(seed, [8], 1)
        assert found.tokens[0, 0][: len(expected)].tolist() == expected


def test_rows_of_padding_end_at_once() -> None:
    found = search(3, [6, 0], 2)
    alone = search(3, [6], 2)
    np.testing.assert_array_equal(found.tokens[0], alone.tokens[0])
    assert found.tokens[1, 0, 0] == EOS


@pytest.mark.parametrize(("kind", "expected"), [("fairseq", 25**0.6), ("gnmt", (30 / 6) ** 0.6)])
def test_length_penalties(kind: str, expected: float) -> None:
    np.testing.assert_allclose(float(length_penalty(jnp.int32(25), 0.6, kind)), expected, rtol=1e-6)

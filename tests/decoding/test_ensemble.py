"""Ensembles average the probabilities of their models."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.decoding.engine import Query, vote
from branchnorm_jax.decoding.translate import Member, Translator
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig, ModelConfig
from tests.decoding.test_beam import log_softmax

SMALL = ModelConfig(width=16, heads=2, ffn_width=16, encoder_layers=1, decoder_layers=1, dropout=0.0)
SOURCES, TARGETS = [[4, 5, 1], [7, 1]], [[3, 9, 8, 1], [5, 1]]
QUERIES = [Query(source, number, nbest=3) for number, source in enumerate(SOURCES)]


def member(seed: int, **changes: Any) -> Member:
    model = Transformer(dataclasses.replace(SMALL, **changes), 12, 12)
    params = jax.tree.map(lambda leaf: 2.0 * leaf, jax.jit(model.init)(jax.random.key(seed)))
    return Member(model, params, jnp.float32(0.5 + 0.1 * seed))


def translator(first: Member, *others: Member) -> Translator:
    decode = DecodeConfig(beam_size=3, nbest=3, max_length_a=1.0, max_length_b=3)
    return Translator(first.model, None, decode, others=others)  # type: ignore[arg-type] # only text needs a tokenizer


@pytest.mark.slow
def test_log_probabilities_are_of_the_mean_probability() -> None:
    """The models may have different widths and depths."""
    members = member(1), member(2, width=32, decoder_layers=2), member(3)
    first = members[0]
    each = [translator(m).token_log_probs(m.params, m.alpha, SOURCES, TARGETS) for m in members]
    result = translator(*members).token_log_probs(first.params, first.alpha, SOURCES, TARGETS)
    for index, ours in enumerate(result):
        expected = np.log(np.mean([np.exp(one[index]) for one in each], axis=0))
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_attention_is_the_mean_of_the_models() -> None:
    members = member(1), member(2, width=32, decoder_layers=2)
    first = members[0]
    each = [translator(m).attention(m.params, m.alpha, SOURCES, TARGETS) for m in members]
    result = translator(*members).attention(first.params, first.alpha, SOURCES, TARGETS)
    for index, ours in enumerate(result):
        np.testing.assert_allclose(ours, np.mean([one[index] for one in each], axis=0), atol=1e-6)


def test_search_returns_the_probabilities_of_the_ensemble() -> None:
    members = member(1), member(2)
    both, first = translator(*members), members[0]
    weights = tuple((m.params, m.alpha) for m in members)
    for index, result in both.engine.search(weights, QUERIES):
        for tokens, each in zip(result.tokens.tolist(), result.token_log_probs, strict=True):
            ids = tokens[: tokens.index(1) + 1]
            forced = both.token_log_probs(first.params, first.alpha, [SOURCES[index]], [ids])[0]
            np.testing.assert_allclose(each[: len(ids)], forced, atol=1e-4)


def test_ensemble_of_equal_models_equals_one_model() -> None:
    one = member(1)
    alone, doubled = translator(one), translator(one, one)
    weights = ((one.params, one.alpha),)
    expected = dict(alone.engine.search(weights, QUERIES))
    for index, result in doubled.engine.search(weights * 2, QUERIES):
        np.testing.assert_array_equal(result.tokens, expected[index].tokens)
        np.testing.assert_allclose(result.scores, expected[index].scores, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_vote_averages_the_probabilities(count: int) -> None:
    scores = np.random.default_rng(count).normal(0, 3, (count, 2, 3, 7))
    each = [(jnp.asarray(s), jax.nn.logsumexp(jnp.asarray(s), axis=-1)) for s in scores]
    result, log_z = vote(each)
    for place in np.ndindex(2, 3):
        p = np.mean([np.exp(log_softmax(one[place])) for one in scores], axis=0)
        np.testing.assert_allclose(np.asarray(result)[place] - np.asarray(log_z)[place], np.log(p), atol=1e-5)

"""Generation by a language model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.data.tokenizer import Tokenizer, byte_model
from branchnorm_jax.decoding.generate import Continuation, Generator
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS, PAD


def generator(context: int = 40, positions: str = "marian", **options: object) -> Generator:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=byte_model(), add_eos=True)
    model = Transformer(
        ModelConfig(
            family="decoder",
            encoder_layers=0,
            decoder_layers=2,
            width=16,
            ffn_width=12,
            heads=2,
            positions=positions,
            output_bias=True,
        ),
        259,
        259,
    )
    return Generator(model, Tokenizer(processor, processor, ""), DecodeConfig(**options), context)  # type: ignore[arg-type]


PARAMS = jax.tree.map(lambda leaf: 3 * leaf, generator().model.init(jax.random.key(0)))
ALPHA = jnp.float32(1)


@functools.partial(jax.jit, static_argnums=0)
def forced(model: Transformer, inputs: jax.Array) -> jax.Array:
    return model(PARAMS, inputs, inputs, ALPHA)


@pytest.mark.parametrize("positions", ["marian", "rotary"])
def test_greedy_search_takes_the_most_probable_token(positions: str) -> None:
    greedy = generator(positions=positions, beam_size=1, nbest=1, max_new_tokens=9)
    prompts = ["ab", "", "a longer prompt"]
    for prompt, (found,) in zip(prompts, greedy.generate(PARAMS, ALPHA, prompts), strict=True):
        tokens, total = [EOS, *(3 + byte for byte in prompt.encode())], 0.0
        for _ in range(9):
            inputs = jnp.array([tokens + [PAD] * (32 - len(tokens))])
            log_probs = np.array(jax.nn.log_softmax(forced(greedy.model, inputs)[0, len(tokens) - 1]))
            log_probs[PAD] = -np.inf
            if not len(tokens) - 1 - len(prompt):
                log_probs[EOS] = -np.inf  # decode.min_length=1
            tokens.append(int(log_probs.argmax()))
            total += log_probs[tokens[-1]]
            if tokens[-1] == EOS:
                break
        own = tokens[1 + len(prompt) :]
        assert list(found.tokens) == [token for token in own if token != EOS]
        # At the limit of nine tokens, the search does not ask the model for an end.
        assert (found.ended, found.log_prob) == (EOS in own, pytest.approx(total, abs=1e-4))


def test_the_length_penalty_counts_the_continuation_alone() -> None:
    ending = jax.tree.map(lambda leaf: leaf, PARAMS)
    ending["embedding"]["bias"] = ending["embedding"]["bias"].at[EOS].set(6.0)
    wide = generator(beam_size=6, nbest=6, max_new_tokens=12, length_penalty=1.5)
    (found,) = wide.generate(ending, ALPHA, ["a prompt of many more bytes"])
    ended = [one for one in found if one.ended]
    lengths = [len(one.tokens) + 1 for one in ended]
    assert len({*lengths}) > 1
    scores = [one.log_prob / length**1.5 for one, length in zip(ended, lengths, strict=True)]
    assert scores == sorted(scores, reverse=True)


def test_a_search_that_finds_fewer_continuations_returns_fewer() -> None:
    wide = generator(beam_size=300, nbest=300, max_new_tokens=1)
    (found,) = wide.generate(PARAMS, ALPHA, ["x"])
    # A continuation is one of 256 bytes; decode.min_length=1 forbids the end at once.
    assert len(found) == len({one.tokens for one in found})
    assert sum(np.exp(one.log_prob) for one in found) <= 1 + 1e-5
    assert not any(one.ended for one in found)


def test_generation_keeps_the_options_unroll_and_dtype() -> None:
    prompts = ["ab", "", "a longer prompt"]

    def found(**options: Any) -> list[Continuation]:
        search = generator(beam_size=3, nbest=1, max_new_tokens=6, **options)
        return [best for (best,) in search.generate(PARAMS, ALPHA, prompts)]

    exact, flat, rounded = found(unroll=1), found(unroll=2), found(unroll=2, dtype="bfloat16")
    assert [one.tokens for one in flat] == [one.tokens for one in exact]
    np.testing.assert_allclose([one.log_prob for one in flat], [one.log_prob for one in exact], rtol=1e-5)
    errors = [abs(ours.log_prob / theirs.log_prob - 1) for ours, theirs in zip(rounded, exact, strict=True)]
    assert all(1e-5 < error < 0.05 for error in errors)


def test_continuations_of_the_same_length_are_ranked_by_their_log_probability() -> None:
    """The limit cuts these texts off, so the probability of EOS does not count."""
    wide = generator(beam_size=6, nbest=6, max_new_tokens=3)
    for found in wide.generate(PARAMS, ALPHA, ["ab", "", "x"]):
        cut = [one.log_prob for one in found if not one.ended]
        assert len(cut) > 1
        assert cut == sorted(cut, reverse=True)


def test_samples_of_a_low_temperature_are_the_most_probable_tokens() -> None:
    best = generator(beam_size=1, nbest=1, max_new_tokens=8).generate(PARAMS, ALPHA, ["x"])
    for temperature in (1e-5, 1e-38):
        cold = generator(beam_size=1, nbest=1, max_new_tokens=8, temperature=temperature)
        assert cold.generate(PARAMS, ALPHA, ["x"])[0][0].tokens == best[0][0].tokens


def test_samples_are_the_same_for_the_same_number_and_seed() -> None:
    sampler = generator(beam_size=4, nbest=4, temperature=1.0, max_new_tokens=8)
    together = sampler.generate(PARAMS, ALPHA, ["x", "x"])
    assert together[0] != together[1]
    assert len({each.tokens for each in together[0]}) > 1
    assert sampler.generate(PARAMS, ALPHA, ["x"], first=1)[0] == together[1]
    other = generator(beam_size=4, nbest=4, temperature=1.0, max_new_tokens=8, seed=1)
    assert other.generate(PARAMS, ALPHA, ["x"])[0] != together[0]


def test_prompts_are_searched_in_batches() -> None:
    prompts = ["one", "two and more", "", "three", "four"]
    together = generator(beam_size=4, nbest=2, max_new_tokens=8)
    apart = generator(beam_size=4, nbest=2, max_new_tokens=8, batch_tokens=2 * 4 * 32)
    for ours, theirs in zip(
        apart.generate(PARAMS, ALPHA, prompts), together.generate(PARAMS, ALPHA, prompts), strict=True
    ):
        assert [each.tokens for each in ours] == [each.tokens for each in theirs]


def test_few_numbers_of_prompts_are_compiled() -> None:
    """Prompts that come through a pipe arrive in any number."""
    small = generator(beam_size=2, nbest=1, max_new_tokens=4)
    ((alone,),) = small.generate(PARAMS, ALPHA, ["ab"])
    for count in range(1, 9):
        found = small.generate(PARAMS, ALPHA, ["ab"] * count)
        assert [each.tokens for (each,) in found] == [alone.tokens] * count
    assert small._search(16)._cache_size() == len({1, 2, 3, 4, 6, 8})  # type: ignore[attr-defined]


def test_prompt_and_continuation_fit_into_the_context() -> None:
    small = generator(context=20, beam_size=1, nbest=1, max_new_tokens=100)
    long, end, other = small.generate(PARAMS, ALPHA, ["x" + "0123456789" * 3, "0123456789", "123456789"])
    assert small.cut("0123456789" * 3) and not small.cut("0123456789")
    assert len(long[0].tokens) <= 9  # with EOS, ten tokens of the prompt and nine more fill the context
    assert long == end != other

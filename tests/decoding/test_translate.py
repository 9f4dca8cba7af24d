"""Translation with a tiny model, compared with searches that run the whole model on every prefix."""

import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.data.tokenizer import NO_TAGS, Tokenizer, train_tokenizer
from branchnorm_jax.decoding import engine as engines
from branchnorm_jax.decoding.engine import coarse, interleave, padded_length, padded_lengths, rounded
from branchnorm_jax.decoding.glossary import make_glossary
from branchnorm_jax.decoding.results import pharaoh
from branchnorm_jax.decoding.sentences import Line, Required, Sentence
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DataConfig, DecodeConfig, ModelConfig
from branchnorm_jax.tokens import EOS
from tests.decoding.test_beam import log_softmax, reference_beam

forward = jax.jit(Transformer.__call__, static_argnums=0)
ALPHA = jnp.float32(0.7)
WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven"]
LINES = [" ".join(WORDS[(7 * i + j) % 10] for j in range(1 + i % 5)) for i in range(9)] + ["", " "]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    text = [(" ".join(np.roll(WORDS, i)), " ".join(np.roll(WORDS, -i)[::-1])) for i in range(10)]
    return train_tokenizer(DataConfig(vocab_size=30), text, tmp_path_factory.mktemp("vocabulary") / "v")


@pytest.fixture(scope="module")
def translator(tokenizer: Tokenizer) -> tuple[Translator, dict]:
    config = ModelConfig(width=16, heads=2, ffn_width=16, encoder_layers=2, decoder_layers=2)
    model = Transformer(config, tokenizer.source_size, tokenizer.target_size)
    params = jax.jit(model.init)(jax.random.key(1))
    # Weights are larger than the initial ones, so that translations differ and depend on the source.
    params = jax.tree.map(lambda leaf: 2.0 * leaf, params)
    decode = DecodeConfig(beam_size=4, nbest=4, max_length_a=1.0, max_length_b=3, batch_tokens=128)
    return Translator(model, tokenizer, decode), params


def log_probs(translator: Translator, params: dict, source: list[int], prefix: list[int]) -> np.ndarray:
    """Returns the log-probabilities of the token after `prefix`, by teacher forcing without a cache."""
    inputs = np.zeros((1, 16), np.int32)
    inputs[0, : len(prefix) + 1] = [EOS, *prefix]
    logits = forward(translator.model, params, jnp.asarray([source]), jnp.asarray(inputs), ALPHA)
    return log_softmax(np.asarray(logits[0, len(prefix)]))


def test_a_prefix_that_the_model_never_writes_is_refused(translator: tuple[Translator, dict]) -> None:
    engine, _ = translator
    ids = engine.prefix("two")
    assert ids and engine.tokenizer.decode_target(ids) == "two"
    masked = dataclasses.replace(engine, model=dataclasses.replace(engine.model, unused=(ids[-1],)))
    with pytest.raises(UserError, match="the model cannot write 'two'"):
        masked.prefix("two")


def test_beam_search_equals_the_reference_without_a_cache(translator: tuple[Translator, dict]) -> None:
    engine, params = translator
    translations = engine.translate(params, ALPHA, LINES[:4])
    for line, hypotheses in zip(LINES[:4], translations, strict=True):
        (source,) = engine.tokenizer.encode_source([line])
        limit = len(source) + 3
        after = functools.partial(log_probs, engine, params, source)
        expected = reference_beam(after, limit, 4, 1, 0.6, "fairseq")
        for hypothesis, (tokens, score) in zip(hypotheses, expected, strict=True):
            assert hypothesis.text == engine.tokenizer.decode_target(tokens)
            assert hypothesis.score == pytest.approx(score, abs=1e-4)
    assert len({hypotheses[0].text for hypotheses in translations}) > 1


def test_beam_size_1_equals_the_teacher_forced_argmax(translator: tuple[Translator, dict]) -> None:
    engine, params = translator
    greedy = dataclasses.replace(engine, config=dataclasses.replace(engine.config, beam_size=1, nbest=1))
    for line, hypotheses in zip(LINES[:4], greedy.translate(params, ALPHA, LINES[:4]), strict=True):
        (source,) = engine.tokenizer.encode_source([line])
        tokens: list[int] = []
        for position in range(len(source) + 3):
            scores = log_probs(engine, params, source, tokens)
            scores[0] = -np.inf
            if position == 0:
                scores[EOS] = -np.inf
            tokens.append(int(scores.argmax()))
            if tokens[-1] == EOS:
                break
        assert hypotheses[0].text == engine.tokenizer.decode_target(tokens)


@pytest.mark.parametrize(
    ("required", "options"),
    [
        pytest.param(Required(phrases=["seven"]), {}, id="beam"),
        pytest.param(Required(), {"temperature": 1.0}, id="sample", marks=pytest.mark.slow),
    ],
)
def test_the_search_needs_no_more_than_32_bits(
    translator: tuple[Translator, dict], required: Required, options: dict[str, Any]
) -> None:
    """With JAX_ENABLE_X64, integers without a type have 64 bits, in all threads."""
    engine, params = translator
    searcher = dataclasses.replace(engine, config=dataclasses.replace(engine.config, **options))
    usual = searcher.translate(params, ALPHA, LINES[:2], required=[required] * 2)
    jax.config.update("jax_enable_x64", True)
    try:
        wide = searcher.translate(params, ALPHA, LINES[:2], required=[required] * 2)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert wide == usual


@pytest.mark.parametrize(("batch_tokens", "streams", "unroll"), [(1, 1, 12), (64, 2, 1), (64, 3, 12), (100_000, 1, 12)])
def test_results_do_not_depend_on_batch_or_order(
    translator: tuple[Translator, dict], batch_tokens: int, streams: int, unroll: int
) -> None:
    engine, params = translator
    expected = engine.translate(params, ALPHA, LINES)
    config = dataclasses.replace(engine.config, batch_tokens=batch_tokens, streams=streams, unroll=unroll)
    other = dataclasses.replace(engine, config=config)
    order = np.random.default_rng(batch_tokens).permutation(len(LINES))
    translations = other.translate(params, ALPHA, [LINES[index] for index in order])
    for place, index in enumerate(order):
        assert [h.text for h in translations[place]] == [h.text for h in expected[index]]
        np.testing.assert_allclose(
            [h.score for h in translations[place]], [h.score for h in expected[index]], atol=1e-5
        )


@pytest.mark.slow
def test_short_sources_among_long_ones_are_translated_as_if_alone(translator: tuple[Translator, dict]) -> None:
    # The encoder pads a few short sources less than the batch that they join.
    engine, params = translator
    rng = np.random.default_rng(0)
    lengths = [30, 29, 28, 27, 16, 9, 5, 3, 16, 15, 2, 17]
    lines = [" ".join(rng.choice(WORDS, length)) for length in lengths]
    tokens = [len(ids) for ids in engine.tokenizer.encode_source(lines)]
    assert max(tokens) > 16 > min(tokens)
    together = engine.translate(params, ALPHA, lines)
    for line, hypotheses in list(zip(lines, together, strict=True))[-3:]:
        (alone,) = engine.translate(params, ALPHA, [line])
        assert [h.text for h in hypotheses] == [h.text for h in alone]
        np.testing.assert_allclose([h.score for h in hypotheses], [h.score for h in alone], atol=1e-5)


@pytest.mark.slow
def test_deep_decoders_run_without_a_loop_only_for_long_inputs(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "UNROLLED", 1)
    monkeypatch.setattr(engines, "LONG", 4)
    config = ModelConfig(width=8, heads=2, ffn_width=8, encoder_layers=1, decoder_layers=2)
    params = jax.jit(Transformer(config, tokenizer.source_size, tokenizer.target_size).init)(jax.random.key(1))
    decode = DecodeConfig(beam_size=2, max_length_a=0.0, max_length_b=2)
    seen: set[bool] = set()

    class Watched(Transformer):
        def run_layers(self, params: dict, stack: str, *args: Any, **options: Any) -> Any:
            if stack == "decoder":
                seen.add(isinstance(params["decoder"], list))
            return super().run_layers(params, stack, *args, **options)

    watched = Watched(config, tokenizer.source_size, tokenizer.target_size)
    few, many = LINES[1:3], LINES[1:3] * 2
    few_tokens, many_tokens = (sum(map(len, tokenizer.encode_source(lines))) for lines in (few, many))
    assert few_tokens < 8 <= many_tokens
    looped = Translator(watched, tokenizer, decode).translate(params, ALPHA, few)
    assert seen == {False}
    seen.clear()
    flat = Translator(watched, tokenizer, decode).translate(params, ALPHA, many)[:2]
    assert seen == {True}
    assert [[h.text for h in each] for each in flat] == [[h.text for h in each] for each in looped]
    seen.clear()
    Translator(watched, tokenizer, dataclasses.replace(decode, unroll=1)).translate(params, ALPHA, many)
    assert seen == {False}


def test_streams_run_concurrently_and_their_failures_are_raised() -> None:
    together = threading.Barrier(3, timeout=20)

    def stream(name: str) -> Iterator[list[str]]:
        for turn in range(4):
            together.wait()  # passes only if all three streams are waiting
            yield [f"{name}{turn}", "again"][: turn + 1]

    items = list(interleave([stream(name) for name in "abc"]))
    for name in "abc":
        assert [item[1] for item in items if item[0] == name and item != "again"] == list("0123")
    assert items.count("again") == 9

    def broken() -> Iterator[list[str]]:
        yield ["fine"]
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        list(interleave([iter([["a"], ["b"]]), broken()]))


def test_empty_lines_stay_empty_and_no_line_is_lost(translator: tuple[Translator, dict]) -> None:
    engine, params = translator
    counts: list[int] = []
    translations = engine.translate(params, ALPHA, LINES, progress=counts.append)
    assert len(translations) == len(LINES) == sum(counts)
    assert [h.text for h in translations[-1]] == [h.text for h in translations[-2]] == [""] * 4
    assert engine.translate(params, ALPHA, []) == []


def test_long_lines_are_cut_with_a_warning(translator: tuple[Translator, dict]) -> None:
    engine, params = translator
    warnings: list[str] = []
    short = dataclasses.replace(
        engine, config=dataclasses.replace(engine.config, max_input_length=6, split="none"), warn=warnings.append
    )
    translations = short.translate(params, ALPHA, ["red", " ".join(WORDS)], first=("", 41))
    assert len(warnings) == 1
    assert "line 42" in warnings[0]
    ids = engine.tokenizer.encode_source([" ".join(WORDS)])[0]
    assert f"from {len(ids)} to 6 tokens" in warnings[0]
    cut = short.tokenizer.decode_target(ids[:5])
    for hypothesis, expected in zip(translations[1], short.translate(params, ALPHA, [cut])[0], strict=True):
        assert hypothesis.text == expected.text
        assert hypothesis.score == pytest.approx(expected.score, abs=1e-5)


def test_learned_positions_limit_the_length(translator: tuple[Translator, dict]) -> None:
    """Sources are cut, translations end in time, and no token gets the position of another one."""
    engine, _ = translator
    warnings: list[str] = []
    config = dataclasses.replace(engine.model.config, positions="learned", max_positions=8)
    decode = dataclasses.replace(engine.config, max_length_b=20, min_length=20, split="none")
    model = dataclasses.replace(engine.model, config=config)
    short = dataclasses.replace(engine, model=model, config=decode, warn=warnings.append)
    params = jax.tree.map(lambda leaf: 2.0 * leaf, jax.jit(model.init)(jax.random.key(1)))
    ((best, *_),) = short.translate(params, ALPHA, [" ".join(WORDS)])
    assert len(warnings) == 1 and warnings[0].endswith("to 7 tokens")
    assert len(best.tokens) == 8
    source = short.parts([Line(" ".join(WORDS), 1)])[0][0].source
    expected = short.token_log_probs(params, ALPHA, [source], [best.tokens])[0]
    np.testing.assert_allclose([log_prob for _, log_prob in best.pieces], expected, atol=1e-4)
    with pytest.raises(UserError, match=r"longer than the 8 positions of the model \(model.max_positions\)"):
        short.score(params, ALPHA, [("red", " ".join(WORDS))])
    longest = short.tokenizer.decode_target(short.tokenizer.encode_target([" ".join(WORDS)])[0][:7])
    pairs = [("red", longest), ("red", " ".join(WORDS)), (" ".join(WORDS), "red")]
    assert short.fits(pairs, [NO_TAGS] * 3) == [True, False, False]
    assert engine.fits(pairs, [NO_TAGS] * 3) == [True] * 3
    with pytest.raises(UserError, match=r"tokens, and the model has 8 positions \(model.max_positions\)"):
        short.translate(params, ALPHA, ["red"], required=[Required(" ".join(WORDS))])


def test_scores_are_sums_of_teacher_forced_log_probabilities(translator: tuple[Translator, dict]) -> None:
    engine, params = translator
    pairs = [("red green", "one two three"), ("blue", ""), ("", "six")]
    for (source, target), (score, tokens) in zip(pairs, engine.score(params, ALPHA, pairs), strict=True):
        (source_ids,) = engine.tokenizer.encode_source([source])
        (target_ids,) = engine.tokenizer.encode_target([target])
        expected = sum(
            log_probs(engine, params, source_ids, target_ids[:position])[token]
            for position, token in enumerate(target_ids)
        )
        assert tokens == len(target_ids)
        np.testing.assert_allclose(score, expected, atol=1e-3)


@pytest.mark.slow
def test_attention_of_a_batch_equals_attention_of_single_pairs(translator: tuple[Translator, dict]) -> None:
    """The weights do not depend on the rest of the batch or on padding. The reference is the unpadded pair."""
    engine, params = translator
    sources = engine.tokenizer.encode_source(["red green", "", " ".join(WORDS * 3), "blue"])
    targets = [*engine.tokenizer.encode_target(["one two three", "six", "seven"]), []]
    for layer in (0, 1, 2):
        one = dataclasses.replace(engine, config=dataclasses.replace(engine.config, alignment_layer=layer))
        layer_weights = jnp.array([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])[layer]
        chosen = one.attention(params, ALPHA, sources, targets)
        assert chosen[3].shape == (0, len(sources[3]))
        for source, target, ours in zip(sources[:3], targets[:3], chosen[:3], strict=True):
            inputs = jnp.asarray([[EOS, *target[:-1]]])
            expected = engine.model.attention(params, jnp.asarray([source]), inputs, ALPHA, layer_weights)[0]
            assert ours.shape == (len(target), len(source))
            np.testing.assert_allclose(ours, expected, atol=1e-5)
            np.testing.assert_allclose(ours.sum(1), 1, atol=1e-5)


def test_translations_include_their_attention(translator: tuple[Translator, dict]) -> None:
    engine, params = translator
    translations, plain = (engine.translate(params, ALPHA, LINES, attention=attention) for attention in (True, False))
    assert [[h._replace(attention=None) for h in each] for each in translations] == plain
    for line, hypotheses in zip(LINES, translations, strict=True):
        (source,) = engine.tokenizer.encode_source([line])
        for hypothesis in hypotheses:
            assert hypothesis.attention is not None
            assert hypothesis.attention.shape == (len(hypothesis.pieces), len(source))
            assert engine.tokenizer.target_pieces_of(list(hypothesis.tokens)) == [p for p, _ in hypothesis.pieces]
            target = list(hypothesis.tokens)
            (expected,) = engine.attention(params, ALPHA, [source], [target])
            np.testing.assert_allclose(hypothesis.attention, expected, atol=1e-5)


def test_pharaoh_omits_eos_on_both_sides() -> None:
    eos = 0.9  # a token with its largest weight on EOS is aligned to the token with the next largest weight
    rows = [[0.1, 0.3, 0.2, 0.4], [0.0, 0.04, 0.06, eos], [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert pharaoh([np.array(rows, np.float32)]) == [(1, 0), (2, 1), (0, 2)]
    assert pharaoh([np.ones((0, 1), np.float32)]) == []
    assert pharaoh([np.ones((3, 1), np.float32)]) == []
    assert pharaoh([np.ones((1, 3), np.float32)]) == []


@pytest.mark.slow
def test_warm_up_prevents_later_compilation(translator: tuple[Translator, dict]) -> None:
    """Covers any number of lines, rings of the cache that grow and shrink, and attention weights."""
    engine, params = translator
    config = dataclasses.replace(engine.config, beam_size=2, nbest=2, max_length_a=8.0, min_length=65, batch_tokens=256)
    server = dataclasses.replace(engine, config=config, rounding=coarse)
    plain = dataclasses.replace(engine, config=config)
    expected = plain.translate(params, ALPHA, LINES * 3)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    for program in server.programs(params, ALPHA, 16):
        program()
    assert any("backend_compile" in event for event in compiled)
    compiled.clear()
    for count in (1, 3, 7, 27):
        sources = server.tokenizer.encode_source((LINES * 3)[:count])
        sentences = [Sentence(source, number, nbest=2) for number, source in enumerate(sources)]
        translations = server.search(params, ALPHA, sentences)
        assert [[h.text for h in each] for each in translations] == [
            [h.text for h in each] for each in expected[:count]
        ]
        if count < 4:
            short = [[best._replace(tokens=best.tokens[-16:])] for best, _ in translations]
            server.with_attention(params, ALPHA, sentences, short)
    assert max(len(each[0].tokens) for each in expected) > 64
    assert [event for event in compiled if "backend_compile" in event] == []


def test_numbers_of_rows_are_rounded_up() -> None:
    """The rounded number is at least the given number and takes few different values."""
    for rounding, most in ((rounded, 20), (coarse, 6)):
        counts = [rounding(count) for count in range(1, 1001)]
        assert all(count <= rows <= 4 * count for count, rows in enumerate(counts, start=1))
        assert counts == sorted(counts)
        assert len(set(counts)) <= most
    assert {coarse(count) for count in range(1, 1001)} == {1, 4, 16, 64, 256, 1024}


def test_padded_lengths_fit_their_sentences() -> None:
    for length in (1, 8, 9, 1024, 1025, 3000):
        assert padded_length(length) >= length
    assert {padded_length(length) for length in range(1, 1025)} == {16, 32, 64, 128, 256, 512, 1024}
    for longest in (1, 16, 17, 100, 1024):
        assert padded_lengths(longest) == sorted({padded_length(length) for length in range(1, longest + 1)})


@pytest.mark.slow
def test_programs_for_terms_prevent_later_compilation(translator: tuple[Translator, dict]) -> None:
    engine, params = translator
    glossary = make_glossary({"": WORDS[:2]}, "")
    config = dataclasses.replace(engine.config, beam_size=2, batch_tokens=64)
    server = dataclasses.replace(engine, config=config, rounding=coarse, glossary=glossary)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    for program in server.programs(params, ALPHA, 16):
        program()
    compiled.clear()
    for count in (1, 3, 7):
        for best, *_ in server.translate(params, ALPHA, [WORDS[0]] * count):
            assert WORDS[1] in best.text
    assert [event for event in compiled if "backend_compile" in event] == []

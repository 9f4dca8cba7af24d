"""Language tags in decoding: before the source, before the target, and before both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.data.tokenizer import NO_TAGS, Tags, train_tokenizer
from branchnorm_jax.decoding.engine import coarse
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.sentences import Sentence
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig, DecodeConfig, ModelConfig, ServeConfig
from branchnorm_jax.serving.messages import parse
from branchnorm_jax.training.network import make_model
from tests.decoding.test_translate import ALPHA, LINES, WORDS

Case = tuple[Translator, dict, Languages, DataConfig]


@pytest.fixture(
    scope="module",
    params=["target", *(pytest.param(tags, marks=pytest.mark.slow) for tags in ("source", "both", "each"))],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    data = DataConfig(vocab_size=34, pairs="en-de+fr,de+fr-en", tags=request.param)
    text = [(" ".join(np.roll(WORDS, i)), " ".join(np.roll(WORDS, -i)[::-1])) for i in range(10)]
    tokenizer = train_tokenizer(data, text, tmp_path_factory.mktemp("vocabulary") / "v")
    config = ModelConfig(width=16, heads=2, ffn_width=16, encoder_layers=2, decoder_layers=2)
    model = make_model(config, tokenizer)
    params = jax.tree.map(lambda leaf: 2.0 * leaf, jax.jit(model.init)(jax.random.key(1)))
    decode = DecodeConfig(beam_size=4, nbest=4, max_length_a=1.0, max_length_b=3, batch_tokens=128)
    return Translator(model, tokenizer, decode), params, Languages(data, tokenizer), data


def test_scores_and_output_omit_tags(case: Case) -> None:
    translator, params, languages, data = case
    tagged = [f">>{lang}<< {line}" for line in LINES[:4] for lang in ("de", "fr")]
    lines, tags = languages.split_tags(tagged, "", source="en")
    assert lines == [line for line in LINES[:4] for _ in range(2)]
    sources = translator.tokenizer.encode_source(lines)
    translations = translator.translate(params, ALPHA, lines, tags=tags, attention=True)
    expected = translator.token_log_probs(
        params,
        ALPHA,
        [[*tag.source, *ids] for tag, ids in zip(tags, sources, strict=True)],
        [[*tag.target, *each[0].tokens] for tag, each in zip(tags, translations, strict=True)],
    )
    attentions = [
        translator.attention(params, ALPHA, [[*tag.source, *ids]], [[*tag.target, *each[0].tokens]])[0]
        for tag, ids, each in zip(tags, sources, translations, strict=True)
    ]
    for tag, ids, each, log_probs, attention_weights in zip(
        tags, sources, translations, expected, attentions, strict=True
    ):
        best, start = each[0], len(tag.target)
        assert best.log_prob == pytest.approx(log_probs[start:].sum(), abs=1e-4)
        assert [log_prob for _, log_prob in best.pieces] == pytest.approx(log_probs[start:].tolist(), abs=1e-4)
        assert len(best.pieces) == len(best.tokens)
        assert ">>" not in best.text
        assert best.attention is not None
        assert best.attention.shape == (len(best.tokens), len(ids))
        np.testing.assert_allclose(best.attention, attention_weights[start:, len(tag.source) :], atol=1e-5)
    # Different languages give different translations.
    assert any(
        german[0].tokens != french[0].tokens
        for german, french in zip(translations[::2], translations[1::2], strict=True)
    )
    assert (len(tags[0].source), len(tags[0].target)) == (data.tags != "target", data.tags != "source")


@pytest.mark.slow
def test_warm_up_with_tags_prevents_later_compilation(case: Case) -> None:
    """Includes a line that fits the maximum length only without its tag."""
    translator, params, languages, data = case
    config = dataclasses.replace(translator.config, beam_size=2, nbest=2, batch_tokens=256)
    server = dataclasses.replace(translator, config=config, rounding=coarse)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    for program in server.programs(params, ALPHA, 16, server.tokenizer.tags(data, "en", "de")):
        program()
    assert any("backend_compile" in event for event in compiled)
    compiled.clear()
    lines = [*LINES, " ".join(WORDS[:7])]
    sources = server.tokenizer.encode_source(lines)
    assert max(map(len, sources)) <= 16
    tags = languages.split_tags(lines, "fr", source="en")[1]
    translations = server.translate(params, ALPHA, lines, tags=tags)
    sentences = [Sentence(ids, number, tag) for number, (ids, tag) in enumerate(zip(sources, tags, strict=True))]
    server.with_attention(params, ALPHA, sentences, translations)
    assert [event for event in compiled if "backend_compile" in event] == []


@pytest.mark.parametrize("shortest", [0, 1, 3])
def test_min_length_does_not_count_the_tag(case: Case, shortest: int) -> None:
    """The model gives all tokens the same probability, so EOS, the first of them, is chosen as soon as allowed."""
    translator, params, languages, _ = case
    params = jax.tree.map(jnp.zeros_like, params)
    config = dataclasses.replace(translator.config, beam_size=1, nbest=1, min_length=shortest, length_penalty=0.0)
    short = dataclasses.replace(translator, config=config)
    lines, tags = languages.split_tags([">>de<< " + LINES[0]], "", source="en")
    ((translation,),) = short.translate(params, ALPHA, lines, tags=tags)
    assert len(translation.tokens) == shortest + 1


def test_empty_lines_need_no_tag_and_tabs_are_kept(case: Case) -> None:
    _, _, languages, _ = case
    texts, tags = languages.split_tags(["", "  ", ">>de<<\tzwei", ">>de<<  x", "  >>de<< y"], "", source="en")
    assert languages.split_tags(["\t>>de<< x"], "de", source="en")[0] == ["\t>>de<< x"]
    assert texts == ["", "  ", "\tzwei", "x", "y"]
    assert len(tags) == 5 and tags[2] == tags[3] == tags[4]


def test_supported_and_unsupported_languages(case: Case) -> None:
    _, _, languages, data = case
    assert languages.targets == languages.sources == ["de", "en", "fr"]
    for line, default, message in (
        ("x", "", "^line 3: no target language"),
        ("x", "pl", "^this model .* not to 'pl'"),
        (">>de<< x", "pl", "^this model .* not to 'pl'"),
        (">>pl<< x", "de", "^line 3: .* not to 'pl'"),
        ("x", "deu", r"^this model was not trained to translate to 'deu'; did you mean de\?$"),
        (">>fra<< x", "de", r"^line 3: this model was not trained to translate to 'fra'; did you mean fr\?$"),
    ):
        with pytest.raises(UserError, match=message):
            languages.split_tags([line], default, 3, "en")
    # A model without tags rejects languages that it was not trained for.
    one = Languages(dataclasses.replace(data, pairs="de+fr-en", tags="none"), languages.tokenizer)
    assert one.split_tags([">>en<< x", "y"], "") == (["x", "y"], [NO_TAGS, NO_TAGS])
    with pytest.raises(UserError, match="trained to translate to en, not to 'zz'"):
        one.split_tags([">>zz<< x"], "")
    bilingual = Languages(DataConfig(), languages.tokenizer)
    assert bilingual.split_tags([">>en<< x"], "de") == ([">>en<< x"], [Tags()])
    with pytest.raises(UserError, match="trained to translate to de, not to 'fr'"):
        bilingual.split_tags(["x"], "fr")


def test_tags_that_are_text_are_noticed(case: Case) -> None:
    _, _, languages, _ = case
    bilingual = Languages(DataConfig(), languages.tokenizer)
    assert bilingual.ignored_tag(" >>zz<< x") == (
        ">>zz<< is read as text, not as a language tag: this model has no language tags"
    )
    for text in (">>en<< x", "x >>en<<"):
        assert languages.ignored_tag(text).endswith("not as a language tag: only one at the start of a line is")
    for text in ("x", "x >>zz<< y", "a >> b << c", ""):
        assert not languages.ignored_tag(text) and not bilingual.ignored_tag(text)


def test_the_source_language_has_a_tag_of_its_own(case: Case) -> None:
    """With data.tags=each, the source begins with its own language. Other models do not need to know it."""
    translator, _, _, data = case
    languages = Languages(dataclasses.replace(data, tags="each"), translator.tokenizer)
    pieces = translator.tokenizer.source_pieces
    german, english = ((pieces.index(f">>{lang}<<"),) for lang in ("de", "en"))
    assert languages.split_tags(["x", ">>de<< x"], "en", source="de") == (
        ["x", "x"],
        [(german, english), (german, german)],
    )
    with pytest.raises(UserError, match=r"no source language; set decode\.source_lang to one of de, en, fr"):
        languages.split_tags(["x"], "en")
    with pytest.raises(UserError, match=r"^in\.txt, line 1: no target language; set decode\.target_lang or start the"):
        languages.split_tags(["x"], "", source="en", name="in.txt")
    with pytest.raises(UserError, match="translate from de, en, fr, not from 'pl'"):
        languages.split_tags(["x"], "en", source="pl")
    single = Languages(dataclasses.replace(data, tags="each", pairs="de-en"), translator.tokenizer)
    assert single.split_tags(["x"], "") == (["x"], [(german, english)])
    body = b'{"text": "x", "source_lang": "de", "target_lang": "en"}'
    assert parse(body, ServeConfig(), DecodeConfig(), languages, translator.encoded).tags == ((german, english),)
    with pytest.raises(UserError, match="source_lang must be a string"):
        parse(body.replace(b'"de"', b"1"), ServeConfig(), DecodeConfig(), languages, translator.encoded)
    others = Languages(dataclasses.replace(data, tags="source"), translator.tokenizer)
    assert others.split_tags(["x"], "en")[1] == others.split_tags(["x"], "en", source="de")[1] == [(english, ())]

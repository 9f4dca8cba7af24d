"""Long lines are split into parts that fit, and nothing is lost, whatever the text is."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.data import numerals
from branchnorm_jax.data.bpe import MosesBPE
from branchnorm_jax.data.tokenizer import Tokenizer, train_tokenizer
from branchnorm_jax.decoding.glossary import make_glossary
from branchnorm_jax.decoding.parts import Part, join, split
from branchnorm_jax.decoding.results import Translation, block_diagonal, joined, pharaoh
from branchnorm_jax.decoding.sentences import Line, Required, Sentence
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.options import DataConfig, DecodeConfig
from branchnorm_jax.tokens import EOS

ALPHA: Any = 1.0

SENTENCES = {
    "en": ["Dr. Smith left at 5:17 p.m. on May 3.", "He paid $20!", "Did she go, too?", "Yes."],
    "zh_CN": ["我们坐火车去北京。", "今天天气很好，你呢？", "他没有说话！"],
}
ENGLISH, CHINESE = " ".join(SENTENCES["en"]), "".join(SENTENCES["zh_CN"])


def trained_tokenizer(folder: Path, **options: Any) -> Tokenizer:
    text = [*numerals.pairs("train", "en", "de", 300), *[(CHINESE, CHINESE), (ENGLISH, ENGLISH)] * 20]
    return train_tokenizer(DataConfig(vocab_size=400, **options), text, folder)


@pytest.fixture(scope="module", params=["nmt_nfkc", "identity", "bpe"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    name = "vocab_type" if request.param == "bpe" else "source_normalization"
    return trained_tokenizer(tmp_path_factory.mktemp("v") / "v", byte_fallback=True, **{name: request.param})


def content(tokenizer: Tokenizer, parts: Sequence[Part]) -> str:
    """Returns the text of the parts without any white space."""
    ids = [token for part in parts for token in part.source[:-1]]
    return "".join(tokenizer.source_processor.decode(ids).split())


def whole(tokenizer: Tokenizer, text: str) -> str:
    return content(tokenizer, [Part(ids) for ids in tokenizer.encode_source([text])])


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [". ", "! ", "。", " ", "\n\n", "J.\u00a0K. ", '." ', "one", "21", "€", "😀", "我", "f" * 40, "Dr. "]
            ),
            st.text(st.characters(codec="utf-8"), max_size=6),
        ),
        max_size=40,
    ).map("".join),
    st.integers(4, 30),
)
@settings(max_examples=60)
def test_parts_fit_the_limit_and_lose_nothing(tokenizer: Tokenizer, text: str, limit: int) -> None:
    parts = split(text, tokenizer, limit, "en")
    assert parts
    for part in parts:
        assert 1 <= len(part.source) <= limit
        assert part.source[-1] == EOS
        assert EOS not in part.source[:-1]
    assert content(tokenizer, parts) == whole(tokenizer, text)


@pytest.mark.parametrize("language", SENTENCES)
def test_parts_are_sentences(tokenizer: Tokenizer, language: str) -> None:
    sentences = SENTENCES[language] * 30
    text = (" " if language == "en" else "").join(sentences)
    parts = split(text, tokenizer, max(map(len, tokenizer.encode_source(sentences))), language)
    assert [part.source for part in parts] == tokenizer.encode_source(sentences)
    assert not any(part.inside for part in parts)


def test_a_long_sentence_is_split_at_spaces_and_a_long_word_at_pieces(tokenizer: Tokenizer) -> None:
    words = " ".join(f"{number}" for number in range(300))
    parts = split(words, tokenizer, 20)
    texts = [tokenizer.source_processor.decode(part.source[:-1]) for part in parts]
    assert " ".join(texts) == words
    assert not any(part.inside for part in parts)
    word = "a" * 50_000
    parts = split(word, tokenizer, 200)
    assert content(tokenizer, parts) == word
    assert [part.inside for part in parts] == [False, *[True] * (len(parts) - 1)]
    # Chinese has no spaces between words, so a cut is not inside a word.
    assert not any(part.inside for part in split("我们坐火车去北京" * 50, tokenizer, 20, "zh"))
    # A character of several bytes stays whole, and is one of a word like any other.
    for word, inside in (("我们坐火车去北京雨雪" * 9, False), ("😀" * 20, True)):
        parts = split(word, tokenizer, 20, "zh")
        texts = [tokenizer.source_processor.decode(part.source[:-1]) for part in parts]
        assert len(parts) > 1 and "".join(texts) == word
        assert {part.inside for part in parts[1:]} == {inside}
    assert len(split("😀", tokenizer, 3)) > 1  # fewer tokens than bytes


def test_words_that_only_the_normalisation_separates_stay_separate(tmp_path: Path) -> None:
    """Of this text, white space makes one word, and SentencePiece several."""
    tokenizer = trained_tokenizer(tmp_path / "v")
    parts = split("\u200b".join(["twenty", "one"] * 20), tokenizer, 12)
    assert len(parts) > 1
    copies = [tokenizer.source_processor.decode(part.source[:-1]).strip() for part in parts]
    assert join(copies, parts) == " ".join(["twenty", "one"] * 20)


def test_join_writes_spaces_where_the_language_has_them() -> None:
    between, inside = Part([EOS]), Part([EOS], inside=True)
    assert join(["One.", "Two."], [between] * 2) == "One. Two."
    assert join(["你好。", "再见。"], [between] * 2) == "你好。再见。"
    assert join(["これは。", "ABC"], [between] * 2) == "これは。ABC"
    assert join(["“你好。”", "“再见。”"], [between] * 2) == "“你好。”“再见。”"
    assert join(["他走了……", "——再见。"], [between] * 2) == "他走了……——再见。"
    assert join(["“Yes.”", "“No.”"], [between] * 2) == "“Yes.” “No.”"
    assert join(["안녕하세요.", "네."], [between] * 2) == "안녕하세요. 네."
    assert join(["สวัสดี", "ครับ"], [between] * 2) == "สวัสดี ครับ"
    assert join(["aaa", "aa", "b"], [between, inside, between]) == "aaaaa b"
    assert join(["", "One.", "", "Two.", ""], [between] * 5) == "One. Two."
    assert join([""], [between]) == ""


class Copying(Translator):
    """Translates each sentence to itself. The k-th translation has the score -k, and attention to the same position."""

    def search(
        self,
        params: Any,
        alpha: Any,
        sentences: Sequence[Sentence],
        finished: Callable[[int], Any] = lambda index: None,
    ) -> list[list[Translation]]:
        for index in reversed(range(len(sentences))):
            assert len(sentences[index].source) <= self.limit
            finished(index)
        return [[self._copy(sentence, rank) for rank in range(1, sentence.nbest + 1)] for sentence in sentences]

    def _copy(self, sentence: Sentence, rank: int) -> Translation:
        ids = list(sentence.source)
        pieces = tuple((piece, -1.0) for piece in self.tokenizer.source_pieces_of(ids))
        text = self.tokenizer.source_processor.decode(ids[:-1])
        return Translation(text, -rank, -rank * len(ids), pieces, tuple(ids), tuple(ids))

    def attention(self, params: Any, alpha: Any, sources: Any, targets: Any) -> list[np.ndarray]:
        return [np.eye(len(target), len(source)) for source, target in zip(sources, targets, strict=True)]


def copying(tokenizer: Tokenizer, max_length: int = 64, **decode: Any) -> Copying:
    model: Any = SimpleNamespace(unused=(), config=SimpleNamespace(longest=None))
    return Copying(model, tokenizer, DecodeConfig(**decode), data=DataConfig(max_length=max_length))


def test_documents_come_back_whole_and_in_order(tokenizer: Tokenizer) -> None:
    english = " ".join(source for source, _ in numerals.pairs("train", "en", "de", 4000))
    assert len(tokenizer.encode_source([english])[0]) > 50_000
    lines = ["twenty-one", english, "", "a" * 50_000, CHINESE * 40, " ".join(["seven"] * 3000)]
    done: list[int] = []
    results = copying(tokenizer).translate({}, ALPHA, lines, progress=done.append)
    assert sum(done) == len(lines)
    assert [best.text for best, *_ in results] == [
        tokenizer.source_processor.decode(ids[:-1]) for ids in tokenizer.encode_source(lines)
    ]
    assert [len(best.parts) > 1 for best, *_ in results] == [False, True, False, True, True, True]


def test_joined_translations_sum_scores_and_shift_alignments(tokenizer: Tokenizer) -> None:
    translator = copying(tokenizer, nbest=3)
    line = " ".join([ENGLISH] * 20)
    (results,) = translator.translate({}, ALPHA, [line], attention=True)
    (parts,) = translator.parts([Line(line, 1)])
    count, tokens = len(parts), sum(len(part.source) for part in parts)
    assert count > 2
    for rank, result in enumerate(results, start=1):
        assert (result.score, result.log_prob) == (-rank * count, -rank * tokens)
        assert len(result.pieces) == len(result.tokens) == len(result.source) == tokens
        assert pharaoh(result.blocks) == [(place, place) for place in range(tokens - count)]
        ends = np.cumsum([len(part.source) for part in parts]) - 1
        kept = [place for place in range(tokens) if place not in ends]
        assert pharaoh(result.blocks, eos=True) == [(place, place) for place in kept]
        matrix = block_diagonal(result.blocks)
        np.testing.assert_array_equal(matrix, np.eye(tokens))


def test_the_limit_is_the_longest_sentence_of_the_training(tokenizer: Tokenizer) -> None:
    line = " ".join([ENGLISH] * 3)
    length = len(tokenizer.encode_source([line])[0])
    assert len(copying(tokenizer, max_length=length).parts([Line(line, 1)])[0]) == 1
    assert len(copying(tokenizer, max_length=length - 1).parts([Line(line, 1)])[0]) == 12
    assert len(copying(tokenizer, max_length=length, max_input_length=length - 1).parts([Line(line, 1)])[0]) == 12
    assert len(copying(tokenizer, max_length=length, split="sentences").parts([Line(line, 1)])[0]) == 12
    assert copying(tokenizer, split="sentences").parts([Line("Yes.", 1), Line("", 2)]) == copying(tokenizer).parts(
        [Line("Yes.", 1), Line("", 2)]
    )
    ((part,),) = copying(tokenizer, max_length=4, split="none", max_input_length=length).parts([Line(line, 1)])
    assert not part.warning
    ((part,),) = copying(tokenizer, split="none", max_input_length=9).parts([Line(line, 1)])
    assert len(part.source) == 9
    assert part.warning == f"cut from {length} to 9 tokens"


def test_a_prefix_begins_the_first_part_and_parts_are_sampled_separately(tokenizer: Tokenizer) -> None:
    seen: list[Sentence] = []

    class Watching(Copying):
        def search(self, params: Any, alpha: Any, sentences: Sequence[Sentence], *rest: Any) -> list[list[Translation]]:
            seen.extend(sentences)
            return super().search(params, alpha, sentences, *rest)

    fields = dataclasses.fields(Copying)
    translator = Watching(**{field.name: getattr(copying(tokenizer), field.name) for field in fields})
    translator.translate_lines(
        {}, ALPHA, [Line(ENGLISH * 20, 1, required=Required("one")), Line("two", 2, required=Required("two"))]
    )
    prefixes = [tokenizer.encode_target([text])[0][:-1] for text in ("one", "two")]
    assert [list(each.prefix) for each in seen] == [prefixes[0], *[[]] * (len(seen) - 2), prefixes[1]]
    numbers = [each.number for each in seen]
    assert len(set(numbers)) == len(numbers)
    assert (numbers[0], numbers[-1]) == (1, 2)
    assert all(0 <= number < 2**31 for number in numbers)


def test_a_line_with_one_part_is_not_changed() -> None:
    one = Translation("text", -1.0, -2.0)
    assert joined([[one]], [Part([EOS])]) == [one]
    assert joined([[one]], [Part([EOS], warning="cut")]) == [one._replace(warning="cut")]


def test_ranks_without_a_translation_of_every_part_are_empty() -> None:
    """The first rank keeps what was found; it is the translation of the line."""
    found = [Translation(text, -1.0, -2.0, ((text, -2.0),), (7,), (8, EOS), np.ones((1, 2))) for text in ("a", "b")]
    absent = Translation("", -np.inf, -np.inf, source=(9, EOS), attention=np.zeros((0, 2)))
    parts = [Part([8, EOS]), Part([9, EOS])]
    first, second = joined([found, [found[0], absent]], parts)
    assert (first.score, first.tokens) == (-2.0, (7, 7))
    assert (second.text, second.score, second.log_prob, second.tokens) == ("", -np.inf, -np.inf, ())
    assert (second.pieces, pharaoh(second.blocks), block_diagonal(second.blocks).shape) == ((), [], (0, 4))
    assert second.source == (8, EOS, 9, EOS)
    assert joined([found, [absent, absent]], parts)[0].tokens == (7,)


def test_terms_are_required_in_their_own_part_and_given_phrases_prevent_splitting(tokenizer: Tokenizer) -> None:
    seen: list[Sentence] = []

    class Watching(Copying):
        def search(self, params: Any, alpha: Any, sentences: Sequence[Sentence], *rest: Any) -> list[list[Translation]]:
            seen.extend(sentences)
            return [[self._copy(sentence, 1)] for sentence in sentences]

    fields = {field.name: getattr(copying(tokenizer), field.name) for field in dataclasses.fields(Copying)}
    fields["glossary"] = make_glossary({"1": ["seven", "sieben"]}, "")
    text = "It is seven. " + "It is nine. " * 40
    Watching(**fields).translate_lines({}, ALPHA, [Line(text, 1), Line(text, 2, required=Required(phrases=["neun"]))])
    seven, nine = (tokenizer.encode_target([phrase])[0][:-1] for phrase in ("sieben", "neun"))
    assert [each.phrases for each in seen] == [[seven], *[[]] * (len(seen) - 2), [seven, nine]]
    assert len(seen) > 10
    assert len(seen[-1].source) == len(tokenizer.encode_source([text])[0])


def test_words_are_cut_between_the_pieces_of_codes() -> None:
    """The mark that a word goes on is not part of the text: Chinese words touch with and without it."""
    pieces = ["<pad>", "</s>", "<unk>", "我@@", "们", "a@@", "b"]
    processor = MosesBPE("zh", False, False, False, [0, 1], pieces, ["b c</w>"])
    tokenizer = Tokenizer(processor, processor, "")
    for text, inside in (("我我我们", [False, False]), ("aaab", [False, True])):
        parts = split(text, tokenizer, 3)
        assert [part.inside for part in parts] == inside
        assert processor.decode([token for part in parts for token in part.source]) == text

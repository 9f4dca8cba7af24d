"""Scores compared with BLEU implemented from its formula, and with the output of Moses and sacreBLEU."""

import importlib.util
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation import bleu
from branchnorm_jax.evaluation.language import right_language

# Words, with and without hyphens, that no tokeniser splits.
WORDS = ("a", "b", "c", "Haus", "Tür")
COMPOUNDS = (*WORDS, "E-Mail", "a-b-c", "Nord-Süd-Achse", "x-")


def corpora(words):
    sentence = st.lists(st.sampled_from(words), min_size=0, max_size=9).map(" ".join)
    return st.lists(st.tuples(sentence, sentence), min_size=1, max_size=6).map(
        lambda pairs: tuple(zip(*pairs, strict=True))
    )


def reference_bleu(hypotheses, references, *, smooth):
    """BLEU = BP exp(1/4 sum_n log p_n) on whitespace tokens, one reference per line (Papineni et al., 2002).

    smooth: the k-th order without a match counts as 1/2^k matches (NIST); otherwise such a corpus scores 0.
    """
    matches, totals, hypothesis_length, reference_length = [0] * 4, [0] * 4, 0, 0
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        h, r = hypothesis.split(), reference.split()
        hypothesis_length += len(h)
        reference_length += len(r)
        for n in range(4):
            ngrams_h = Counter(tuple(h[i : i + n + 1]) for i in range(len(h) - n))
            ngrams_r = Counter(tuple(r[i : i + n + 1]) for i in range(len(r) - n))
            totals[n] += sum(ngrams_h.values())
            matches[n] += sum(min(count, ngrams_r[ngram]) for ngram, count in ngrams_h.items())
    if not matches[0] or not totals[3]:
        return 0.0
    orders_without = 0
    log_precision = 0.0
    for match, total in zip(matches, totals, strict=True):
        if not match and not smooth:
            return 0.0
        orders_without += not match
        log_precision += math.log((match or 0.5**orders_without) / total) / 4
    brevity = min(0.0, 1 - reference_length / hypothesis_length)
    return 100 * math.exp(brevity + log_precision)


def reference_split(line):
    """Splits compounds by scanning from left to right for (character, hyphen, character)."""
    out, i = "", 0
    while i < len(line):
        if line[i + 1 : i + 2] == "-" and len(line) > i + 2 and not line[i].isspace() and not line[i + 2].isspace():
            out += f"{line[i]} ##AT##-##AT## {line[i + 2]}"
            i += 3
        else:
            out += line[i]
            i += 1
    return out


def by_name(hypotheses, references, target_lang):
    return {score.name: score for score in bleu.scores(hypotheses, references, target_lang)}


@given(corpora(WORDS))
def test_bleu_and_multi_bleu_equal_the_formula(corpus):
    hypotheses, references = corpus
    result = by_name(hypotheses, references, "en")
    assert result["bleu"].score == pytest.approx(reference_bleu(hypotheses, references, smooth=True))
    assert result["multi_bleu"].score == pytest.approx(reference_bleu(hypotheses, references, smooth=False))


@given(corpora(COMPOUNDS))
def test_compound_split_bleu_equals_the_formula_on_split_tokens(corpus):
    hypotheses, references = corpus
    split = [[reference_split(line) for line in lines] for lines in corpus]
    result = by_name(hypotheses, references, "de")
    assert result["compound_split_bleu"].score == pytest.approx(reference_bleu(*split, smooth=False))


@given(st.text(alphabet="ab- \u00fc", max_size=20))
def test_compound_split_equals_the_reference(line):
    assert bleu.compound_split([line]) == [reference_split(line)]


def test_compound_split_of_known_words():
    assert bleu.compound_split(["E-Mail", "a-b-c", "ab-cd-ef", "- x -y"]) == [
        "E ##AT##-##AT## Mail",
        "a ##AT##-##AT## b-c",
        "ab ##AT##-##AT## cd ##AT##-##AT## ef",
        "- x -y",
    ]


def test_brevity_penalty_and_clipping_of_a_worked_example():
    # 6 of 7 words match ("the" twice), 3 of 6 pairs, 2 of 5, 1 of 4; the reference has 9 words.
    hypothesis, reference = "the cat sat on the red mat", "the cat sat on a mat near the door"
    precisions = [6 / 7, 3 / 6, 2 / 5, 1 / 4]
    expected = 100 * math.exp(1 - 9 / 7) * math.prod(precisions) ** 0.25
    assert by_name([hypothesis], [reference], "en")["multi_bleu"].score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("language", "line", "tokens"),
    [
        (
            "de",
            "Er sagte: „Hallo, Welt!“ Es kostet z.B. 3,50 €.",
            "Er sagte : „ Hallo , Welt ! “ Es kostet z.B. 3,50 € .",
        ),
        ("de", "Ein E-Mail-Programm & mehr", "Ein E-Mail-Programm & mehr"),
        ("en", "I don't know, it's Dr. Smith.", "I don 't know , it 's Dr. Smith ."),
        ("fr", "L'homme n'a pas d'argent...", "L' homme n' a pas d' argent ..."),
        ("pt-BR", "Sim, claro.", "Sim , claro ."),
        ("zh", "我爱你，3点。", "我 爱 你 ， 3 点 。"),
    ],
)
def test_tokens_of_each_language(language, line, tokens):
    assert bleu.tokenize([line], language) == [tokens]


@pytest.mark.parametrize("language", ["de", "de_AT", "en", "vi", "zh"])
def test_perfect_translations_score_100(language):
    lines = ["我们今天早上八点去学校。"] if language == "zh" else ["Das ist, z.B., ein E-Mail-Programm.", "Ja!"]
    result = by_name(lines, lines, language)
    expected = dict.fromkeys(result, 100) | {"ter": 0}
    assert {name: pytest.approx(score.score) for name, score in result.items()} == expected
    assert ("compound_split_bleu" in result) == language.startswith("de")


def test_scores_are_case_sensitive():
    result = by_name(["das haus ist sehr groß"], ["Das Haus ist sehr groß"], "de")
    assert all(score.score < 100 for name, score in result.items() if name != "ter")


@pytest.mark.parametrize(
    ("language", "name", "parts"),
    [
        ("de", "bleu", ["nrefs:1", "case:mixed", "tok:13a", "smooth:exp"]),
        ("de", "chrf", ["nrefs:1", "case:mixed", "nc:6", "nw:0"]),
        ("de", "ter", ["nrefs:1", "case:lc", "tok:tercom", "asian:no"]),
        ("zh", "ter", ["asian:yes"]),
        ("de", "multi_bleu", ["tok:moses-de-sacremoses-", "smooth:none"]),
        ("de", "compound_split_bleu", ["tok:moses-de-sacremoses-", "+compound-split", "smooth:none"]),
        ("zh", "bleu", ["tok:zh", "smooth:exp"]),
        ("zh", "multi_bleu", ["tok:zh", "smooth:none"]),
    ],
)
def test_signatures_list_the_settings(language, name, parts):
    signature = by_name(["a b c d"], ["a b c d"], language)[name].signature
    assert all(part in signature for part in [*parts, "version:"]), signature


@pytest.mark.parametrize(("language", "segmenter"), [("ja", "MeCab"), ("ko", "mecab_ko")])
def test_missing_segmenters_are_named(language, segmenter):
    if importlib.util.find_spec(segmenter):
        assert f"tok:{language}-mecab" in by_name(["x"], ["x"], language)["bleu"].signature
    else:
        with pytest.raises(UserError, match=rf"pip install 'sacrebleu\[{language}\]'"):
            bleu.sacrebleu_metric(language)


@given(corpora(COMPOUNDS))
@settings(max_examples=20)
def test_validation_uses_the_same_bleu(corpus):
    hypotheses, references = corpus
    every = by_name(hypotheses, references, "de")
    expected = {name: every[name].score for name in ("bleu", "chrf")}
    assert bleu.corpus_scores(hypotheses, references, "de") == expected


@pytest.mark.parametrize("function", [bleu.scores, bleu.corpus_scores])
def test_invalid_input_is_rejected(function):
    with pytest.raises(UserError, match="2 hypotheses against 1 references"):
        function(["a", "b"], ["a"], "de")
    with pytest.raises(UserError, match="empty"):
        function([], [], "de")


def test_right_language_is_the_share_in_the_target_language() -> None:
    lines = ["Ein Hund läuft durch den Schnee.", "A dog runs through the snow.", "Ein Mann liest ein Buch.", ""]
    (score,) = right_language("de", ["en", "de", "fr"])(lines, lines, lines)
    assert (score.name, score.score) == ("right_language", 50.0)
    assert score.signature.endswith("among:de,en,fr")
    (score,) = right_language("de", ["en", "tlh"])(lines, lines, lines)
    assert score.signature.endswith("among:de,en")
    assert right_language("tlh", ["en", "de"])(lines, lines, lines) == []

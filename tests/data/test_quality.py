"""Plants faults in clean text and expects exactly these to be found."""

import random
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data.quality import (
    FAULTS,
    Report,
    Seen,
    describe,
    faults,
    foreign,
    inspect,
    keys,
    overlap,
    scripts_of,
    usual,
)

SENTENCES = (
    "the old red house stands beside a quiet river and nobody knows who built it",
    "το παλιό κόκκινο σπίτι στέκεται δίπλα σε ένα ήσυχο ποτάμι και κανείς δεν ξέρει ποιος",
)
ENGLISH, GREEK = (sentence.split() for sentence in SENTENCES)


def sentences(count: int) -> list[tuple[str, str]]:
    """Returns different English-Greek pairs without faults."""
    rng = random.Random(0)
    lengths = [rng.randint(4, 12) for _ in range(count)]
    return [
        (f"{' '.join(rng.choices(ENGLISH, k=n))} {number}", f"{' '.join(rng.choices(GREEK, k=n))} {number}")
        for number, n in enumerate(lengths)
    ]


CLEAN = sentences(12_000)
EXPECTED = usual(CLEAN, ("en", "el"))
LONG = " ".join(["word"] * 300)
PLANTED = {
    "empty": [("", "κάτι"), ("something", "")],
    "copy": [("Ελλάδα και Γαλλία, Πέτρος", "Ελλάδα και Γαλλία, Πέτρος")] * 1,
    "duplicate": CLEAN[:40],
    "length": [
        ("yes", " ".join(GREEK * 2)),
        (" ".join(ENGLISH * 2), "ναι"),
        ("what a long day it was for all of us here", ""),
    ],
    "long": [(LONG, " ".join(["λέξη"] * 300))],
    "letters": [("1984", "1984.")],
    "script": [
        ("this is a sentence", "this stays English"),
        ("Ελλάδα και Γαλλία", "Ελλάδα και Ιταλία"),
        ("да, это так", "ναι, έτσι"),
    ],
    "entities": [
        ("Tom &amp; Jerry are here", "ο Τομ &amp; ο Τζέρι είναι"),
        ("a &#39;word&#39; again", "μια λέξη ξανά τώρα"),
    ],
    "tags": [
        ("press <b>enter</b> to go on", "πατήστε <b>enter</b> για συνέχεια"),
        ("the first line<br />", "η πρώτη γραμμή"),
        ("the old house", "το παλιό <a href=x>σπίτι</a>"),
    ],
    "characters": [("it\x92s a red house", "είναι ένα κόκκινο σπίτι"), ("the old house", "το παλι\ufffd σπίτι")],
}


def test_clean_text_has_no_faults() -> None:
    assert [found for _, found in inspect(CLEAN, EXPECTED) if found] == []
    for pair in (
        ("10² m²", "10² μ²"),
        ("x² = 5³", "χ² = 5³"),
        ("①②③ a", "①②③ α"),
        ("I <3 you and 2 < x > 1", "α < β > γ"),
        ("a\u200bword\tand more", "μία\u00adλέξη και άλλη"),
    ):
        assert faults(pair, EXPECTED) == []


def test_planted_faults_are_counted_exactly() -> None:
    planted = [(pair, name) for name, pairs in PLANTED.items() for pair in pairs]
    text = list(CLEAN)
    rng = random.Random(1)
    places = sorted(rng.sample(range(100, len(CLEAN)), len(planted)), reverse=True)
    for place, (pair, _) in zip(places, planted, strict=True):
        text.insert(place, pair)
    report = Report()
    for pair, found in inspect(text, EXPECTED):
        report.add(pair, found)
    assert report.pairs == len(text)
    expected = Counter(name for _, name in planted)
    # The third pair of "length" is empty, and the copy is Greek on both sides.
    expected.update({"empty": 1, "length": -1, "script": 1})
    assert {name: example["pairs"] for name, example in report.faults.items()} == expected
    for name, example in report.faults.items():
        source, target = text[example["line"] - 1]
        assert source.startswith(example["source"].removesuffix("...")), name
        assert target.startswith(example["target"].removesuffix("...")), name
        assert max(len(example["source"]), len(example["target"])) < 110


@given(st.lists(st.lists(st.integers(-9, 9), min_size=1)))
def test_numbers_seen_before_are_found(chunks: list[list[int]]) -> None:
    seen, before = Seen(), set[int]()
    for chunk in chunks:
        found = seen.add(np.array(chunk, np.int64)).tolist()
        for number, known in zip(chunk, found, strict=True):
            assert known == (number in before)
            before.add(number)
    assert sum(map(len, seen.runs)) == len(before)
    assert all(2 * len(short) < len(long) for long, short in zip(seen.runs, seen.runs[1:], strict=False))


def test_pairs_of_another_split_are_found() -> None:
    others = keys(CLEAN[0]) | keys(CLEAN[1])
    assert overlap(CLEAN[1], others) == ["held_out"]
    assert overlap((CLEAN[1][0], "κάτι άλλο"), others) == ["held_out_source"]
    assert overlap(("something else", CLEAN[1][1]), others) == []
    assert keys((CLEAN[0][0], "")) == set()  # Training leaves this pair out.


def test_sides_in_another_language_are_found() -> None:
    english, german, french = "We will not be there.", "Wir werden nicht dort sein.", "Nous n'y serons pas."
    assert foreign((english, german), ("en", "de")) == []
    assert foreign((english, french), ("en", "de")) == ["language=fr"]
    assert foreign((german, german), ("en", "de")) == ["language=de"]
    assert foreign((english, french), ("en", "unknown")) == []
    # Nothing says which language these are.
    assert foreign(("Tom, NATO", "10 km"), ("en-GB", "de_AT")) == []


def test_scripts_are_those_of_the_language() -> None:
    expected = {"de": ["LATIN"], "uk": ["CYRILLIC"], "bn": ["BENGALI"], "sr": ["CYRILLIC", "LATIN"]}
    assert {language: [name for script in scripts_of(language) for name in script] for language in expected} == expected
    assert scripts_of("sr_Latn")[0] == {"LATIN"}
    assert scripts_of("zh-TW") == [{"CJK"}, {"LATIN"}]
    assert scripts_of("ja") == [{"CJK", "HIRAGANA", "KATAKANA"}]
    assert scripts_of("deu_Latn")[0] == {"LATIN"}
    assert scripts_of("cr") == [{"CANADIAN"}]
    assert scripts_of("xyz") == []
    # Most of the Greek side is English.
    mixed = [*CLEAN[:10], *[(source, source) for source, _ in CLEAN[10:90]]]
    assert usual(mixed, ("en", "el")).scripts == EXPECTED.scripts == ({"LATIN"}, {"GREEK"})
    # Romanised Hindi is usual only if it is common.
    for target, scripts in (("नमस्ते dost", {"DEVANAGARI", "LATIN"}), ("नमस्ते", {"DEVANAGARI"})):
        assert usual([("hello", target)] * 9, ("en", "hi")).scripts[1] == scripts


def test_scripts_of_unknown_languages_are_those_of_the_text() -> None:
    japanese = [("This is a pen.", "これはペンです。"), ("It is a red car.", "赤い車です。NHK")] * 20
    assert usual(japanese).scripts == (frozenset({"LATIN"}), frozenset({"HIRAGANA", "CJK", "KATAKANA", "LATIN"}))
    assert usual([]).scripts == (frozenset(), frozenset())


def test_description_counts_pairs() -> None:
    assert describe("duplicate", 1600) == "1,600 pairs that occurred before"
    assert describe("empty", 1) == "1 pair with an empty side"
    assert {*PLANTED, "language", "held_out", "held_out_source"} == set(FAULTS)

"""Plants faults in clean text and expects exactly these to be found."""

import random
from collections import Counter

from branchnorm_jax.data.quality import FAULTS, SAMPLE, Report, describe, faults, inspect, usual

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


CLEAN = sentences(SAMPLE + 2000)
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
}


def test_clean_text_has_no_faults() -> None:
    assert [found for _, found in inspect(CLEAN) if found] == []
    expected = usual(CLEAN)
    for pair in (("10² m²", "10² μ²"), ("x² = 5³", "χ² = 5³"), ("①②③ a", "①②③ α")):
        assert faults(pair, expected) == []


def test_planted_faults_are_counted_exactly() -> None:
    planted = [(pair, name) for name, pairs in PLANTED.items() for pair in pairs]
    text = list(CLEAN)
    rng = random.Random(1)
    places = sorted(rng.sample(range(100, len(CLEAN)), len(planted)), reverse=True)
    for place, (pair, _) in zip(places, planted, strict=True):
        text.insert(place, pair)
    report = Report()
    assert list(report.watched(text)) == text
    assert report.pairs == len(text)
    expected = Counter(name for _, name in planted)
    # The third pair of "length" is empty, and the copy is Greek on both sides.
    expected.update({"empty": 1, "length": -1, "script": 1})
    assert {name: found["pairs"] for name, found in report.found.items()} == expected
    for name, found in report.found.items():
        assert text[found["line"] - 1] == (found["source"], found["target"]), name


def test_pairs_seen_elsewhere_are_duplicates() -> None:
    seen = {hash(CLEAN[5])}
    assert [found for _, found in inspect(CLEAN[:10], seen)] == [[]] * 5 + [["duplicate"]] + [[]] * 4
    assert len(seen) == 10


def test_usual_scripts_are_those_of_the_text() -> None:
    japanese = [("This is a pen.", "これはペンです。"), ("It is a red car.", "赤い車です。NHK")] * 20
    assert usual(japanese).scripts == (frozenset({"LATIN"}), frozenset({"HIRAGANA", "CJK", "KATAKANA", "LATIN"}))
    assert usual([]).scripts == (frozenset(), frozenset())


def test_description_names_the_faults_in_order() -> None:
    found = {"duplicate": {"pairs": 1600}, "copy": {"pairs": 450}}
    assert describe(found) == "450 pairs with equal sides, 1,600 that occurred before"
    assert describe({"empty": {"pairs": 1}, "held_out": {"pairs": 2}}) == (
        "1 pair with an empty side, 2 that are also in another split"
    )
    assert {*PLANTED, "held_out"} == set(FAULTS)

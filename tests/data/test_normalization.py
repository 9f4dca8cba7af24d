"""Compares the rules with Unicode's own definitions, and with text that must stay as it is."""

import itertools
import random
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data.normalization import changes, describe, normalizer
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.tokenizer import train_tokenizer
from branchnorm_jax.options import NORMALIZATIONS, DataConfig

MEANINGFUL = "10²m ½ № … ，？（） نمی\u200cخواهم « Oui\u00a0! »"
"""Characters that NFKC changes, a zero-width non-joiner, and a no-break space."""

LETTERS = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code))[0] == "L"]


@given(st.lists(st.sampled_from(LETTERS), max_size=8), st.booleans())
def test_nfc_is_that_of_unicode(letters: list[str], decomposed: bool) -> None:
    text = unicodedata.normalize("NFD" if decomposed else "NFC", " ".join(letters))
    assert normalizer("nfc").normalize(text) == unicodedata.normalize("NFC", text)


def test_nfc_composes_marks_in_any_order() -> None:
    for letter in "ếậǘṩ각":
        decomposed = unicodedata.normalize("NFD", letter)
        for marks in itertools.permutations(decomposed[1:]):
            text = decomposed[0] + "".join(marks)
            assert normalizer("nfc").normalize(text) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("rule", ["nfkc", "nmt_nfkc"])
def test_nfkc_is_that_of_unicode(rule: str) -> None:
    text = "ﬁ ½ ① ｶﾞ Å e\u0301 ﷺ"
    assert normalizer(rule).normalize(text) == unicodedata.normalize("NFKC", text)


def corpus(text: str) -> list[tuple[str, str]]:
    """Returns 50 pairs in which `text` comes after or before two random words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(40)]
    return [(f"{text} {' '.join(rng.choices(words, k=2))}", f"{rng.choice(words)} {text}") for _ in range(50)]


def test_the_same_text_makes_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    for name in "ab":
        normalizer.cache_clear()
        train_tokenizer(DataConfig(vocab_size=60), corpus("é"), tmp_path / name)
    first, second = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "ab")
    assert len(first) > 2 and first == second


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rule", NORMALIZATIONS)
def test_text_returns_as_its_rule_says(rule: str, shared: bool, tmp_path: Path) -> None:
    text = f"{MEANINGFUL}  e\u0301"
    config = DataConfig(vocab_size=70, shared_vocab=shared, target_normalization=rule)
    tokenizer = train_tokenizer(config, corpus(text), tmp_path / "v")
    (ids,) = tokenizer.encode_target([f"a {text}"])
    assert tokenizer.decode_target(ids) == f"a {normalizer(rule).normalize(text)}"
    expected = {
        "identity": text,
        "nfc": f"{MEANINGFUL} é",
        "nfkc": unicodedata.normalize("NFKC", f"{MEANINGFUL} é"),
        "nmt_nfkc": unicodedata.normalize("NFKC", f"{MEANINGFUL} é").replace("\u200c", " "),
    }
    assert normalizer(rule).normalize(text) == expected[rule]
    # The source keeps its own rule, also with the same pieces.
    assert tokenizer.spm[0].normalize("½").replace("▁", "") == "1⁄2"
    assert (tokenizer.source_pieces == tokenizer.target_pieces) == shared


def test_equal_rules_make_one_file(tmp_path: Path) -> None:
    config = DataConfig(vocab_size=20, target_normalization="nmt_nfkc")
    train_tokenizer(config, corpus("red"), tmp_path / "v")
    assert {path.name for path in (tmp_path / "v").iterdir()} == {"vocab.model", "vocab.vocab"}


def test_changed_characters_are_counted(tmp_path: Path) -> None:
    found = changes("nmt_nfkc", ["½ and ½", "a … b", "plain"])
    assert [(one.character, one.becomes, one.number, one.example) for one in found] == [
        ("½", "1⁄2", 2, "½ and ½"),
        ("…", "...", 1, "a … b"),
    ]
    assert changes("identity", [MEANINGFUL]) == []
    assert describe("source", "nmt_nfkc", found) == (
        "data.source_normalization=nmt_nfkc changes 3 characters: '½' to '1⁄2' (2), '…' to '...' (1); for example in "
        "'a … b'; data.source_normalization=nfc keeps them"
    )
    tab = "data.source_normalization=nmt_nfkc changes 1 character: '\\t' to ' ' (1); for example in 'a\\tb'"
    assert describe("source", "nmt_nfkc", changes("nmt_nfkc", ["a\tb"])) == tab
    both = describe("source", "nmt_nfkc", changes("nmt_nfkc", ["a\tb", "½"]))
    assert both.endswith("data.source_normalization=nfc keeps them, except '\\t'")


def test_changes_are_reported_when_a_vocabulary_is_trained(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        for language, index in (("en", 0), ("de", 1)):
            lines = "".join(f"{pair[index]}\n" for pair in corpus("a ½"))
            (tmp_path / f"{split}.{language}").write_text(lines, encoding="utf-8")
    said: list[str] = []
    config = DataConfig(source="text", path=str(tmp_path), source_lang="en", target_lang="de", vocab_size=20)
    prepare(config, tmp_path / "run", said.append)
    assert [line for line in said if line.startswith("data.")] == [
        "data.source_normalization=nmt_nfkc changes 50 characters: '½' to '1⁄2' (50); for example in "
        f"{corpus('a ½')[0][0]!r}; data.source_normalization=nfc keeps them"
    ]

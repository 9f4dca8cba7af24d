"""Matching of terms, and phrases in the translations of a trained model."""

import random
from pathlib import Path

import pytest

from branchnorm_jax.data.tokenizer import load_tokenizer
from branchnorm_jax.decoding.glossary import encode_phrase, make_glossary, read_glossary, word_starts
from branchnorm_jax.errors import UserError
from tests.conftest import run_main

TERMS = """\
bank\tBank
river bank\tUfer

Polish\tpolnisch
polish\tpolieren
C++\tC++
山田 太郎\tTaro Yamada
北京\tPeking
New  York\tNeu-York
caf\u00e9\tKaffeehaus
कल\tgestern
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("The bank, the BANK.", ["Bank"]),
        ("a river bank and a bank", ["Ufer", "Bank"]),
        ("banks and embankment", []),
        ("Polish the Polish table, polish it", ["polnisch", "polieren"]),
        ("POLISH", ["polieren"]),
        ("in C++, not in C+", ["C++"]),
        ("我在北京住", ["Peking"]),
        ("山田\u3000太郎です。", ["Taro Yamada"]),
        ("new york", []),
        ("New\u00a0York", ["Neu-York"]),
        ("the cafe\u0301", ["Kaffeehaus"]),
        ("", []),
        ("यह कला है", []),
        ("कल", ["gestern"]),
    ],
)
def test_terms_match_whole_words(tmp_path: Path, line: str, expected: list[str]) -> None:
    (tmp_path / "terms.tsv").write_text(TERMS, encoding="utf-8")
    assert read_glossary(tmp_path / "terms.tsv").translations(line) == expected


def test_the_longest_of_random_terms_is_taken() -> None:
    """Compared with a search that tries every term at every word."""
    rng = random.Random(0)
    for _ in range(200):
        terms = {" ".join(rng.choices(["a", "b", "B"], k=rng.randint(1, 4))) for _ in range(6)}
        text = rng.choices(["a", "b", "A", "B", "c"], k=30)
        expected, place = [], 0
        while place < len(text):
            fitting = [
                (len(words), term != term.lower(), term)
                for term in terms
                for words in [term.split()]
                for given in [text[place : place + len(words)]]
                if given == words or (term == term.lower() and [word.lower() for word in given] == words)
            ]
            size, _, term = max(fitting, default=(1, False, ""))
            expected += [term] * bool(term)
            place += size
        glossary = make_glossary({term: (term, term) for term in terms}, "")
        assert glossary.translations(" ".join(text)) == list(dict.fromkeys(expected))


def test_terms_of_a_request_replace_those_of_the_server() -> None:
    base = make_glossary({"1": ("bank", "Bank"), "2": ("river bank", "Ufer"), "3": ("Polish", "polnisch")}, "")
    both = make_glossary({"1": ("bank", "Geldhaus"), "2": ("polish", "polieren")}, "").over(base)
    assert both.translations("bank, river bank, Polish polish") == ["Geldhaus", "Ufer", "polnisch", "polieren"]
    assert set(both.all_translations) == {"Bank", "Ufer", "polnisch", "Geldhaus", "polieren"}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"one\ttwo\tthree\n", "line 1: expected term<TAB>translation"),
        (b"one\ttwo\n\none\n", "line 3: expected term<TAB>translation"),
        (b"one\t \n", "line 1: expected"),
        (b"one\ta\nOne\tb\none\tc\n", "line 3: 'one' already has the translation 'a'"),
        (b"\xff\n", "line 1: not valid UTF-8"),
        (None, "No such file"),
    ],
)
def test_faulty_glossaries_are_one_line(tmp_path: Path, content: bytes | None, fault: str) -> None:
    if content is not None:
        (tmp_path / "terms.tsv").write_bytes(content)
    with pytest.raises(UserError, match=fault):
        read_glossary(tmp_path / "terms.tsv")


def test_word_starts_are_spaces_punctuation_and_scripts_without_spaces() -> None:
    pieces = ["<pad>", "\u2581Haus", "boot", "\u2581", ",", "7", "京", "é", "ส", "'s", "ी", "<0xC3>"]
    assert word_starts(pieces) == (True, True, False, True, True, False, True, False, True, True, False, False)
    assert all(word_starts(pieces, codes=True))


@pytest.mark.slow
def test_phrases_are_in_the_translations(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "terms.tsv").write_text("Two\tdrei\ntwo hundred\tsieben tausend\n", encoding="utf-8")
    source = ["two hundred", "eleven", "", "ninety\tzwei\tneun Uhr"]
    done = run_main(
        f"--workdir={trained}", "--mode=translate", f"--config.decode.glossary={tmp_path / 'terms.tsv'}",
        "--config.decode.constraints=True", "--config.decode.nbest=2", stdin="\n".join(source) + "\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [line.split(" ||| ") for line in done.stdout.splitlines()]
    assert [int(index) for index, *_ in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    spaced = [f" {text} ".replace(",", " ,").replace(".", " .") for _, text, _ in found]
    assert all(" sieben tausend " in text for text in spaced[:2])
    assert all(" zwei " in text and " neun Uhr " in text for text in spaced[6:])
    # Lines without a phrase are translated as without any option.
    plain = run_main(f"--workdir={trained}", "--mode=translate", "--config.decode.nbest=2", stdin="eleven\n")
    assert [fields[1:] for fields in found[2:4]] == [line.split(" ||| ")[1:] for line in plain.stdout.splitlines()]


def test_phrases_that_the_vocabulary_cannot_write_are_refused_with_their_line(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(trained / "vocabulary")
    with pytest.raises(UserError, match="cannot write '北京'"):
        encode_phrase(tokenizer, "北京", ())
    ids = encode_phrase(tokenizer, "zwei", ())
    assert tokenizer.decode_target(ids) == "zwei"
    with pytest.raises(UserError, match="cannot write 'zwei'"):
        encode_phrase(tokenizer, "zwei", ids[-1:])
    (tmp_path / "terms.tsv").write_text("two\t北京\n", encoding="utf-8")
    done = run_main(f"--workdir={trained}", "--mode=translate", f"--config.decode.glossary={tmp_path / 'terms.tsv'}")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .endswith("the model cannot write '北京': its vocabulary lacks pieces of it; use other words")
    )
    done = run_main(
        f"--workdir={trained}", "--mode=translate", "--config.decode.constraints=True", stdin="one\teins\ntwo\t北京\n"
    )
    assert done.returncode == 2
    assert "stdin, line 2: the model cannot write '北京'" in done.stderr

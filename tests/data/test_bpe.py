"""Text that is split by codes, against the tokenizer of `transformers` for models of fairseq."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data.bpe import MosesBPE, load, merged
from branchnorm_jax.errors import UserError
from branchnorm_jax.importing import bart, codes
from branchnorm_jax.importing.imported import Side
from tests.importing import examples

LINES = [
    "the small dog sees a big house .",
    "She said: \"The dog's house -- a big-house -- isn't old...\"",
    "R&D <b>x</b> a|b [1] {2} 3,000.50 €20% 10:30 http://a.de/b?c=d&e=f me@x.org",
    "Dr. Smith met Mr. J. R. at 5 p.m. in St. Paul. Then he left.",
    "die größte Straße, naïve Œuvre Ωmega Пример",
    "漢字 und かな、ohne Zwischenraum。",
    "a\tb \u00a0 c\u2003d\u2028e\u200bf\x07g",
    "@-@ @@ a@@ </w> x</w> -- - a-b-c a - b -a b-",
    "l'été d'un garçon qu'il n'a 'quoted' ''twice'' “curly” „tief“ ’",
    "",
    "   ",
    "madeupword0000 aaaaaaaaaaaaaaaaaaaa",
]


def listed(folder: Path, kind: str, lang: str) -> tuple[Side, dict[str, int]]:
    """Writes codes and a dictionary; returns our vocabulary and fairseq's ids."""
    pieces = examples.write_codes(folder, {lang: " ".join(examples.SENTENCES.values())}, kind)[lang]
    (folder / f"dict.{lang}.txt").write_text("".join(f"{piece} 9\n" for piece in pieces), encoding="utf-8")
    ids = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
    return codes.make_side(folder / "bpecodes", lang, ids, bart.SPECIAL, {"<s>"}), ids


@pytest.mark.parametrize("kind", ["subword-nmt", "fastBPE"])
@pytest.mark.parametrize("lang", ["en", "de", "fr", "zh"])
def test_pieces_and_texts_equal_those_of_transformers(lang: str, kind: str, tmp_path: Path) -> None:
    side, ids = listed(tmp_path, kind, lang)
    ours, theirs = load(side.model, tmp_path), examples.fsmt_tokenizer(tmp_path, lang)
    for line, found in zip(LINES, ours.encode(LINES), strict=True):
        assert [side.ids[token] for token in found] == theirs(line).input_ids, line
    drawn = np.random.default_rng(0).integers(4, len(ids), (100, 15))
    for row in drawn.tolist():
        text = ours.decode([side.ids.index(token) for token in row])
        assert text == theirs.convert_tokens_to_string([theirs.decoder[token] for token in row])
        assert len(text.splitlines()) == 1


def test_what_is_not_part_of_a_text(tmp_path: Path) -> None:
    side, _ = listed(tmp_path, "fastBPE", "en")
    ours = load(side.model, tmp_path)
    ids = [ours.piece_to_id(piece) for piece in ("<pad>", "<s>", "t@@", "<unk>", "the", "</s>", "s@@")]
    assert ours.decode(ids) == "t<unk> the s"
    assert ours.encode(["qqq"]) == [[2, 2, 2, 1]]
    assert ours.id_to_piece([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]
    assert len(ours.id_to_piece([*range(ours.get_piece_size())])) == len(side.pieces)


def test_older_codes_equal_the_example_of_their_paper() -> None:
    """Section 3.2 of Sennrich et al. (2016): lower, which is not in the text, becomes low er."""
    merges = ["r </w>", "l o", "lo w", "e r</w>"]
    pieces = ["<pad>", "</s>", "<unk>", "low", "low@@", "er", "e@@", "r@@", "e", "w@@"]
    ours = MosesBPE("en", False, False, True, [0, 1], pieces, merges)
    assert [ours.id_to_piece(ids[:-1]) for ids in ours.encode(["lower low lowe rr", "r"])] == [
        ["low@@", "er", "low", "low@@", "e", "r@@", "<unk>"],
        ["<unk>"],
    ]


def passes(symbols: list[str], ranks: dict[tuple[str, ...], int]) -> list[str]:
    """Merges as in the paper: the best pair wherever it is, then again."""
    while pairs := ranks.keys() & {*itertools.pairwise(symbols)}:
        best, after = min(pairs, key=ranks.__getitem__), []
        while symbols:
            size = 2 if tuple(symbols[:2]) == best else 1
            after.append("".join(symbols[:size]))
            symbols = symbols[size:]
        symbols = after
    return symbols


@given(st.text("ab", max_size=14), st.lists(st.tuples(*[st.text("ab", min_size=1, max_size=3)] * 2), max_size=12))
def test_merges_equal_repeated_passes(word: str, pairs: list[tuple[str, str]]) -> None:
    ranks: dict[tuple[str, ...], int] = {pair: rank for rank, pair in enumerate(pairs)}
    assert merged([*word], ranks) == passes([*word], ranks)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["@-@"], ["a", "@-@", "b", "'@@", "s"]),
        (["&apos;s"], ["a@@", "-@@", "b", "&apos;s"]),
        (["&quot;", "@-@"], ["a", "@-@", "b", "<unk>"]),
        (["##AT##-##AT##"], ["a", "##AT##-##AT##", "b", "'@@", "s"]),
    ],
    ids=["hyphens", "escapes", "both", "hyphens of WMT'16"],
)
def test_the_dictionary_shows_what_moses_did(more: list[str], expected: list[str], tmp_path: Path) -> None:
    merges = ["# #", "## A", "##A T", "##AT ##", "##AT## -", "##AT##- ##AT", "##AT##-##AT #", "##AT##-##AT# #</w>"]
    merges += ["@ -", "@- @</w>", "& a", "p o", "&a po", "&apo s", "&apos ;", "&apos; s</w>", "a b</w>"]
    (tmp_path / "codes").write_text("\n".join(["#version: 0.2", *merges, ""]))
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "s", "ab", "a@@", "-@@", "'@@", *more]
    ids = {piece: index for index, piece in enumerate(pieces)}
    ours = load(codes.make_side(tmp_path / "codes", "en", ids, bart.SPECIAL, {"<s>"}).model, tmp_path)
    assert ours.id_to_piece(ours.encode(["a-b's"])[0][:-1]) == expected
    if "<unk>" not in expected:
        assert ours.decode(ours.encode(["a-b's"])[0]) == "a-b's"


def test_damaged_vocabularies_are_one_line(tmp_path: Path) -> None:
    for content in (b"{", b"{}", b'{"language": "en"}'):
        with pytest.raises(UserError, match=r"not the vocabulary of an imported model .*; import the model again"):
            load(content, tmp_path / "source.model")

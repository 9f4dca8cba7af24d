"""Files of both sides: TSV, JSON lines and TMX give the same pairs as two text files, or one line that says why not."""

import dataclasses
import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data.corpus import Pair, corpus_key, read_pairs
from branchnorm_jax.data.formats import NoHeaderWarning, UnpairedWarning, format_of, pairs_in
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig
from tests.data.test_corpus import COMPRESS

PAIRS = [("a cat", "eine Katze"), ("", "leer"), ("2 < 3 & \"x\" 'y'", "grün\u2028x \x85"), ("ab\u00a0c", "😀")]


def tsv(pairs: list[Pair], languages: Pair) -> str:
    return "".join("\t".join(fields) + "\n" for fields in [languages, *pairs])


def jsonl(pairs: list[Pair], languages: Pair) -> str:
    return "".join(json.dumps(dict(zip(languages, pair, strict=True))) + "\n" for pair in pairs)


def nested(pairs: list[Pair], languages: Pair) -> str:
    units = [json.loads(line) for line in jsonl(pairs, languages).splitlines()]
    return "".join(json.dumps({"id": "x", "translation": unit}, ensure_ascii=False) + "\n" for unit in units)


def tmx(pairs: list[Pair], languages: Pair) -> str:
    """Writes TMX with another XML library than the one that reads it."""
    root = ElementTree.Element("tmx", version="1.4")
    ElementTree.SubElement(root, "header", srclang=languages[0])
    body = ElementTree.SubElement(root, "body")
    for pair in pairs:
        unit = ElementTree.SubElement(body, "tu")
        for language, text in zip(languages, pair, strict=True):
            variant = ElementTree.SubElement(unit, "tuv", {"xml:lang": language})
            ElementTree.SubElement(variant, "seg").text = text
    return ElementTree.tostring(root, encoding="unicode")


WRITERS: dict[str, tuple[str, Callable[[list[Pair], Pair], str]]] = {
    "tsv": (".tsv", tsv),
    "jsonl": (".jsonl", jsonl),
    "nested": (".jsonl", nested),
    "tmx": (".tmx", tmx),
}


def config_of(folder: Path, files: str, **options: Any) -> DataConfig:
    return DataConfig(source="text", path=str(folder), files=files, **options)


def error_of(path: Path, content: str | bytes, languages: Pair = ("en", "de")) -> str:
    """Returns the message about a file, without its path."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as caught:
        list(pairs_in(path, languages))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", WRITERS)
def test_pairs_are_read_in_both_directions(tmp_path: Path, name: str, suffix: str) -> None:
    ending, writer = WRITERS[name]
    for split, pairs in (("train", PAIRS * 2), ("valid", PAIRS)):
        text = writer(pairs, ("en", "de")).encode()
        (tmp_path / f"{split}{ending}{suffix}").write_bytes(COMPRESS[suffix](text))
    stripped = [(source.strip(), target.strip()) for source, target in PAIRS]
    for files in (f"{{split}}{ending}", f"*{{split}}{ending}{suffix}"):
        config = config_of(tmp_path, files)
        assert list(read_pairs(config, "train")) == stripped * 2
        swapped = dataclasses.replace(config, source_lang="de", target_lang="en")
        assert list(read_pairs(swapped, "valid")) == [pair[::-1] for pair in stripped]


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff"))


@given(pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5), name=st.sampled_from(sorted(WRITERS)))
def test_any_text_is_read_back(tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair], name: str) -> None:
    ending, writer = WRITERS[name]
    path = tmp_path_factory.getbasetemp() / f"any{ending}"
    path.write_text(writer(pairs, ("en", "de")), encoding="utf-8", newline="")
    assert list(pairs_in(path, ("en", "de"))) == [(a.strip(), b.strip()) for a, b in pairs]


@pytest.mark.parametrize("name", WRITERS)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    ending, writer = WRITERS[name]
    path = tmp_path / f"large{ending}"
    path.write_text(writer([(f"one {i}" * 150, f"eins {i}" * 150) for i in range(7000)], ("en", "de")))
    assert path.stat().st_size > 16e6
    tracemalloc.start()
    try:
        assert sum(1 for _ in pairs_in(path, ("en", "de"))) == 7000
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


def test_several_files_and_the_pair_in_names(tmp_path: Path) -> None:
    for name, text in (("b", "one"), ("a", "two"), ("c", "three")):
        (tmp_path / f"{name}-train.de-en.tsv").write_text(f"{text.upper()}.\t{text}.\n")
    config = config_of(tmp_path, "*-{split}.{pair}.tsv")
    assert list(read_pairs(config, "train")) == [("two.", "TWO."), ("one.", "ONE."), ("three.", "THREE.")]
    key = corpus_key(config, "train")
    assert len(key["files"]) == 3
    (tmp_path / "a-train.de-en.tsv").write_text("FOUR\tfour\n")
    assert corpus_key(config, "train") != key
    message = "no file matches *-valid.en-de.tsv (or with .gz, .zst, .xz, .bz2)"
    with pytest.raises(UserError) as caught:
        list(read_pairs(config, "valid"))
    assert message in str(caught.value)


def test_a_file_of_many_languages_serves_every_pair(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("de\tnote\tfr\ten-GB\neins\tx\tun\tone\nzwei\t\t\ttwo\n")
    config = config_of(tmp_path, "{split}.tsv", pairs="en+de+fr")
    pairs = {each.pair: list(read_pairs(each, "train")) for each in config.directions()}
    assert pairs["en-fr"] == [("one", "un"), ("two", "")]
    assert pairs["fr-de"] == [("un", "eins"), ("", "zwei")]
    assert len(pairs) == 6


def test_a_blank_line_of_json_lines_is_no_unit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"en": "a", "de": "b"}\r\n\r\n \n{"en": "c", "de": "d"}\n\n')
    assert list(pairs_in(path, ("en", "de"))) == [("a", "b"), ("c", "d")]
    assert "none of 2 units has both en and fr" in error_of(path, path.read_text(), ("en", "fr"))


def test_two_languages_never_select_the_same_text(tmp_path: Path) -> None:
    """In any order of the codes: pt is the one that pt_BR does not name."""
    (tmp_path / "train.jsonl").write_text(
        '{"pt-BR": "ônibus", "pt-PT": "autocarro"}\n{"pt-PT": "comboio", "pt-BR": "trem"}\n{"pt-BR": "sim"}\n'
    )
    config = config_of(tmp_path, "{split}.jsonl", source_lang="pt_BR", target_lang="pt")
    with pytest.warns(UserWarning, match="1 of 3 units lack"):
        assert list(read_pairs(config, "train")) == [("ônibus", "autocarro"), ("trem", "comboio")]
    reverse = config_of(tmp_path, "{split}.jsonl", source_lang="pt", target_lang="pt_BR")
    with pytest.warns(UserWarning, match="1 of 3 units lack"):
        assert list(read_pairs(reverse, "train")) == [("autocarro", "ônibus"), ("comboio", "trem")]


@pytest.mark.parametrize(
    ("name", "columns"),
    [("train.en-de.tsv", ["en", "de"]), ("de-en.en-de.tsv", ["en", "de"]), ("en-de/train_de-en.tsv", ["de", "en"])],
)
def test_the_path_tells_the_order_of_columns_without_a_first_line(
    tmp_path: Path, name: str, columns: list[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("One.\tTwo.\n\t\n\n")
    first = dict(zip(columns, ("One.", "Two."), strict=True))
    assert list(pairs_in(path, ("en", "de"))) == [(first["en"], first["de"]), ("", ""), ("", "")]
    assert next(pairs_in(path, ("de", "en"))) == (first["de"], first["en"])


@pytest.mark.parametrize(
    "header",
    [
        "English\tGerman\tNotes",
        " en \tde\tnotes",
        "EN-gb\tgerman\tnotes",
        'eng\t"Deutsch"\tx',
        "eng_Latn\tdeu_Latn\tid",
    ],
)
def test_the_first_line_may_name_languages_in_english(tmp_path: Path, header: str) -> None:
    path = tmp_path / "train.de-en.tsv"
    path.write_text(f"{header}\none\teins\t\nEnglish\tEnglisch\t\n")
    assert list(pairs_in(path, ("en", "de"))) == [("one", "eins"), ("English", "Englisch")]


@pytest.mark.parametrize(
    ("languages", "header"),
    [
        (("eng", "deu"), "en\tde"),
        (("en", "tl"), "English\tTagalog"),
        (("en", "tl"), "English\tFilipino"),
        (("en", "sh"), "English\tSerbo-Croatian"),
        (("en", "no"), "English\tNorwegian"),
        (("en", "nb"), "English\tnorsk bokmål"),
        (("pt", "pt_BR"), "pt-PT\tpt-BR"),
        (("gaa", "ga"), "gaa\tga"),
        (("en", "en_GB"), "en\ten-GB"),
    ],
)
def test_the_first_line_may_name_any_language(tmp_path: Path, languages: tuple[str, str], header: str) -> None:
    path = tmp_path / f"train.{'-'.join(languages)}.tsv"
    path.write_text(f"{header}\none\teins\n")
    assert list(pairs_in(path, languages)) == [("one", "eins")]


@pytest.mark.parametrize(
    ("languages", "header"),
    [
        (("en", "id"), "id\tEnglish\tIndonesian"),
        (("en", "id"), "id\teng\tind"),
        (("en", "no"), "No\tEnglish\tNorwegian"),
        (("en", "de"), "en\tEnglish\tGerman"),
        (("en", "de"), "en\tde\tGerman"),
        (("en", "id"), "id\ten\tIndonesian"),
        (("en", "de"), "en-GB\tEnglish\tGerman"),
        (("en", "de"), "en_id\tde_id\tEnglish\tGerman"),
    ],
)
def test_a_code_and_a_name_of_one_language_are_ambiguous(
    tmp_path: Path, languages: tuple[str, str], header: str
) -> None:
    """The column "id" has the numbers of the lines."""
    path = tmp_path / f"train.{'-'.join(languages)}.tsv"
    path.write_text(f"{header}\n1\tone\tsatu\n")
    with pytest.raises(UserError, match=r"line 1: two columns are of \w\w: .* and .*; rename the unused one"):
        list(pairs_in(path, languages))


@pytest.mark.parametrize(
    ("languages", "header"), [(("en", "pt_BR"), "en\tpt-PT"), (("en", "sr_Latn"), "eng_Latn\tsrp_Cyrl")]
)
def test_other_scripts_and_regions_are_not_the_language(
    tmp_path: Path, languages: tuple[str, str], header: str
) -> None:
    (tmp_path / "train.tsv").write_text(f"{header}\none\tum\n")
    with pytest.raises(UserError, match="which column is which language is unknown"):
        list(pairs_in(tmp_path / "train.tsv", languages))


@pytest.mark.parametrize("header", ["source\ttarget", "Englisch\tDeutsch"])
def test_names_that_are_read_as_sentences_are_reported(tmp_path: Path, header: str) -> None:
    path = tmp_path / "train.en-de.tsv"
    path.write_text(f"{header}\none\teins\n")
    with pytest.warns(NoHeaderWarning, match=f"line 1: {re.escape(repr(header))} is read as a pair of sentences"):
        assert list(pairs_in(path, ("en", "de"))) == [tuple(header.split("\t")), ("one", "eins")]


# From the TMX 1.4b specification: inline elements, other attributes of languages, and units without a language.
EXAMPLE = """<?xml version="1.0"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4">
 <header srclang="EN" o-tmf="x"><note>Not text</note><prop type="p">no</prop></header>
 <body>
  <tu tuid="1"><note>one</note>
   <tuv xml:lang="EN-US"><prop type="x">skip</prop><seg>The <bpt i="1">&lt;b></bpt>big<ept i="1">&lt;/b></ept> <hi>black
      <hi type="t">cat</hi></hi><ph>x<sub>inner</sub></ph>.</seg></tuv>
   <tuv xml:lang="de-DE"><seg>Die <![CDATA[große & schwarze]]> Katze&#46;</seg></tuv>
   <tuv xml:lang="de-AT"><seg>second</seg></tuv>
  </tu>
  <tu><tuv lang="en"><seg>only English</seg></tuv><tuv xml:lang="fr"><seg>x</seg></tuv></tu>
  <tu><tuv xml:lang="en"><seg/></tuv><tuv xml:lang="de"><seg>leer</seg></tuv></tu>
 </body>
</tmx>
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tmx_segments_are_read_without_formatting_codes(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "example.tmx"
    path.write_bytes(EXAMPLE.encode(encoding))
    with pytest.warns(UnpairedWarning, match=r"example\.tmx: 1 of 3 units lack en or de and are left out$"):
        assert list(pairs_in(path, ("en", "de"))) == [
            ("The big black cat.", "Die große & schwarze Katze."),
            ("", "leer"),
        ]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.tsv", "one\teins\n", [", line 1 ('one\\teins'): which column is which", "en<TAB>de", "{split}.{pair}.tsv"]),
        ("a.tsv", "en\tde\none\teins\ntwo\n", [", line 3: 1 columns instead of 2", "en and de"]),
        (
            "a.tsv",
            "en\tde\tde\none\teins\tuno\n",
            [", line 1: two columns are of de: de and de; rename the unused one"],
        ),
        ("a.en-de.tsv", "One.\tEins.\nx\ty\tz\n", [", line 2: 3 columns instead of 2", "names all columns allows"]),
        ("a.tsv", b"en\tde\n\xff\tx\n", [", line 2: not valid UTF-8"]),
        ("a.jsonl", '{"en": "a"}\n{"en": \n', [', line 2: not an object such as {"en": "...", "de": "..."}']),
        ("a.jsonl", "[1]\n", [", line 1: not an object such as"]),
        ("a.jsonl", '{"translation": "x"}\n', [", line 1: not an object such as"]),
        ("a.jsonl", '{"en": "\\ud800", "de": "b"}\n', [", line 1: not an object such as", "surrogates"]),
        ("a.jsonl", '{"x": "a", "tgt": "b"}\n', [": none of 1 units has both en and de", "x, tgt", "data.source_lang"]),
        ("a.jsonl", '{"en": "a", "en": "b", "de": "c"}', [", line 1: not an object", "two fields are called 'en'"]),
        (
            "a.jsonl",
            '{"en": "a", "de": "b"}\n{"en": 5, "de": "b", "x": 5}',
            [", line 2: not an obj", "en is not a text"],
        ),
        ("a.jsonl", '{"en": "a", "de": "b"}\n{"translation": []}', [", line 2: not an object"]),
        ("a.tmx", tmx([("a", "b")], ("en", "fr")), [": none of 1 units has both en and de", "en, fr"]),
        ("a.tmx", EXAMPLE.replace("</hi></hi>", "</hi>"), [", line 8: not well-formed XML (mismatched tag)"]),
        ("a.tmx", EXAMPLE[:700], [", line 13: not well-formed XML"]),
        ("a.tmx", "", [", line 1: not well-formed XML (no element found)"]),
        ("a.tmx", '<?xml version="1.0" encoding="x-y"?><tmx/>', [": its encoding cannot be read", "x-y", "UTF-8"]),
        ("a.tmx", '<?xml version="1.0" encoding="shift_jis"?><tmx/>', [": its encoding cannot be read", "multi-byte"]),
        ("a.tmx", "<html></html>", [": not TMX, but XML that begins with <html>"]),
        ("a.tmx", EXAMPLE.replace("&#46;", "&nbsp;"), [", line 9: uses the unknown entity 'nbsp'"]),
        (
            "a.tmx",
            EXAMPLE.replace('SYSTEM "tmx14.dtd"', '[<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]'),
            [", line 2: declares the entity 'a'"],
        ),
        (
            "a.tmx",
            EXAMPLE.replace('SYSTEM "tmx14.dtd"', '[<!ENTITY a SYSTEM "file:///etc/hostname">]'),
            [", line 2: declares the entity 'a'"],
        ),
    ],
)
def test_errors_are_one_line(tmp_path: Path, name: str, content: str | bytes, parts: list[str]) -> None:
    message = error_of(tmp_path / name, content)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", WRITERS)
def test_truncated_and_empty_files_are_reported(tmp_path: Path, name: str) -> None:
    ending, writer = WRITERS[name]
    content = gzip.compress(writer([(f"{i} {i * i}", f"{i**3}") for i in range(3000)], ("en", "de")).encode())
    assert ": cannot be read" in error_of(tmp_path / f"a{ending}.gz", content[: len(content) // 2])
    (tmp_path / f"train{ending}").write_text(writer([], ("en", "de")))
    with pytest.raises(UserError, match="the corpus is empty"):
        list(read_pairs(config_of(tmp_path, f"{{split}}{ending}"), "train"))


def test_names_select_formats() -> None:
    for name, expected in (
        *(("{split}.tsv", ".tsv"), ("a/*{split}.tmx.gz", ".tmx"), ("x.jsonl.zst", ".jsonl"), ("{split}.txt", "")),
        *(("tsv", ""), ("a.tsv.txt", ""), ("a.gz", "")),
    ):
        assert format_of(name) == expected

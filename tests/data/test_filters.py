"""Filters of OpusFilter, compared with OpusFilter's own pipeline; they need the extra [clean]."""

from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax.data.filters import load_filters, rejections
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig

pipeline = pytest.importorskip("opusfilter.pipeline", reason="needs the extra [clean]")

DATA = DataConfig(source_lang="en", target_lang="de")
PAIRS = [
    ("The old house stands beside the river.", "Das alte Haus steht neben dem Fluss."),
    ("The old house stands beside the river.", "Fluss."),
    ("Nobody knows who built it.", "Nobody knows who built it, he said."),
    ("There are 77 of them now.", "Es gibt 13 von ihnen."),
    ("Nobody knows.", f"Niemand {'sehr' * 20}lang weiß es genau."),
    ("", ""),
]
FILTERS = """
- LengthRatioFilter: {threshold: 3, unit: word}
- LongWordFilter:
- NonZeroNumeralsFilter: {threshold: 0.5}
- LengthRatioFilter: {threshold: 1.2, unit: char, name: strict}
"""


def test_pairs_are_rejected_as_by_opusfilter(tmp_path: Path) -> None:
    (tmp_path / "filters.yaml").write_text(FILTERS, encoding="utf-8")
    found = rejections(load_filters(str(tmp_path / "filters.yaml"), DATA), PAIRS)
    assert found == [
        *("", "LengthRatioFilter", "LengthRatioFilter.strict", "NonZeroNumeralsFilter", "LongWordFilter", ""),
    ]
    options: list[dict[str, Any]] = [
        {"threshold": 3, "unit": "word"},
        {},
        {"threshold": 0.5},
        {"threshold": 1.2, "unit": "char"},
    ]
    kinds = "LengthRatioFilter", "LongWordFilter", "NonZeroNumeralsFilter", "LengthRatioFilter"
    theirs = pipeline.FilterPipeline.from_config([{kind: one} for kind, one in zip(kinds, options, strict=True)])
    assert list(theirs.filter(PAIRS)) == [pair for pair, name in zip(PAIRS, found, strict=True) if not name]


def test_configurations_of_opusfilter_and_custom_filters_are_read(tmp_path: Path) -> None:
    step = "  - {type: filter, parameters: {inputs: [a, b], outputs: [c, d], filters: [%s]}}\n"
    one, other = "LengthFilter: {unit: word, max_length: 6}", "LengthRatioFilter: {}, module: opusfilter.filters"
    text = "common: {output_directory: work}\nsteps:\n  - {type: concatenate, parameters: {}}\n"
    (tmp_path / "opus.yaml").write_text(text + step % f"{{{one}}}" + step % f"{{{other}}}")
    filters = load_filters(str(tmp_path / "opus.yaml"), DATA)
    assert [each.name for each in filters] == ["LengthFilter", "LengthRatioFilter"]
    assert rejections(filters, PAIRS)[:2] == ["LengthFilter", "LengthFilter"]


def test_languages_of_the_run_are_inserted(tmp_path: Path) -> None:
    text = '- LinguaFilter: {languages: ["{source_lang}", "{target_lang}"], langid_languages: [de, en]}'
    (tmp_path / "filters.yaml").write_text(text, encoding="utf-8")
    filters = load_filters(str(tmp_path / "filters.yaml"), DATA)
    assert rejections(filters, PAIRS) == [*("", "", "LinguaFilter"), *("", "", "")]
    reverse = load_filters(str(tmp_path / "filters.yaml"), DataConfig(source_lang="de", target_lang="en"))
    assert rejections(reverse, PAIRS[:1]) == ["LinguaFilter"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no list of filters"),
        ("- [", "not OpusFilter's YAML"),
        ("steps: [{type: filter}]", "not OpusFilter's YAML"),
        (
            "steps: [{type: filter, parameters: {filters: [{LengthFilter: {}}], filterfalse: true}}]",
            "a step has filterfalse, which keeps the rejected pairs",
        ),
        ("- LengthsFilter: {}", "filter 1, LengthsFilter: 'Class LengthsFilter not found"),
        (
            "- LengthFilter: {}\n- LengthRatioFilter: {treshold: 3}",
            "filter 2, LengthRatioFilter: has no parameter",
        ),
        ("- LengthFilter: {unit: line}", "filter 1, LengthFilter: Values of argument 'unit'"),
        ("- CharacterScoreFilter: {}", "A list of language scripts needs to be defined"),
        ("- LengthFilter", "filter 1, LengthFilter"),
    ],
)
def test_mistakes_in_the_file_are_reported(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "filters.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load_filters(str(tmp_path / "filters.yaml"), DATA)
    assert str(caught.value).startswith(f"clean.filters={tmp_path / 'filters.yaml'}: ")
    assert "\n" not in str(caught.value)


def test_missing_files_and_failures_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_filters(str(tmp_path / "missing.yaml"), DATA)
    (tmp_path / "filters.yaml").write_text("- CharacterScoreFilter: {scripts: [Latin]}", encoding="utf-8")
    with pytest.raises(UserError, match=r"clean\.filters: CharacterScoreFilter failed: Mismatch in number of scripts"):
        rejections(load_filters(str(tmp_path / "filters.yaml"), DATA), PAIRS)

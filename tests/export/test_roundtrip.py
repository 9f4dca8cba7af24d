"""Models that are imported, exported for Hugging Face and imported again."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from branchnorm_jax import config as configs
from branchnorm_jax.data.tokenizer import load_tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.export import fold, huggingface
from branchnorm_jax.export.tokenizers import Vocabulary
from branchnorm_jax.importing.imported import Imported
from branchnorm_jax.modes.common import random_sentences
from branchnorm_jax.modes.export import export
from branchnorm_jax.modes.importing import import_, read_folder
from branchnorm_jax.options import Config, DecodeConfig, ExportConfig, ImportConfig
from branchnorm_jax.workdir import Workdir
from tests.importing import examples
from tests.importing.test_marian import ALPHA, LINES, model_of

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], str, tuple[str, str]]] = {
    "marian": (examples.marian, dict(missing=("r",)), "MarianMTModel", ("en", "de")),
    "marian, two vocabularies": (examples.marian, dict(apart=True), "MarianMTModel", ("en", "de")),
    "marian's npz": (examples.marian_npz, {}, "MarianMTModel", ("", "")),
    "fairseq": (examples.fairseq, {}, "FSMTForConditionalGeneration", ("en", "de")),
    "fairseq, two vocabularies": (examples.fairseq, dict(apart=True), "FSMTForConditionalGeneration", ("en", "de")),
    "fairseq, pre-norm": (examples.fairseq, dict(pre_norm=True), "M2M100ForConditionalGeneration", ("en", "de")),
    "m2m-100": (examples.m2m100, {}, "M2M100ForConditionalGeneration", ("en", "de")),
    "nllb": (examples.m2m100, dict(nllb=True), "M2M100ForConditionalGeneration", ("eng_Latn", "fra_Latn")),
    "mbart-50": (examples.mbart50, {}, "MBartForConditionalGeneration", ("en_XX", "de_DE")),
    "mbart-50, unscaled": (
        examples.mbart50,
        dict(scale_embedding=False, tie_word_embeddings=False),
        *("MBartForConditionalGeneration", ("sl_SI", "ar_AR")),
    ),
    "t5": (examples.t5, dict(apart=False), "T5ForConditionalGeneration", ("", "")),
    "t5 v1.1": (examples.t5, {}, "T5ForConditionalGeneration", ("", "")),
    "mt5": (examples.t5, dict(kind="mt5"), "T5ForConditionalGeneration", ("", "")),
    "starts from the unknown piece, as MADLAD-400": (
        examples.t5,
        dict(decoder_start_token_id=2),
        "T5ForConditionalGeneration",
        ("", ""),
    ),
}
"""Name -> the function that writes an example, its options, the class of the export, source and target language."""


def imported(folder: Path, workdir: Path) -> Imported:
    """Imports a folder with the check, and returns what the import reads."""
    import_(dataclasses.replace(Config(), import_=ImportConfig(path=str(folder), check_sentences=3)), Workdir(workdir))
    if (folder / "config.json").exists():
        assert json.loads((workdir / "import.json").read_text())["largest_difference"] < 1e-4
    return read_folder(folder)[1]


def exported(workdir: Path, folder: Path) -> None:
    """Exports a workdir for Hugging Face, with the check."""
    config = configs.load(workdir / "config.json")
    options = ExportConfig(format="huggingface", path=str(folder), check_lines=3)
    export(dataclasses.replace(config, export=options), Workdir(workdir))


def translations(found: Imported, workdir: Path, source: str, target: str) -> list[tuple[str, float]]:
    """Returns translations with their scores, by beam search."""
    config, tokenizer = configs.load(workdir / "config.json"), load_tokenizer(workdir / "vocabulary")
    assert config.decode.beam_size == found.decode.beam_size
    decode = DecodeConfig(beam_size=3, max_length_a=0.0, max_length_b=30, no_repeat_ngram=2)
    texts, tags = LINES, None
    if found.tags:
        texts, tags = Languages(config.data, tokenizer).split_tags(LINES, target, source=source)
    results = Translator(model_of(found), tokenizer, decode).translate(found.params, ALPHA, texts, tags=tags)
    return [(best.text, best.score) for best, *_ in results]


def vocabulary_of(found: Imported, source: str = "", target: str = "") -> Vocabulary:
    models = found.source.model, found.target.model
    begins = f">>{target}<<" if found.tags else ""
    return Vocabulary(found.source.pieces, found.target.pieces, models, len(found.tags), source, target, begins)


def check_same(once: Imported, twice: Imported) -> None:
    assert once.model == twice.model
    assert once.unused == twice.unused
    assert (once.source.pieces, once.target.pieces) == (twice.source.pieces, twice.target.pieces)
    jax.tree.map(np.testing.assert_array_equal, once.params, twice.params)


@pytest.mark.parametrize("name", list(CASES))
def test_parameters_and_pieces_stay(name: str, tmp_path: Path) -> None:
    """Also compares log-probabilities and tokenizers in the folders before and after, both in `transformers`."""
    make, options, kind, (source, target) = CASES[name]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    module = make(theirs, **options)
    ours.mkdir()
    once = read_folder(theirs)[1]
    plain = fold.fold(model_of(once), once.params, ALPHA)
    search: dict[str, Any] = {"beam_size": 3, "length_penalty": 0.7, "no_repeat_ngram": 2, "min_length": 4}
    decode = dataclasses.replace(once.decode, **search)
    ids = huggingface.write(plain, once.model, decode, vocabulary_of(once, source, target), ours, 64)
    assert json.loads((ours / "config.json").read_text())["architectures"] == [kind]
    twice = read_folder(ours)[1]
    check_same(once, twice)
    assert {option: getattr(twice.decode, option) for option in search} == search
    named = twice.decode if once.tags else twice
    assert (named.source_lang, named.target_lang) == (source, target)
    if name == "marian's npz":
        return  # `transformers` cannot load the original

    original = theirs
    if not (theirs / "config.json").exists():
        original = tmp_path / "original"
        module.save_pretrained(original)
    sources, targets = random_sentences(model_of(once), 3, once.source.absent)
    before, after = (
        huggingface.log_probs(folder, *([[int(of[token]) for token in line] for line in lines] for of, lines in sides))
        for folder, sides in (
            (original, ((once.source.ids, sources), (once.target.ids, targets))),
            (ours, ((ids[0], sources), (ids[1], targets))),
        )
    )
    np.testing.assert_allclose(np.concatenate(after), np.concatenate(before), atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("fairseq", "marian's"))])
def test_tokenizers_stay(name: str, tmp_path: Path) -> None:
    make, options, _, (source, target) = CASES[name]
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    make(theirs, **options)
    ours.mkdir()
    once = read_folder(theirs)[1]
    plain = fold.fold(model_of(once), once.params, ALPHA)
    ids = huggingface.write(plain, once.model, once.decode, vocabulary_of(once, source, target), ours, 64)
    languages: dict[str, Any] = dict(src_lang=source, tgt_lang=target) if once.tags else {}
    after = AutoTokenizer.from_pretrained(ours, **languages)
    before = type(after).from_pretrained(theirs, **languages)
    for line in (*LINES, "translate <extra_id_0> the dog"):
        back = [ids[0].tolist().index(token) for token in after(line).input_ids]
        assert [int(once.source.rows[token]) for token in back] == before(line).input_ids


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.slow
def test_workdirs_translate_alike(name: str, tmp_path: Path) -> None:
    make, options, _, (source, target) = CASES[name]
    (tmp_path / "theirs").mkdir()
    make(tmp_path / "theirs", **options)
    once = imported(tmp_path / "theirs", tmp_path / "first")
    exported(tmp_path / "first", tmp_path / "exported")
    twice = imported(tmp_path / "exported", tmp_path / "second")
    check_same(once, twice)
    first = translations(once, tmp_path / "first", source, target)
    assert first == translations(twice, tmp_path / "second", source, target)
    assert max(len(text) for text, _ in first) > 10


@pytest.mark.parametrize(
    "side", ["target", "each", *(pytest.param(side, marks=pytest.mark.slow) for side in ("source", "both"))]
)
def test_sides_and_directions_of_tags_stay(side: str, tmp_path: Path) -> None:
    """The comparison of log-probabilities does not notice where tags go."""
    examples.marian(tmp_path / "theirs", tags=(">>deu<<", ">>fry<<"))
    found = imported(tmp_path / "theirs", tmp_path / "first")
    path = tmp_path / "first" / "config.json"
    saved = configs.load(path)
    tagged = dataclasses.replace(saved.data, tags=side, pairs="deu-fry,fry-deu")
    path.write_text(configs.to_json(dataclasses.replace(saved, data=tagged)))
    exported(tmp_path / "first", tmp_path / "exported")
    again = imported(tmp_path / "exported", tmp_path / "second")
    data = configs.load(tmp_path / "second" / "config.json").data
    assert (data.tags, data.pairs) == (side, "deu-fry,fry-deu")
    first = translations(found, tmp_path / "first", "deu", "fry")
    assert first == translations(again, tmp_path / "second", "deu", "fry")
    AutoTokenizer.from_pretrained(tmp_path / "exported")

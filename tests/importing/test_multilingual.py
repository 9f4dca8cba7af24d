"""Imported M2M-100, NLLB and mBART-50 models against `transformers`: pieces, log-probabilities, searches and more."""

import dataclasses
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForSeq2SeqLM, M2M100Tokenizer, MBart50Tokenizer, NllbTokenizer
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as M2M100_LANGUAGES
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as MBART50_LANGUAGES
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB_LANGUAGES

from branchnorm_jax.data.tags import add_tags
from branchnorm_jax.data.tokenizer import ABSENT, load_tokenizer
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.importing import multilingual
from branchnorm_jax.model.embedding import sinusoids
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.importing import import_
from branchnorm_jax.options import Config, DataConfig, DecodeConfig
from branchnorm_jax.training.finetune import with_new_tags
from branchnorm_jax.workdir import Workdir
from tests.cases import quick_and_slow
from tests.conftest import run_main
from tests.importing import examples
from tests.importing.damage import changed, check_refused
from tests.importing.test_marian import ALPHA, LINES, TARGETS, model_of, tokenizer_of

FAMILIES: dict[str, tuple[Callable[..., None], dict[str, Any], Any, str, str]] = {
    "m2m-100": (examples.m2m100, {}, M2M100Tokenizer, "en", "de"),
    "m2m-100, pytorch file": (examples.m2m100, dict(safe=False), M2M100Tokenizer, "yi", "ast"),
    "nllb": (examples.m2m100, dict(nllb=True), NllbTokenizer, "eng_Latn", "fra_Latn"),
    "mbart-50": (examples.mbart50, {}, MBart50Tokenizer, "en_XX", "de_DE"),
    "mbart-50, relu": (
        examples.mbart50,
        dict(safe=False, activation_function="relu", scale_embedding=False, tie_word_embeddings=False),
        *(MBart50Tokenizer, "sl_SI", "ar_AR"),
    ),
}


@pytest.mark.parametrize("name", quick_and_slow(list(FAMILIES), ("m2m-100", "nllb", "mbart-50")))
def test_log_probabilities_of_text(name: str, tmp_path: Path) -> None:
    """From text to log-probabilities, each library with its own tokenizer, tags and ids."""
    make, options, kind, source, target = FAMILIES[name]
    make(tmp_path / "theirs", **options)
    found = multilingual.read_folder(tmp_path / "theirs")
    tokenizer = tokenizer_of(found, tmp_path / "ours")
    theirs = kind.from_pretrained(tmp_path / "theirs", src_lang=source, tgt_lang=target)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs").eval()
    tags = tokenizer.tags(DataConfig(pairs="+".join(found.tags), tags="each"), source, target)
    pairs = list(zip(LINES, TARGETS, strict=True))
    translator = Translator(model_of(found), tokenizer, found.decode)
    sources, targets = translator.encode(pairs, [tags] * len(pairs))
    actual = translator.token_log_probs(found.params, ALPHA, sources, targets)
    for (line, reference), ours, ids, log_probs in zip(pairs, sources, targets, actual, strict=True):
        given = theirs(line, text_target=reference, return_tensors="pt")
        assert [found.source.ids[token] for token in ours] == given.input_ids[0].tolist()
        assert [found.target.ids[token] for token in ids] == given.labels[0].tolist()
        with torch.no_grad():
            logits = model(**given).logits[0]
        expected = logits.log_softmax(-1).gather(1, given.labels[0][:, None])[:, 0]
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)


SEARCHES = list(itertools.product(("m2m-100", "nllb", "mbart-50"), (1, 3)))
"""Model and beam size."""


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.slow
def test_searches_find_the_same_tokens(search: tuple[str, int], tmp_path: Path) -> None:
    name, beam_size = search
    make, options, kind, source, target = FAMILIES[name]
    make(tmp_path / "theirs", **options)
    found = multilingual.read_folder(tmp_path / "theirs")
    tokenizer = tokenizer_of(found, tmp_path / "ours")
    theirs = kind.from_pretrained(tmp_path / "theirs", src_lang=source, tgt_lang=target)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "theirs").eval()
    longest, lines = 40, LINES[:4]
    # Untrained models would repeat one token.
    decode = DecodeConfig(
        beam_size=beam_size, length_penalty=1.0, max_length_a=0.0, max_length_b=longest, min_length=0, no_repeat_ngram=2
    )
    data = DataConfig(pairs="+".join(found.tags), tags="each")
    texts, tags = Languages(data, tokenizer).split_tags(lines, target, source=source)
    processor = tokenizer.target_processor
    assert isinstance(processor, SentencePieceProcessor)
    ours = Translator(model_of(found), tokenizer, decode).translate(found.params, ALPHA, texts, tags=tags)
    assert max(len(best.tokens) for best, *_ in ours) > 5
    for line, (best, *_), tag in zip(lines, ours, tags, strict=True):
        answer = model.generate(
            **theirs(line, return_tensors="pt"),
            forced_bos_token_id=found.target.ids[tag.target[0]],
            num_beams=beam_size,
            max_length=longest + 3,
            length_penalty=1.0,
            no_repeat_ngram_size=2,
            early_stopping="never" if beam_size > 1 else False,
            bad_words_ids=[[model.config.pad_token_id]],
            return_dict_in_generate=True,
            output_scores=True,
        )
        (tokens,) = answer.sequences
        assert [found.target.ids[token] for token in (*tag.target, *best.tokens)] == tokens[1:].tolist()
        assert len(best.tokens) < longest
        # The class of M2M-100 does not skip languages, and calls tokens without a name <unk>.
        words = [found.target.ids[token] for token in best.tokens if not processor.is_control(token)]
        assert best.text == theirs.decode(words)
        if beam_size > 1:
            assert best.score == pytest.approx(float(answer.sequences_scores[0]), abs=1e-5)


@pytest.mark.parametrize("name", ["m2m-100", "mbart-50"])
@pytest.mark.slow
def test_imported_fine_tuned_and_exported(name: str, tmp_path: Path) -> None:
    make, options, _, source, target = FAMILIES[name]
    make(tmp_path / "theirs", **options)
    parent = f"--workdir={tmp_path / 'parent'}"
    run = run_main("--mode=import", f"--config.import.path={tmp_path / 'theirs'}", parent)
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "parent" / "import.json").read_text())["largest_difference"] < 1e-5
    found = multilingual.read_folder(tmp_path / "theirs")
    tokenizer = load_tokenizer(tmp_path / "parent" / "vocabulary")
    assert tokenizer.languages == found.tags == multilingual.LANGUAGES[name.replace("-", "")]
    languages = Languages(DataConfig(pairs="+".join(found.tags), tags="each"), tokenizer)
    tags = languages.split_tags(LINES, target, source=source)[1]
    translator = Translator(model_of(found), tokenizer, found.decode)
    expected = [best.text for best, *_ in translator.translate(found.params, ALPHA, LINES, tags=tags)]
    direction = f"--config.decode.source_lang={source}", f"--config.decode.target_lang={target}"
    run = run_main("--mode=translate", parent, *direction, stdin="\n".join(LINES) + "\n")
    assert run.stdout.splitlines() == expected, run.stderr
    for given, message in (
        (direction[1:], f"no source language; set decode.source_lang to one of {', '.join(sorted(found.tags)[:2])}"),
        (direction[:1], "no target language; set decode.target_lang or start the line with >>"),
        ((*direction[1:], "--config.decode.source_lang=tlh"), "from 'tlh'"),
    ):
        refused = run_main("--mode=translate", parent, *given, stdin="the dog\n")
        assert refused.returncode == 2 and message in refused.stderr, refused.stderr

    (tmp_path / "text").mkdir()
    for split in ("train", "valid"):
        for lang, lines in ((source, LINES[:4]), (target, TARGETS[:4])):
            (tmp_path / "text" / f"{split}.{lang}").write_text("\n".join(lines * 20) + "\n", encoding="utf-8")
    run = run_main(
        f"--config=configs/saved.py:{tmp_path / 'parent' / 'config.json'}",
        f"--config.train.finetune_from={tmp_path / 'parent'}",
        f"--config.data.path={tmp_path / 'text'}",
        f"--config.data.pairs={source}-{target}",
        f"--workdir={tmp_path / 'child'}",
        "--config.train.steps=60",
        "--config.train.warmup_steps=10",
        "--config.train.eval_every=30",
        "--config.train.batch_tokens=512",
        "--config.train.learning_rate=3e-3",
    )
    assert run.returncode == 0, run.stderr
    losses = [json.loads(line)["nll"] for line in (tmp_path / "child" / "validation.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.3
    for workdir in ("parent", "child"):
        run = run_main("--mode=export", f"--workdir={tmp_path / workdir}")
        assert run.returncode == 0, run.stderr
        assert "largest difference" in run.stderr
    # A single direction needs no options.
    run = run_main("--mode=translate", f"--workdir={tmp_path / 'child'}", stdin="the dog\n")
    assert run.returncode == 0, run.stderr
    child = f"--workdir={tmp_path / 'child'}"
    run = run_main("--mode=export", child, "--config.export.format=huggingface")
    assert run.returncode == 0, run.stderr
    found = multilingual.read_folder(tmp_path / "child" / "export" / "huggingface")
    # Without model.mask_unused, only pieces that the imported model does not have keep the probability 0.
    assert found.unused == list(load_tokenizer(tmp_path / "child" / "vocabulary").absent_target)


def test_a_new_language_keeps_the_old_ones(tmp_path: Path) -> None:
    """With the row of the new tag masked, the log-probabilities are those of the import."""
    examples.m2m100(tmp_path / "theirs", nllb=True)
    found = multilingual.read_folder(tmp_path / "theirs")
    tokenizer = tokenizer_of(found, tmp_path / "ours")
    absent = found.unused[-3:]
    (tmp_path / "ours" / ABSENT).write_text("".join(f"{index}\n" for index in absent))
    add_tags(tmp_path / "ours", ["tlh_Latn"])
    new = load_tokenizer(tmp_path / "ours")
    assert new.languages == [*tokenizer.languages, "tlh_Latn"]
    tag = 3 + len(found.tags)
    assert new.target_pieces == [*tokenizer.target_pieces[:tag], ">>tlh_Latn<<", *tokenizer.target_pieces[tag:]]
    assert list(new.absent_target) == [index + 1 for index in absent]
    shifted = tuple(index + (index >= tag) for index in found.unused)
    old = model_of(found)
    model = Transformer(old.config, new.source_size, new.target_size, (tag, *shifted), len(new.languages))
    params = with_new_tags(found.params, tokenizer, model)
    results = []
    for each, network, weights in ((tokenizer, old, found.params), (new, model, params)):
        tags = each.tags(DataConfig(pairs="+".join(found.tags), tags="each"), "eng_Latn", "fra_Latn")
        pairs = list(zip(LINES, TARGETS, strict=True))
        results.append(Translator(network, each, found.decode).score(weights, ALPHA, pairs, [tags] * len(pairs)))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)


def test_the_folder_names_languages(tmp_path: Path) -> None:
    """`forced_bos_token_id` and the languages of the tokenizer are defaults of the search."""
    examples.m2m100(tmp_path, nllb=True)
    assert multilingual.read_folder(tmp_path).decode.source_lang == "eng_Latn"
    french = NllbTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("fra_Latn")
    changed("generation_config.json", "forced_bos_token_id", french)(tmp_path)
    changed("generation_config.json", "num_beams", 5)(tmp_path)
    decode = multilingual.read_folder(tmp_path).decode
    assert (decode.target_lang, decode.beam_size) == ("fra_Latn", 5)


@pytest.mark.slow
def test_directions_can_be_chosen(tmp_path: Path) -> None:
    examples.m2m100(tmp_path / "theirs")
    importing = "--mode=import", f"--config.import.path={tmp_path / 'theirs'}", f"--workdir={tmp_path / 'ours'}"
    run = run_main(*importing, "--config.data.pairs=en-tlh")
    assert run.returncode == 2 and "data.pairs=en-tlh: the model has no language tlh" in run.stderr
    run = run_main(*importing, "--config.data.pairs=en-de", "--config.import.check_sentences=0")
    assert run.returncode == 0, run.stderr
    run = run_main("--mode=translate", f"--workdir={tmp_path / 'ours'}", stdin="the dog\n")
    assert run.returncode == 0, run.stderr


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tokenizer.json alone": (
        lambda folder: (folder / "sentencepiece.bpe.model").unlink(),
        "no sentencepiece.bpe.model",
    ),
    "no SentencePiece": (lambda folder: (folder / "sentencepiece.bpe.model").write_bytes(b"x"), "not a SentencePiece"),
    "starts from a language": (
        changed("config.json", "decoder_start_token_id", 70),
        "decoder_start_token_id must be 2",
    ),
    "start is missing": (changed("config.json", "decoder_start_token_id", None), "decoder_start_token_id is missing"),
    "padding": (changed("config.json", "pad_token_id", 0), "pad_token_id must be 1, the id of <pad>"),
    "too few pieces": (changed("config.json", "vocab_size", 60), "but the model has 60 pieces"),
    "layers": (changed("config.json", "decoder_layers", 2), "weights that this import does not know"),
    "positions": (changed("config.json", "max_position_embeddings", 32), "embed_positions.weight' has shape [66, 16]"),
    "post-norm": (changed("config.json", "normalize_before", False), "normalize_before=False is not supported"),
    "legacy": (changed("tokenizer_config.json", "legacy_behaviour", True), "legacy_behaviour=True"),
    "tokens": (changed("tokenizer.json", "added_tokens", [{"id": "x"}]), "the added tokens cannot be read"),
    "another tokenizer": (
        changed("tokenizer.json", "model", {"vocab": [["<s>", 0.0], ["x", -1.0]]}),
        "sentencepiece.bpe.model and tokenizer.json do not belong to the same model",
    ),
    "weights elsewhere": (
        changed("model.safetensors.index.json", "weight_map", {"x": "../model.safetensors"}),
        "'../model.safetensors' is not the name of a file in this folder",
    ),
    "a pointer": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "run `git lfs pull`",
    ),
    "an id twice": (changed("tokenizer.json", "added_tokens", [{"id": 9, "content": "en_XX"}]), "have the same id"),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mbart") / "intact"
    examples.mbart50(folder)
    return folder


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=list(BAD))
def test_bad_folders(damage: Callable[[Path], Any], message: str, intact: Path, tmp_path: Path) -> None:
    check_refused(multilingual.read_folder, intact, damage, message, tmp_path / "bad")


def imported(folder: Path, workdir: Path, **data: Any) -> None:
    config = Config()
    config = dataclasses.replace(config, import_=dataclasses.replace(config.import_, path=str(folder)))
    import_(dataclasses.replace(config, data=dataclasses.replace(config.data, **data)), Workdir(workdir))


def test_a_fault_of_the_other_library_is_one_line(intact: Path, tmp_path: Path) -> None:
    shutil.copytree(intact, tmp_path / "theirs")
    changed("generation_config.json", "early_stopping", "maybe")(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"^import\.path=.*early_stopping.*; --config\.import\.check_sentences=0"):
        imported(tmp_path / "theirs", tmp_path / "run")


@pytest.mark.parametrize("options", [{"source_lang": "en_XX"}, {"target_lang": "xx"}, {"source_normalization": "nfc"}])
def test_options_that_an_import_cannot_heed_are_refused(options: dict[str, str], intact: Path, tmp_path: Path) -> None:
    (given,) = (f"{name}={value}" for name, value in options.items())
    with pytest.raises(UserError, match=f"data.{given} cannot be chosen: it is part of the model in {intact}"):
        imported(intact, tmp_path / "run", **options)


def test_other_names_of_a_language_are_understood(intact: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(multilingual.read_folder(intact), tmp_path / "ours")
    config = DataConfig(pairs="en_XX-de_DE", tags="each")
    for wrong, right in {"de": "de_DE", "deu": "de_DE", "en_xx": "en_XX"}.items():
        with pytest.raises(UserError, match=f"not trained to translate to {wrong!r}; did you mean {right}"):
            tokenizer.tags(config, "en_XX", wrong)


FEW = '{"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}'
VOCABULARIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "codes": (changed("tokenizer_config.json", "language_codes", "x"), "language_codes=x is not known"),
    "padding": (changed("vocab.json", "<pad>", 50), "two pieces have the same id"),
    "no padding": (changed("vocab.json", "<pad>", 165), "the first pieces of the vocabulary must be <s>, <pad>"),
    "type": (changed("vocab.json", "<pad>", "x"), "an id is not a whole number"),
    "few pieces": (lambda folder: (folder / "vocab.json").write_text(FEW), "do not belong together"),
}


@pytest.mark.parametrize(("damage", "message"), VOCABULARIES.values(), ids=list(VOCABULARIES))
def test_bad_vocabularies(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    examples.m2m100(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        multilingual.read_folder(tmp_path)


def test_positions_are_those_of_fairseq() -> None:
    """PyTorch computes the angles in float32, so they differ a little at large positions."""
    theirs = M2M100SinusoidalPositionalEmbedding(1024, 64, padding_idx=1)(torch.full((1, 1024), 5))[0]
    ours = sinusoids(1024, 64, "fairseq")
    np.testing.assert_allclose(ours[:30], theirs[:30], atol=2e-6)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_languages_are_those_of_transformers() -> None:
    known = multilingual.LANGUAGES
    assert (known["m2m100"], known["wmt21"]) == (M2M100_LANGUAGES["m2m100"], M2M100_LANGUAGES["wmt21"])
    assert (known["nllb"], known["mbart50"]) == (NLLB_LANGUAGES, MBART50_LANGUAGES)

"""Imported checkpoints of fairseq against the ports of its models in `transformers`."""

import argparse
import itertools
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.importing import fairseq
from tests.conftest import run_main
from tests.importing import examples
from tests.importing.test_marian import ALPHA, LINES, TARGETS, model_of, tokenizer_of

VARIANTS: dict[str, dict[str, Any]] = {
    "post_ln": {},
    "two vocabularies": dict(apart=True),
    "pre_ln": dict(pre_norm=True),
    "since 0.10": dict(pre_norm=True, hydra=True),
    "codes of subword-nmt": dict(codes="subword-nmt"),
    "codes of fastBPE": dict(codes="fastBPE", apart=True),
}


def fairseq_ids(folder: Path, lang: str, line: str) -> list[int]:
    """Returns the ids of a line as fairseq finds them: pieces, looked up in the dictionary, and EOS."""
    if (folder / "bpecodes").exists():
        return list(examples.fsmt_tokenizer(folder, lang)(line).input_ids)
    named = folder / f"spm.{lang}.model"
    model = str(named if named.exists() else folder / "spm.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=model).encode(line, out_type=str)
    listed = [text.rsplit(" ", 1)[0] for text in (folder / f"dict.{lang}.txt").read_text().splitlines()]
    return [listed.index(piece) + 4 if piece in listed else 3 for piece in pieces] + [2]


@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_log_probabilities_of_text(options: dict[str, Any], tmp_path: Path) -> None:
    model = examples.fairseq(tmp_path / "theirs", **options)
    found = fairseq.read_folder(tmp_path / "theirs")
    assert (found.source_lang, found.target_lang) == ("en", "de")
    assert found.model.shared_embeddings == ("none" if "apart" in options else "all")
    tokenizer = tokenizer_of(found, tmp_path / "ours")
    source, target = tokenizer.encode_source(LINES), tokenizer.encode_target(TARGETS)
    actual = Translator(model_of(found), tokenizer, found.decode).token_log_probs(found.params, ALPHA, source, target)
    for index, (line, reference) in enumerate(zip(LINES, TARGETS, strict=True)):
        ids = fairseq_ids(tmp_path / "theirs", "en", line)
        labels = fairseq_ids(tmp_path / "theirs", "de", reference)
        assert [found.source.ids[token] for token in source[index]] == ids
        assert [found.target.ids[token] for token in target[index]] == labels
        with torch.no_grad():
            inputs = torch.tensor([[2, *labels[:-1]]])
            logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=inputs, use_cache=False).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
        np.testing.assert_allclose(actual[index], expected, atol=1e-5)


def test_learned_positions_and_norms_after_the_embeddings(tmp_path: Path) -> None:
    """The same layers as mBART's in `transformers`, with the same offset of the positions; Post-LN as in BART."""
    examples.fairseq(tmp_path, encoder_learned_pos=True, decoder_learned_pos=True, layernorm_embedding=True)
    path = tmp_path / "checkpoint_best.pt"
    checkpoint = torch.load(path, weights_only=False)
    for stack in ("encoder", "decoder"):
        checkpoint["model"][f"{stack}.embed_positions.weight"] = torch.randn(66, 16)
        for leaf in ("weight", "bias"):
            checkpoint["model"][f"{stack}.layernorm_embedding.{leaf}"] = torch.randn(16)
    torch.save(checkpoint, path)
    found = fairseq.read_folder(tmp_path)
    from transformers import BartConfig, BartForConditionalGeneration

    state = checkpoint["model"]
    config = BartConfig(
        vocab_size=len(found.source.ids), d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64,
        scale_embedding=True, activation_function="relu",
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    renamed = {f"model.{name}": tensor for name, tensor in state.items()}
    renamed["model.shared.weight"] = renamed["model.encoder.embed_tokens.weight"]
    left = model.load_state_dict(renamed, strict=False)
    assert set(left.missing_keys) <= {"lm_head.weight", "final_logits_bias"}
    model.tie_weights()
    tokenizer = tokenizer_of(found, tmp_path / "ours")
    source, target = tokenizer.encode_source(LINES[:1]), tokenizer.encode_target(TARGETS[:1])
    (actual,) = Translator(model_of(found), tokenizer, found.decode).token_log_probs(
        found.params, ALPHA, source, target
    )
    ids, labels = ([found.source.ids[token] for token in side[0]] for side in (source, target))
    with torch.no_grad():
        logits = model(torch.tensor([ids]), decoder_input_ids=torch.tensor([[2, *labels[:-1]]])).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


class Code:
    """A pickle that would create a file."""

    def __reduce__(self) -> Any:
        return open, ("owned", "w")


def damage(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Returns a function that changes the content of the checkpoint."""

    def damaged(folder: Path) -> None:
        path = folder / "checkpoint_best.pt"
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)

    return damaged


def append(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(text)


def two_checkpoints(folder: Path) -> None:
    (folder / "checkpoint_best.pt").rename(folder / "a.pt")
    (folder / "b.pt").touch()


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no dictionary": (lambda folder: (folder / "dict.de.txt").unlink(), "dict.de.txt: cannot be read"),
    "line of a dictionary": (lambda folder: append(folder, "dict.en.txt", "piece\n"), "expected a piece and its count"),
    "piece twice": (lambda folder: append(folder, "dict.en.txt", "<unk> 1\n"), "'<unk>' is there twice"),
    "longer dictionary": (lambda folder: append(folder, "dict.en.txt", "piece 1\n"), "has shape"),
    "no SentencePiece model": (
        lambda folder: (folder / "spm.model").unlink(),
        r"no file with a SentencePiece model \(.model or .spm\), which the model needs, because no dictionary",
    ),
    "two SentencePiece models": (
        lambda folder: (folder / "other.model").write_bytes((folder / "spm.model").read_bytes()),
        "several files with a SentencePiece model .*, other.model, spm.model; their names need languages",
    ),
    "two checkpoints": (
        two_checkpoints,
        "expected checkpoint_best.pt or a single .pt file, not a.pt, b.pt",
    ),
    "empty checkpoint": (lambda folder: (folder / "checkpoint_best.pt").write_bytes(b""), "damaged or contains code"),
    "code": (
        lambda folder: (folder / "checkpoint_best.pt").write_bytes(pickle.dumps(Code(), protocol=2)),
        "damaged or contains code",
    ),
    "no options": (damage(lambda content: content.pop("args")), "source_lang is missing"),
    "no weights": (damage(lambda content: content.pop("model")), "not a checkpoint of fairseq"),
    "no tensors": (damage(lambda content: content.update(model={"a": 1})), "does not contain weights by name"),
    "options": (damage(lambda content: content.update(args=[1])), "its options are a list"),
    "overwrite": (
        lambda folder: (folder / "dict.en.txt").write_text("<unk> 5 #fairseq:overwrite\n"),
        "line 1: #fairseq:overwrite is not supported",
    ),
    "no language": (damage(lambda content: delattr(content["args"], "source_lang")), "source_lang is missing"),
    "missing weight": (damage(lambda content: content["model"].pop("decoder.layers.2.fc1.bias")), "contain no"),
    "unknown weight": (
        damage(lambda content: content["model"].update(more=torch.zeros(2))),
        "1 weights that this import does not know, such as model.more",
    ),
    "adaptive softmax": (
        damage(lambda content: setattr(content["args"], "adaptive_softmax_cutoff", "10,20")),
        "adaptive_softmax_cutoff=10,20 is not supported",
    ),
    "widths": (
        damage(lambda content: setattr(content["args"], "decoder_embed_dim", 8)),
        "decoder_embed_dim=8 must be equal to encoder_embed_dim=16",
    ),
}


def test_a_piece_that_ends_like_a_code_by_chance_needs_no_codes(tmp_path: Path) -> None:
    examples.fairseq(tmp_path)
    for lang in ("en", "de"):
        path = tmp_path / f"dict.{lang}.txt"
        lines = path.read_text(encoding="utf-8").splitlines()
        place = next(index for index, line in enumerate(lines) if line.startswith("▁") and len(line) > 4)
        path.write_text("\n".join([*lines[:place], "@@ 1", *lines[place + 1 :]]) + "\n", encoding="utf-8")
    assert fairseq.read_folder(tmp_path)


@pytest.mark.parametrize(("break_it", "fault"), FAULTS.values(), ids=list(FAULTS))
def test_faulty_folders_are_one_line(break_it: Callable[[Path], Any], fault: str, tmp_path: Path) -> None:
    examples.fairseq(tmp_path)
    break_it(tmp_path)
    with pytest.raises(UserError, match=fault) as error:
        fairseq.read_folder(tmp_path)
    assert "\n" not in str(error.value)
    assert not Path("owned").exists()


def test_options_that_are_missing_or_none_have_the_values_of_fairseq(tmp_path: Path) -> None:
    """fairseq's layers take relu for None, and False is the default of options that are switches."""
    examples.fairseq(tmp_path)
    missing = {"activation_fn": None, "encoder_learned_pos": None, "decoder_learned_pos": False}
    damage(lambda content: vars(content["args"]).update(missing))(tmp_path)
    assert fairseq.read_folder(tmp_path).model.activation == "relu"


def test_checkpoints_may_contain_options_and_numbers_only(tmp_path: Path) -> None:
    """The list of harmless types has not become a door: a Namespace may not contain code either."""
    torch.save({"args": argparse.Namespace(x=Code()), "model": {}}, tmp_path / "checkpoint_best.pt")
    with pytest.raises(UserError, match="contains code"):
        fairseq.read_folder(tmp_path)


@pytest.mark.slow
def test_imported_workdir_translates_and_exports(tmp_path: Path) -> None:
    examples.fairseq(tmp_path / "theirs", pre_norm=True)
    workdir = f"--workdir={tmp_path / 'ours'}"
    done = run_main("--mode=import", f"--config.import.path={tmp_path / 'theirs'}", workdir)
    assert done.returncode == 0, done.stderr
    assert "not compared with fairseq" in done.stderr
    assert json.loads((tmp_path / "ours" / "import.json").read_text())["format"] == "fairseq"
    done = run_main("--mode=translate", workdir, "--config.decode.max_length_b=20", stdin="the small dog\n\nsees\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    done = run_main("--mode=export", workdir, "--config.export.format=ctranslate2")
    assert done.returncode == 0, done.stderr
    assert "largest difference of a token's log-probability" in done.stderr


def test_files_with_codes(tmp_path: Path) -> None:
    """One file, or one of each language; otherwise, one line that says so."""
    examples.fairseq(tmp_path, codes="subword-nmt")
    once = fairseq.read_folder(tmp_path)
    content = (tmp_path / "bpecodes").read_bytes()
    for name in ("bpe.codes.en", "de.code"):
        (tmp_path / name).write_bytes(content)
    assert fairseq.read_folder(tmp_path).target == once.target
    (tmp_path / "de.code").unlink()
    with pytest.raises(
        UserError, match=r"several files with codes .*, bpe.codes.en, bpecodes; their names need languages"
    ):
        fairseq.read_folder(tmp_path)
    for name in ("bpe.codes.en", "bpecodes"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match=r"no file with codes .*, because a dictionary has pieces with @@"):
        fairseq.read_folder(tmp_path)


@pytest.mark.slow
def test_a_model_with_codes_is_fine_tuned_and_exported(tmp_path: Path) -> None:
    examples.fairseq(tmp_path / "theirs", codes="fastBPE")
    workdir, text = f"--workdir={tmp_path / 'ours'}", tmp_path / "text"
    done = run_main("--mode=import", f"--config.import.path={tmp_path / 'theirs'}", workdir)
    assert done.returncode == 0, done.stderr
    assert (
        "MosesTokenizer('de').tokenize(line, aggressive_dash_splits=True, escape=True), then by its codes"
        in done.stderr
    )
    text.mkdir()
    for split, lang in itertools.product(("train", "valid"), ("en", "de")):
        line = {"en": "the small dog's house -- {} ships", "de": "der kleine Hund & {} Häuser"}[lang]
        (text / f"{split}.{lang}").write_text("".join(line.format(number) + "\n" for number in range(20)))
    tuned = [f"--config=configs/saved.py:{tmp_path / 'ours' / 'config.json'}", f"--config.data.path={text}"]
    tuned += [f"--config.train.finetune_from={tmp_path / 'ours'}", f"--workdir={tmp_path / 'tuned'}"]
    done = run_main(*tuned, "--config.data.subword_samples=2")
    assert done.returncode == 2
    assert "data.subword_samples needs the probabilities of pieces, which codes do not have" in done.stderr
    done = run_main(*tuned, "--config.train.epochs=1")
    assert done.returncode == 0, done.stderr
    workdir, short = f"--workdir={tmp_path / 'tuned'}", "--config.decode.max_length_b=12"
    lines = "the small dog\tkleine\tHund\n\nthe ship\n"
    done = run_main("--mode=translate", workdir, short, "--config.decode.constraints", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, empty, _ = done.stdout.splitlines()
    assert "kleine" in first and "Hund" in first and not empty
    done = run_main("--mode=export", workdir, "--config.export.format=huggingface")
    assert done.returncode == 2
    assert "no tokenizer of Hugging Face splits text exactly as the codes of this model do" in done.stderr
    done = run_main("--mode=export", workdir, "--config.export.format=ctranslate2")
    assert done.returncode == 0, done.stderr
    assert "largest difference of a token's log-probability" in done.stderr
    exported = (tmp_path / "tuned" / "export" / "ctranslate2" / "source.codes").read_text().splitlines()
    known = (tmp_path / "theirs" / "bpecodes").read_text().splitlines()
    assert exported == ["#version: 0.2", *(line.removesuffix(" 7") for line in known)]

"""Imported models of Marian itself against PyTorch with the same weights, positions and pieces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ctranslate2.converters.marian import MarianConverter

from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.export import ctranslate2
from branchnorm_jax.importing import marian_npz
from branchnorm_jax.model.embedding import sinusoids
from tests.conftest import run_main
from tests.importing import examples
from tests.importing.test_marian import ALPHA, LINES, TARGETS, model_of, tokenizer_of


@pytest.mark.parametrize("joint", [False, True], ids=["lists of pieces", "one SentencePiece model"])
def test_log_probabilities(joint: bool, tmp_path: Path) -> None:
    theirs = examples.marian_npz(tmp_path, joint=joint)
    found = marian_npz.read_folder(tmp_path)
    assert (found.decode.beam_size, found.decode.length_penalty) == (6, 1.0)
    tokenizer = tokenizer_of(found, tmp_path / "ours")
    source, target = tokenizer.encode_source(LINES), tokenizer.encode_target(TARGETS)
    actual = Translator(model_of(found), tokenizer, found.decode).token_log_probs(found.params, ALPHA, source, target)
    used = len(found.source.ids) - 1  # without <pad>
    for ours, pieces, log_probs in zip(source, target, actual, strict=True):
        labels = [found.target.ids[piece] for piece in pieces]
        inputs = torch.tensor([[theirs.config.decoder_start_token_id, *labels[:-1]]])
        given = torch.tensor([[found.source.ids[piece] for piece in ours]])
        assert -1 not in given
        with torch.no_grad():
            logits = theirs(input_ids=given, decoder_input_ids=inputs).logits[0, :, :used]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)


VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": dict(pre_norm=True),
    "source table apart": dict(tables="decoder"),
    "tables apart": dict(tables="none"),
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=list(VARIANTS))
def test_log_probabilities_as_converted_by_ctranslate2(options: dict[str, Any], tmp_path: Path) -> None:
    """CTranslate2 reads Marian's files with its own code; only its positions are those of Hugging Face."""
    examples.marian_npz(tmp_path, **options)
    paths = [str(tmp_path / "both.vocab.yml")] * 2
    spec = MarianConverter(str(tmp_path / "model.npz"), paths)._load()
    for stack in (spec.encoder, spec.decoder):
        stack.position_encodings.encodings = sinusoids(64, 16, "tensor2tensor")
    spec.validate()
    spec.optimize()
    spec.save(str(tmp_path))
    found = marian_npz.read_folder(tmp_path)
    assert found.model.shared_embeddings == options.get("tables", "all")
    tokenizer = tokenizer_of(found, tmp_path / "ours")
    source, target = tokenizer.encode_source(LINES[:4]), tokenizer.encode_target(TARGETS[:4])
    actual = Translator(model_of(found), tokenizer, found.decode).token_log_probs(found.params, ALPHA, source, target)
    sides = (source, found.source.pieces), (target, found.target.pieces)
    given = [[[pieces[token] for token in line[:-1]] for line in lines] for lines, pieces in sides]
    for ours, theirs in zip(actual, ctranslate2.log_probs(tmp_path, *given), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_imported_and_exported(tmp_path: Path) -> None:
    examples.marian_npz(tmp_path)
    languages = ("--config.data.source_lang=en", "--config.data.target_lang=fr")
    run = run_main("--mode=import", f"--config.import.path={tmp_path}", f"--workdir={tmp_path / 'ours'}", *languages)
    assert run.returncode == 0, run.stderr
    assert "en to fr" in run.stderr
    run = run_main("--mode=translate", f"--workdir={tmp_path / 'ours'}", stdin="\n".join(LINES))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == len(LINES)
    options = (f"--workdir={tmp_path / 'ours'}",)
    run = run_main("--mode=export", *options)
    assert run.returncode == 0, run.stderr
    assert "over 100 random sentences" in run.stderr
    run = run_main("--mode=export", *options, "--config.export.format=huggingface")
    assert run.returncode == 0, run.stderr
    assert "over 100 random sentences" in run.stderr


def _changed(name: str, array: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        arrays = dict(np.load(folder / "model.npz"))
        np.savez(folder / "model.npz", **arrays | {name: array(arrays[name])})

    return change


def _options(old: bytes, new: bytes) -> Callable[[Path], None]:
    def replaced(array: np.ndarray) -> np.ndarray:
        assert old in array.tobytes()
        return np.frombuffer(array.tobytes().replace(old, new), np.int8)

    return _changed("special:model.yml", replaced)


BAD = {
    "no zip": (lambda folder: (folder / "model.npz").write_bytes(b"cut off"), "model.npz"),
    "cut": (lambda folder: (folder / "model.npz").write_bytes((folder / "model.npz").read_bytes()[:-900]), "model.npz"),
    "decoder.yml is a list": (lambda folder: (folder / "decoder.yml").write_text("- x"), "not a list"),
    "decoder.yml is empty": (lambda folder: (folder / "decoder.yml").write_text(""), "not a NoneType"),
    "beam": (lambda folder: (folder / "decoder.yml").write_text("beam-size: x"), "beam-size='x' must be"),
    "models": (lambda folder: (folder / "decoder.yml").write_text("models: model.npz"), "must be of the type list"),
    "vocabulary": (lambda folder: (folder / "both.vocab.yml").write_text("- a"), "both.vocab.yml: expected names"),
    "depth": (_options(b"enc-depth: 2", b"enc-depth: '"), "not valid YAML"),
    "smaller vocabulary": (_options(b"dim-vocabs: [", b"dim-vocabs: [1"), "pieces, but the model"),
    "not finite": (_changed("encoder_l1_ffn_W1", lambda array: array * np.nan), "not finite"),
    "sizes": (_options(b"dim-vocabs", b"dim-vocab"), "dim-vocabs is missing"),
    "no model": (lambda folder: (folder / "model.npz").unlink(), "model.npz: this file is missing"),
    "no vocabulary": (lambda folder: (folder / "both.vocab.yml").unlink(), "both.vocab.yml"),
    "no SentencePiece": (lambda folder: (folder / "target.spm").unlink(), "need the SentencePiece models"),
    "shape": (_changed("encoder_l1_self_Wq", lambda array: array[:, 1:]), "'encoder_l1_self_Wq' has shape"),
    "gelu": (_options(b"swish", b"gelu"), "--transformer-ffn-activation=gelu"),
    "sequence of operations": (_options(b'"dan"', b'"da"'), "-postprocess"),
    "fewer layers": (_options(b"dec-depth: 3", b"dec-depth: 2"), "weights that this import does not know"),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=list(BAD))
def test_bad_folders(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    examples.marian_npz(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        marian_npz.read_folder(tmp_path)
    assert "\n" not in str(raised.value)


def test_the_sides_of_vocabularies_are_not_guessed(tmp_path: Path) -> None:
    examples.marian_npz(tmp_path)
    (tmp_path / "decoder.yml").unlink()
    assert marian_npz.read_folder(tmp_path).decode.beam_size == 12
    (tmp_path / "second.vocab.yml").write_bytes((tmp_path / "both.vocab.yml").read_bytes())
    with pytest.raises(UserError, match="List them as `vocabs`"):
        marian_npz.read_folder(tmp_path)


def test_positions_are_those_of_tensor2tensor() -> None:
    ours = sinusoids(5, 8, "tensor2tensor")
    # Tensor2Tensor: timescales from 1 to 10000 in equal ratios; sines, then cosines.
    scales = np.geomspace(1, 10000, 4)
    expected = np.concatenate([np.sin(np.arange(5)[:, None] / scales), np.cos(np.arange(5)[:, None] / scales)], 1)
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert jnp.asarray(ours).dtype == jnp.float32

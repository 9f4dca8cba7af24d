"""Imported Marian models against `transformers`: pieces, log-probabilities, searches, and what comes after."""

import functools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import MarianMTModel, MarianTokenizer

from branchnorm_jax.data.tokenizer import Tokenizer, load_tokenizer
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.importing import marian
from branchnorm_jax.importing.imported import Imported
from branchnorm_jax.importing.tensors import arrays
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.common import random_sentences
from branchnorm_jax.modes.importing import read_folder
from branchnorm_jax.options import DecodeConfig
from tests.cases import quick_and_slow
from tests.conftest import run_main
from tests.importing import examples
from tests.importing.damage import changed, check_refused

LINES = ["the small dog sees a ship .", "my sister reads", "dog dog house", "Ωmega book", "", "in the garden  we see"]
TARGETS = ["der kleine Hund .", "liest ein altes Buch im Garten", "Haus", "wir sehen", "", "ein großes Haus ."]


ALPHA = {"encoder": jnp.ones(2), "decoder": jnp.ones(3)}


def tokenizer_of(found: Imported, folder: Path) -> Tokenizer:
    folder.mkdir()
    for side in ("source", "target"):
        (folder / f"{side}.model").write_bytes(getattr(found, side).model)
    return load_tokenizer(folder)


def model_of(found: Imported) -> Transformer:
    return Transformer(found.model, len(found.source.ids), len(found.target.ids), tuple(found.unused), len(found.tags))


VARIANTS: dict[str, dict[str, Any]] = {
    "opus-mt": {},
    "two vocabularies": dict(apart=True, activation_function="relu"),
    "pytorch file": dict(safe=False, activation_function="gelu"),
    "tables apart": dict(tie_word_embeddings=False),
    "no factor of the embeddings": dict(scale_embedding=False),
    "pieces without an id": dict(missing=("▁", "s", "r", "o")),
    "starts from EOS": dict(decoder_start_token_id=0),
    "bpe": dict(model_type="bpe"),
}


@pytest.mark.parametrize("options", quick_and_slow(VARIANTS, list(VARIANTS)[:2]))
def test_log_probabilities_of_text(options: dict[str, Any], tmp_path: Path) -> None:
    """From text to log-probabilities, each library with its own tokenizer and ids."""
    examples.marian(tmp_path / "theirs", **options)
    found = marian.read_folder(tmp_path / "theirs")
    tokenizer, theirs = tokenizer_of(found, tmp_path / "ours"), MarianTokenizer.from_pretrained(tmp_path / "theirs")
    model = MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    source, target = tokenizer.encode_source(LINES), tokenizer.encode_target(TARGETS)
    unknown = found.source.rows[2]
    for ours, line in zip(source, LINES, strict=True):
        assert [found.source.rows[token] for token in ours] == theirs(line).input_ids
    if "missing" in options:
        assert any(found.source.ids[token] < 0 for ours in source for token in ours)
        assert all(found.target.ids[token] >= 0 for ours in target for token in ours)
        assert unknown in {token for line in LINES for token in theirs(line).input_ids}
    actual = Translator(model_of(found), tokenizer, found.decode).token_log_probs(found.params, ALPHA, source, target)
    for line, pieces, log_probs in zip(LINES, target, actual, strict=True):
        labels = [found.target.ids[piece] for piece in pieces]
        inputs = torch.tensor([[model.config.decoder_start_token_id, *labels[:-1]]])
        with torch.no_grad():
            logits = model(**theirs(line, return_tensors="pt"), decoder_input_ids=inputs).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)


@pytest.mark.parametrize("beam_size", quick_and_slow([1, 3], [3]))
def test_searches_find_the_same_tokens(beam_size: int, tmp_path: Path) -> None:
    examples.marian(tmp_path / "theirs")
    found = marian.read_folder(tmp_path / "theirs")
    tokenizer, theirs = tokenizer_of(found, tmp_path / "ours"), MarianTokenizer.from_pretrained(tmp_path / "theirs")
    model = MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    longest, lines = 40, LINES[:4]
    # Untrained models would repeat one token.
    decode = DecodeConfig(
        beam_size=beam_size, length_penalty=1.0, max_length_a=0.0, max_length_b=longest, min_length=0, no_repeat_ngram=2
    )
    ours = Translator(model_of(found), tokenizer, decode).translate(found.params, ALPHA, lines)
    assert max(len(best.tokens) for best, *_ in ours) > 5
    for line, (best, *_) in zip(lines, ours, strict=True):
        # `max_length` counts the first input of the decoder and EOS. There, EOS is forced and not counted in the score,
        # so only translations that end before it are comparable.
        (tokens,) = model.generate(
            **theirs(line, return_tensors="pt"),
            num_beams=beam_size,
            max_length=longest + 2,
            length_penalty=1.0,
            no_repeat_ngram_size=2,
            early_stopping="never" if beam_size > 1 else False,
            bad_words_ids=[[model.config.pad_token_id]],
        )
        assert [found.target.ids[token] for token in best.tokens] == tokens[1:].tolist()
        assert len(best.tokens) < longest
        assert best.text == theirs.decode(tokens, skip_special_tokens=True)


@pytest.mark.slow
def test_export_and_import_change_nothing(tmp_path: Path) -> None:
    """Import, export for Hugging Face, import: the same parameters, bit for bit, and the same translations."""
    examples.marian(tmp_path / "theirs", missing=("r",))
    _imported(tmp_path / "theirs", tmp_path / "first")
    export = ("--mode=export", "--config.export.format=huggingface")
    run = run_main(*export, f"--workdir={tmp_path / 'first'}", f"--config.export.path={tmp_path / 'exported'}")
    assert run.returncode == 0, run.stderr
    assert "over 100 random sentences" in run.stderr
    _imported(tmp_path / "exported", tmp_path / "second")
    once, twice = (marian.read_folder(tmp_path / name) for name in ("theirs", "exported"))
    assert once.model == twice.model
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), once.params, twice.params))
    first, second = (
        run_main("--mode=translate", f"--workdir={tmp_path / name}", stdin="\n".join(LINES))
        for name in ("first", "second")
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout == second.stdout != ""


@pytest.mark.slow
def test_tags_become_directions(tmp_path: Path) -> None:
    ids = examples.marian(tmp_path / "theirs", tags=(">>deu<<", ">>fry<<"))
    _imported(tmp_path / "theirs", tmp_path / "ours")
    found = marian.read_folder(tmp_path / "theirs")
    assert found.tags == ["deu", "fry"]
    assert found.source.ids[3:5] == [ids[">>deu<<"], ids[">>fry<<"]]
    tokenizer = load_tokenizer(tmp_path / "ours" / "vocabulary")
    assert tokenizer.languages == ["deu", "fry"]
    run = run_main("--mode=translate", f"--workdir={tmp_path / 'ours'}", stdin=">>fry<< the dog\n>>deu<< the dog\n")
    assert run.returncode == 0, run.stderr
    theirs = MarianTokenizer.from_pretrained(tmp_path / "theirs")
    model = MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    (plain,) = tokenizer.encode_source(["the dog"])
    given = theirs(">>fry<< the dog", return_tensors="pt")
    assert [found.source.ids[token] for token in (4, *plain)] == given.input_ids[0].tolist()
    target = [*tokenizer.encode_target(["Haus"])[0]]
    labels = [found.target.ids[token] for token in target]
    inputs = torch.tensor([[ids["<pad>"], *labels[:-1]]])
    with torch.no_grad():
        logits = model(**given, decoder_input_ids=inputs).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
    run = run_main("--mode=score", f"--workdir={tmp_path / 'ours'}", stdin=">>fry<< the dog\tHaus\n")
    assert float(run.stdout.split()[0]) == pytest.approx(float(expected.sum()), abs=1e-4)
    refused = run_main("--mode=translate", f"--workdir={tmp_path / 'ours'}", stdin="the dog\n")
    assert refused.returncode == 2
    assert ">>deu<<, >>fry<<" in refused.stderr


DEEPER = (
    *("--config.model.method=branchnorm", "--config.model.encoder_layers=5", "--config.model.decoder_layers=6"),
    *("--config.model.grown_from=2L-3L", "--config.model.alpha_steps=20"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "further"), [("finetune_from", ()), ("deepen_from", DEEPER)], ids=["as deep", "deeper"]
)
def test_fine_tuned_and_exported(start: str, further: tuple[str, ...], tmp_path: Path) -> None:
    examples.marian(tmp_path / "theirs", missing=("r",))
    _imported(tmp_path / "theirs", tmp_path / "parent")
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        for lang, lines in (("en", LINES[:4]), ("de", TARGETS[:4])):
            (tmp_path / "text" / f"{split}.{lang}").write_text("\n".join(lines * 20) + "\n", encoding="utf-8")
    options = (
        f"--config=configs/saved.py:{tmp_path / 'parent' / 'config.json'}",
        f"--config.train.{start}={tmp_path / 'parent'}",
        f"--config.data.path={tmp_path / 'text'}",
        f"--workdir={tmp_path / 'child'}",
        *further,
        "--config.train.steps=60",
        "--config.train.warmup_steps=10",
        "--config.train.eval_every=30",
        "--config.train.batch_tokens=512",
        "--config.train.learning_rate=3e-3",
    )
    run = run_main(*options)
    assert run.returncode == 0, run.stderr
    losses = [json.loads(line)["nll"] for line in (tmp_path / "child" / "validation.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.3
    lines = (tmp_path / "child" / "metrics.jsonl").read_text().splitlines()
    # Label smoothing spreads a tenth of the probability over pieces that can occur, never over those that cannot.
    assert all(abs(line["loss"] - line["nll"]) < 2 for line in map(json.loads, lines))
    for form in ("ctranslate2", "huggingface"):
        run = run_main("--mode=export", f"--workdir={tmp_path / 'child'}", f"--config.export.format={form}")
        assert run.returncode == 0, run.stderr
        assert "largest difference" in run.stderr
    again = run_main(f"--workdir={tmp_path / 'parent'}")
    assert again.returncode == 2
    assert "fine-tune it in another --workdir" in again.stderr


def _imported(folder: Path, workdir: Path) -> None:
    run = run_main("--mode=import", f"--config.import.path={folder}", f"--workdir={workdir}")
    assert run.returncode == 0, run.stderr
    assert "largest difference" in run.stderr
    assert json.loads((workdir / "import.json").read_text())["largest_difference"] < 1e-5


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.shared.weight": Harmful()}))


def _ids(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        ids = json.loads((folder / "vocab.json").read_text())
        (folder / "vocab.json").write_text(json.dumps(change(ids)))

    return changed


_with = functools.partial(changed, "config.json")


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "no vocabulary": (lambda folder: (folder / "vocab.json").unlink(), "vocab.json"),
    "no SentencePiece": (lambda folder: (folder / "source.spm").write_bytes(b"no model"), "source.spm"),
    "cut": (lambda folder: (folder / "model.safetensors").write_bytes(b"cut off"), "model.safetensors"),
    "code": (_pickled, "cannot be read as plain weights"),
    "shape": (_with("d_model", 32), "has shape"),
    "layers": (_with("decoder_layers", 4), "the weights contain no 'model.decoder.layers.3"),
    "fewer layers": (_with("decoder_layers", 2), "weights that this import does not know"),
    "activation": (_with("activation_function", "mish"), "activation_function=mish"),
    "pre-norm": (_with("normalize_before", True), "normalize_before=True"),
    "heads": (_with("decoder_attention_heads", 2), "encoder_attention_heads and decoder_attention_heads"),
    "start": (_with("decoder_start_token_id", 5), "whose embedding is zero"),
    "start beyond the table": (_with("decoder_start_token_id", 5000), "whose embedding is zero"),
    "no size": (_with("vocab_size", None), "vocab_size is missing"),
    "type": (_with("dropout", "x"), "dropout='x' must be of the type float"),
    "large number": (_with("dropout", 10**400), "must be of the type float"),
    "deep": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json: cannot be read"),
    "files of other types": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "m", "b": 3}}'),
        "bad/3: cannot be read",
    ),
    "no layers": (_with("encoder_layers", 0), "encoder_layers must be the same positive number"),
    "uneven heads": (_with("d_model", 18), "must be even and a multiple of 4"),
    "list": (lambda folder: (folder / "config.json").write_text("[1]"), "expected names with values, not a list"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read"),
    "id beyond the table": (_ids(lambda ids: ids | {"new": 9999}), "ids up to 9999"),
    "id twice": (_ids(lambda ids: ids | {"new": 3}), "two pieces have the same id"),
    "id of another type": (_ids(lambda ids: ids | {"new": "3"}), "an id is not a whole number"),
    "no EOS": (_ids(lambda ids: {piece: ids[piece] for piece in ids if piece != "</s>"}), "special pieces </s>"),
    "index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json: weight_map is missing",
    ),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("marian") / "intact"
    examples.marian(folder)
    return folder


def test_random_sentences_fit_the_positions_of_an_export(intact: Path) -> None:
    for side in random_sentences(model_of(marian.read_folder(intact)), 50, longest=8):
        assert max(map(len, side)) <= 8


def test_weights_that_require_gradients_are_read() -> None:
    ((name, array),) = arrays(Path("a.pt"), {"a": torch.nn.Parameter(torch.ones(2))})
    assert (name, array.tolist()) == ("a", [1.0, 1.0])


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=list(BAD))
def test_bad_folders(damage: Callable[[Path], Any], message: str, intact: Path, tmp_path: Path) -> None:
    check_refused(marian.read_folder, intact, damage, message, tmp_path / "bad")
    assert not Path("harm").exists()


def test_given_options_and_old_files_are_respected(intact: Path, tmp_path: Path) -> None:
    """Options of the search on the command line take precedence; checkpoints of another model are never kept."""
    options = ("--mode=import", f"--config.import.path={intact}", "--config.import.check_sentences=0")
    run = run_main(*options, f"--workdir={tmp_path / 'run'}", "--config.decode.beam_size=9")
    assert run.returncode == 0, run.stderr
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["decode"]["beam_size"] == 9
    (tmp_path / "run" / "config.json").unlink()
    run = run_main(*options, f"--workdir={tmp_path / 'run'}")
    assert run.returncode == 2 and "choose another --workdir" in run.stderr
    run = run_main(*options)
    assert run.returncode == 2 and "needs --workdir" in run.stderr


@pytest.mark.slow
def test_a_single_tag_is_kept(tmp_path: Path) -> None:
    ids = examples.marian(tmp_path / "theirs", tags=(">>deu<<",))
    _imported(tmp_path / "theirs", tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (saved["data"]["pairs"], saved["data"]["tags"]) == ("en-deu", "source")
    found = marian.read_folder(tmp_path / "theirs")
    assert found.source.ids[3] == ids[">>deu<<"]


def test_other_architectures_and_used_workdirs_are_refused(intact: Path, tmp_path: Path) -> None:
    shutil.copytree(intact, tmp_path / "other")
    _with("model_type", "bert")(tmp_path / "other")
    run = run_main("--mode=import", f"--config.import.path={tmp_path / 'other'}", f"--workdir={tmp_path / 'run'}")
    assert run.returncode == 2 and "model_type=bert is not supported" in run.stderr
    _with("model_type", "opt")(tmp_path / "other")
    with pytest.raises(UserError, match="language models cannot be imported"):
        read_folder(tmp_path / "other")
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    run = run_main(
        "--mode=import", f"--config.import.path={intact}", f"--workdir={tmp_path / 'run'}", "--config=default"
    )
    assert run.returncode == 2 and "choose another --workdir" in run.stderr

"""Imported models of the T5 family against `transformers`: log-probabilities, gradients, searches, fine-tuning."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from sentencepiece import SentencePieceProcessor
from transformers import T5Tokenizer

from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.importing import t5
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.options import DecodeConfig
from tests.cases import quick_and_slow
from tests.conftest import run_main
from tests.importing import examples
from tests.importing.damage import changed, check_refused
from tests.importing.test_marian import ALPHA, model_of, tokenizer_of

LINES = [
    "translate English to German: the small dog sees a ship .",
    "<2de> my sister reads an old book in the garden . we see the ship the small dog sees a big house .",
    "dog dog house",
    "Ωmega book",
    "in the garden  we see",
]
TARGETS = [
    "der kleine Hund .",
    "liest ein altes Buch im Garten wir sehen ein großes Haus . meine Schwester liest ein altes Buch im Garten .",
    "Haus",
    "wir sehen",
    "ein großes Haus .",
]

VARIANTS: dict[str, dict[str, Any]] = {
    "v1.0": dict(apart=False),
    "v1.1": {},
    "mt5": dict(kind="mt5"),
    "mt5 with one table": dict(kind="mt5", apart=False, feed_forward_proj="gated-silu"),
    "older files": dict(old=True, safe=False),
    "older files of v1.0": dict(old=True, safe=False, apart=False, feed_forward_proj="gelu"),
    "starts from the unknown piece": dict(decoder_start_token_id=2, layer_norm_epsilon=1e-3),
}


QUICK = "v1.0", "v1.1", "mt5 with one table", "starts from the unknown piece"


@pytest.mark.parametrize("options", quick_and_slow(VARIANTS, QUICK))
def test_log_probabilities_of_text(options: dict[str, Any], tmp_path: Path) -> None:
    """From text to log-probabilities, each library with its own tokenizer and ids."""
    model = examples.t5(tmp_path / "theirs", **options)
    found = t5.read_folder(tmp_path / "theirs")
    assert found.model.shared_embeddings == ("inputs" if options.get("apart", True) else "all")
    tokenizer, theirs = tokenizer_of(found, tmp_path / "ours"), T5Tokenizer.from_pretrained(tmp_path / "theirs")
    source, target = tokenizer.encode_source(LINES), tokenizer.encode_target(TARGETS)
    given = [[found.source.ids[token] for token in ours] for ours in source]
    processor = SentencePieceProcessor(model_file=str(tmp_path / "theirs" / "spiece.model"))
    for ids, line in zip(given, LINES, strict=True):
        # The tokenizer of `transformers` drops the "▁" before a tag; the models were trained with SentencePiece itself.
        assert ids == (processor.encode(line, add_eos=True) if "<2de>" in line else theirs(line).input_ids)
    actual = Translator(model_of(found), tokenizer, found.decode).token_log_probs(found.params, ALPHA, source, target)
    for ids, pieces, log_probs in zip(given, target, actual, strict=True):
        labels = [found.target.ids[piece] for piece in pieces]
        inputs = torch.tensor([[model.config.decoder_start_token_id, *labels[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), decoder_input_ids=inputs).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(labels)[:, None])[:, 0]
        np.testing.assert_allclose(log_probs, expected, atol=1e-5)


def test_gradients_are_those_of_pytorch(tmp_path: Path) -> None:
    """Ours are c theirs, with a constant c for each weight. So the gradient of theirs is c times that of ours."""
    theirs = examples.t5(tmp_path)
    found = t5.read_folder(tmp_path)

    def imported(change: Callable[[str, np.ndarray], np.ndarray]) -> Any:
        """Returns the parameters of the folder with other weights."""
        shutil.copytree(tmp_path, tmp_path / "other", dirs_exist_ok=True)
        weights = {name: change(name, array) for name, array in load_file(tmp_path / "model.safetensors").items()}
        save_file(weights, tmp_path / "other" / "model.safetensors")
        return t5.read_folder(tmp_path / "other").params

    source, target = np.random.default_rng(0).integers(3, 60, (2, 3, 12))
    source[:, -1] = target[:, -1] = 1
    labels = torch.tensor(target)
    loss = theirs(input_ids=torch.tensor(source), labels=labels).loss * labels.numel()
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    # Different constants, because equal tables would be shared.
    values = {"shared.weight": 1.0, "lm_head.weight": 2.0}
    twice = imported(lambda name, array: np.full_like(array, values.get(name, 1.0)))
    factors = twice | {"embedding": twice["embedding"] | {"output": twice["embedding"]["output"] / 2}}
    expected = jax.tree.map(lambda g, c: g / c**2, imported(lambda name, array: gradients[name]), factors)

    model, (ours_source, ours_target) = model_of(found), (np.argsort(found.source.ids)[ids] for ids in (source, target))

    @jax.jit
    def total(params: Any) -> jax.Array:
        logits = model(params, ours_source, decoder_inputs(jnp.asarray(ours_target)), ALPHA)
        return model.output(params).nll(logits, jnp.asarray(ours_target))[0].sum()

    actual = jax.grad(total)(found.params)
    assert float(total(found.params)) == pytest.approx(float(loss.detach()), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max()), actual, expected)


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.slow
def test_searches_find_the_same_tokens(beam_size: int, tmp_path: Path) -> None:
    """The search has two rows, so sentences start at any place of the cache."""
    model = examples.t5(tmp_path / "theirs")
    found = t5.read_folder(tmp_path / "theirs")
    tokenizer, longest = tokenizer_of(found, tmp_path / "ours"), 40
    decode = DecodeConfig(
        beam_size=beam_size,
        length_penalty=1.0,
        max_length_a=0.0,
        max_length_b=longest,
        min_length=0,
        no_repeat_ngram=2,  # untrained models would repeat one token
        batch_tokens=2 * 64 * beam_size,
        streams=1,
    )
    ours = Translator(model_of(found), tokenizer, decode).translate(found.params, ALPHA, LINES)
    compared = 0
    for source, (best, *_) in zip(tokenizer.encode_source(LINES), ours, strict=True):
        # `max_length` counts the first input of the decoder and EOS. There, EOS is forced and not counted in the score,
        # so only translations that end before it are comparable.
        (tokens,) = model.generate(
            torch.tensor([[found.source.ids[token] for token in source]]),
            num_beams=beam_size,
            max_length=longest + 2,
            length_penalty=1.0,
            no_repeat_ngram_size=2,
            early_stopping=beam_size > 1,
            bad_words_ids=[[0]],
            use_cache=False,  # theirs has as many layers as the encoder
        )
        if len(tokens) < longest + 2:
            assert [found.target.ids[token] for token in best.tokens] == tokens[1:].tolist()
            compared += len(best.tokens)
    assert compared > 10


@pytest.mark.slow
def test_imported_and_fine_tuned(tmp_path: Path) -> None:
    """The import compares log-probabilities; then one epoch of the imported model, and an export with its own check."""
    examples.t5(tmp_path / "theirs")
    run = run_main("--mode=import", f"--config.import.path={tmp_path / 'theirs'}", f"--workdir={tmp_path / 'parent'}")
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "parent" / "import.json").read_text())["largest_difference"] < 1e-4
    (tmp_path / "text").mkdir()
    for split in ("train", "valid", "test"):
        for lang, lines in (("en", LINES[:3]), ("de", TARGETS[:3])):
            (tmp_path / "text" / f"{split}.{lang}").write_text("\n".join(lines * 40) + "\n", encoding="utf-8")
    run = run_main(
        f"--config=configs/saved.py:{tmp_path / 'parent' / 'config.json'}",
        f"--config.train.finetune_from={tmp_path / 'parent'}",
        f"--config.data.path={tmp_path / 'text'}",
        f"--workdir={tmp_path / 'child'}",
        "--config.train.steps=0",
        "--config.train.epochs=1",
        "--config.train.warmup_steps=2",
        "--config.train.eval_every=5",
        "--config.train.batch_tokens=512",
        "--config.train.learning_rate=3e-3",
    )
    assert run.returncode == 0, run.stderr
    losses = [json.loads(line)["nll"] for line in (tmp_path / "child" / "validation.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.3
    run = run_main("--mode=translate", f"--workdir={tmp_path / 'child'}", stdin="\n".join(LINES))
    assert run.returncode == 0 and len(run.stdout.splitlines()) == len(LINES), run.stderr
    run = run_main("--mode=export", f"--workdir={tmp_path / 'child'}")
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "child" / "export" / "ctranslate2"
    assert (folder / "model.bin").exists()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5") / "intact"
    examples.t5(folder)
    return folder


_with = functools.partial(changed, "config.json")


def _weights(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Path], Any]:
    return lambda folder: save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


TABLE = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"

BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "no SentencePiece": (lambda folder: (folder / "spiece.model").unlink(), "spiece.model: No such file"),
    "another SentencePiece": (lambda folder: (folder / "spiece.model").write_bytes(b"no model"), "not a SentencePiece"),
    "no table": (_weights(lambda weights: {k: v for k, v in weights.items() if k != TABLE}), f"contain no '{TABLE}'"),
    "no embeddings": (
        _weights(lambda weights: weights | {"shared.weight": weights[TABLE]}),
        "'shared.weight' has shape",
    ),
    "tables apart": (
        _weights(lambda weights: weights | {"encoder.embed_tokens.weight": 2 * weights["shared.weight"]}),
        "encoder and decoder have different embeddings",
    ),
    "more weights": (_weights(lambda weights: weights | {"more": weights[TABLE]}), "does not know, such as more"),
    "shape": (_with("d_kv", 4), "has shape"),
    "layers": (_with("num_decoder_layers", 4), "the weights contain no 'decoder.block.3"),
    "activation": (_with("feed_forward_proj", "gated-mish"), "feed_forward_proj=gated-mish is not supported"),
    "start": (_with("decoder_start_token_id", 5), "decoder_start_token_id=5 is not one of"),
    "special pieces": (_with("pad_token_id", 1), "they must be different"),
    "size": (_with("vocab_size", 50), "60 pieces do not fit the model's vocab_size=50"),
    "epsilon": (_with("layer_norm_epsilon", 0.0), "layer_norm_epsilon=0.0 must be between 0 and 1"),
    "type": (_with("num_heads", "x"), "num_heads='x' must be of the type int"),
    "suppressed": (
        lambda folder: (folder / "generation_config.json").write_text('{"suppress_tokens": ["a", null, [1]]}'),
        "suppress_tokens must be a list of whole numbers",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BAD.values(), ids=list(BAD))
def test_bad_folders(damage: Callable[[Path], Any], message: str, intact: Path, tmp_path: Path) -> None:
    check_refused(t5.read_folder, intact, damage, message, tmp_path / "bad")


def test_pieces_of_the_rows_without_text(intact: Path) -> None:
    found = t5.read_folder(intact)
    assert found.source.pieces[-8:] == [
        *(f"<extra_id_{n}>" for n in (4, 3, 2, 1, 0)),
        *(f"<unused_{n}>" for n in (65, 66, 67)),
    ]
    assert sorted(found.source.ids) == list(range(68))

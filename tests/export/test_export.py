"""Runs exported models in their engines and compares the log-probability of every token with ours."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.decoding.translate import Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.export import ctranslate2, fold, huggingface
from branchnorm_jax.export.tokenizers import Vocabulary
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.export import export
from branchnorm_jax.options import Config, DecodeConfig, ExportConfig, ModelConfig
from branchnorm_jax.tokens import EOS
from branchnorm_jax.workdir import Workdir
from tests.cases import quick_and_slow

SMALL = ModelConfig(encoder_layers=3, decoder_layers=2, width=32, ffn_width=48, heads=4, dropout=0.0)
WORDS = 40
PIECES = ["<pad>", "</s>", "<unk>", *(f"w{index}" for index in range(3, WORDS))]
VOCABULARY = Vocabulary(PIECES, PIECES, (b"", b""))
RANDOM = np.random.default_rng(0)
SOURCES = [[*RANDOM.integers(3, WORDS, length).tolist(), EOS] for length in (1, 4, 9, 14)]
TARGETS = [[*RANDOM.integers(3, WORDS, length).tolist(), EOS] for length in (2, 3, 12, 7)]
PLAIN = (
    *("post_ln", "branchnorm", "deepnorm", "mixnorm", "mixnorm_anneal", "rezero_ln", "admin", "ds_init"),
    *("pre_ln", "layerscale", "small_init"),
)
ALPHA = jnp.float32(0.25)


def random_params(model: Transformer, alpha: Any = ALPHA) -> tuple[Any, list[np.ndarray]]:
    """Returns random parameters and our log-probabilities of the targets."""
    params = random_tree(model)
    translator = Translator(model, None, DecodeConfig())  # type: ignore[arg-type] # only text needs a tokenizer
    return params, translator.token_log_probs(params, alpha, SOURCES, TARGETS)


def random_tree(model: Transformer) -> Any:
    leaves, tree = jax.tree.flatten(jax.jit(model.init)(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return jax.tree.unflatten(
        tree, [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def words(sentences: list[list[int]]) -> list[list[str]]:
    return [[PIECES[token] for token in ids[:-1]] for ids in sentences]


def difference(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", quick_and_slow(PLAIN, ("branchnorm", "admin")))
def test_ctranslate2_equals_our_log_probabilities(method: str, tmp_path: Path) -> None:
    model = Transformer(dataclasses.replace(SMALL, method=method), WORDS, WORDS)
    params, ours = random_params(model)
    ctranslate2.write(fold.fold(model, params, ALPHA), model.config, (PIECES, PIECES), tmp_path, 64, "")
    assert difference(ours, ctranslate2.log_probs(tmp_path, words(SOURCES), words(TARGETS))) < 2e-5


OPTIONS: dict[str, dict[str, Any]] = {
    "tables apart": dict(shared_embeddings="none"),
    "gelu and a bias": dict(activation="gelu", output_bias=True),
    "fairseq's positions": dict(positions="fairseq"),
    "learned positions, norm of the embeddings": dict(positions="learned", max_positions=20, embedding_norm=True),
    "starts from padding, without biases": dict(decoder_start="pad", biases=False, shared_embeddings="inputs"),
    "starts from the unknown piece": dict(decoder_start="unk"),
    "fixed norms of words": dict(embedding="fixnorm", shared_embeddings="decoder"),
    "rmsnorm, gated, wider heads": dict(norm="rms_norm", activation="swiglu", head_width=6),
    "relative positions, gated": dict(
        **dict(method="pre_ln", positions="relative", norm="rms_norm", biases=False, activation="geglu_tanh"),
        **dict(relative_buckets=8, relative_distance=20, head_width=3),
    ),
}


@pytest.mark.parametrize("options", quick_and_slow(OPTIONS, list(OPTIONS)[:3]))
def test_model_options_are_exported(options: dict[str, Any], tmp_path: Path) -> None:
    model = Transformer(dataclasses.replace(SMALL, **{"method": "deepnorm", **options}), WORDS, WORDS, (5, 17))
    params, ours = random_params(model)
    ctranslate2.write(fold.fold(model, params, ALPHA), model.config, (PIECES, PIECES), tmp_path, 64, "")
    theirs = ctranslate2.log_probs(tmp_path, words(SOURCES), words(TARGETS))
    for target, a, b in zip(TARGETS, ours, theirs, strict=True):
        used = ~np.isin(target, (5, 17))  # our loss of unused tokens is finite, so only the others are compared
        np.testing.assert_allclose(a[used], b[used], atol=2e-5)
        assert (b[~used] < -1e6).all()


@pytest.mark.parametrize(
    ("method", "tables"),
    [
        ("branchnorm", "none"),
        ("deepnorm", "all"),
        ("post_ln", "inputs"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("branchnorm", "decoder"), ("rezero_ln", "all"))),
    ],
)
def test_hugging_face_equals_our_log_probabilities(method: str, tables: str, tmp_path: Path) -> None:
    model = Transformer(dataclasses.replace(SMALL, method=method, shared_embeddings=tables), WORDS, WORDS)
    params, ours = random_params(model)
    plain = fold.fold(model, params, ALPHA)
    huggingface.write(plain, model.config, DecodeConfig(), VOCABULARY, tmp_path, 64)
    # To remove the embedding scale, the first branch of each stack is divided. This changes the epsilon of its norm.
    assert difference(ours, huggingface.log_probs(tmp_path, SOURCES, TARGETS)) < 5e-5
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["decoder_start_token_id"] == EOS
    # Writing the model does not change the folded weights.
    ctranslate2.write(plain, model.config, (PIECES, PIECES), tmp_path, 64, "")
    assert difference(ours, ctranslate2.log_probs(tmp_path, words(SOURCES), words(TARGETS))) < 2e-5


def test_alpha_per_layer_is_exported(tmp_path: Path) -> None:
    model = Transformer(dataclasses.replace(SMALL, method="branchnorm", alpha_order="bottom_up"), WORDS, WORDS)
    alpha = {"encoder": jnp.array([0.9, 0.4, 0.1]), "decoder": jnp.array([0.7, 0.2])}
    params, ours = random_params(model, alpha)
    ctranslate2.write(fold.fold(model, params, alpha), model.config, (PIECES, PIECES), tmp_path, 64, "")
    assert difference(ours, ctranslate2.log_probs(tmp_path, words(SOURCES), words(TARGETS))) < 2e-5


def test_folding_does_not_change_epsilon() -> None:
    """Folding scales the stream. Dividing the branch by a would change epsilon to epsilon / a^2."""
    model = Transformer(dataclasses.replace(SMALL, method="deepnorm", encoder_layers=18), WORDS, WORDS)
    params, _ = random_params(model)
    plain = fold.fold(model, params, ALPHA)
    before, after = params["encoder"], plain.layers["encoder"]
    np.testing.assert_allclose(after["ffn"]["fc2"]["kernel"], before["ffn"]["fc2"]["kernel"], rtol=1e-6)
    assert not np.allclose(after["ffn"]["fc1"]["kernel"], before["ffn"]["fc1"]["kernel"])


@pytest.mark.parametrize("quantization", quick_and_slow(["int8", "float16"], ["int8"]))
def test_quantised_models_are_close_and_smaller(quantization: str, tmp_path: Path) -> None:
    """Computes in float32, because not every CPU multiplies int8 without overflow."""
    model = Transformer(dataclasses.replace(SMALL, width=64, ffn_width=128), WORDS, WORDS)
    params, ours = random_params(model)
    plain = fold.fold(model, params, ALPHA)
    sizes = {}
    for kind in ("", quantization):
        folder = tmp_path / (kind or "float32")
        folder.mkdir()
        ctranslate2.write(plain, model.config, (PIECES, PIECES), folder, 64, kind)
        sizes[kind] = (folder / "model.bin").stat().st_size
    engine = ctranslate2.imported().Translator(str(tmp_path / quantization), compute_type="float32")
    theirs = [np.array(result.log_probs) for result in engine.score_batch(words(SOURCES), words(TARGETS))]
    assert 0 < difference(ours, theirs) < (0.5 if quantization == "int8" else 0.05)
    assert sizes[quantization] < 0.6 * sizes[""]


def test_methods_that_cannot_be_exported_give_a_reason() -> None:
    for method in METHODS:
        obstacle = fold.obstacle(Transformer(dataclasses.replace(SMALL, method=method), WORDS, WORDS))
        assert bool(obstacle) != (method in FOLDABLE), method
    scaled = Transformer(dataclasses.replace(SMALL, norm="scale_norm"), WORDS, WORDS)
    assert "scale_norm" in fold.obstacle(scaled)
    assert "rotary" in ctranslate2.obstacle(dataclasses.replace(SMALL, positions="rotary"))
    assert not ctranslate2.obstacle(dataclasses.replace(SMALL, positions="relative", norm="rms_norm"))


FOLDABLE = {
    *PLAIN,
    "deepnorm_torchscale",
    "deepnorm_deeploop",
    "completep",
    "depth_mup",
    "admin_log",
    "admin_constant",
    "admin_linear",
    "ds_init_code",
    "pre_scale_norm",
    "prores_post_ln",
    "prores_pre_ln",
    "prores_deepnorm",
}


STOCK: dict[str, dict[str, Any]] = {
    "FSMTForConditionalGeneration": dict(method="deepnorm", positions="fairseq", shared_embeddings="decoder"),
    "BartForConditionalGeneration": dict(
        method="branchnorm", positions="learned", max_positions=20, embedding_norm=True
    ),
    "M2M100ForConditionalGeneration": dict(method="layerscale", positions="fairseq", biases=False),
    "MBartForConditionalGeneration": dict(
        **dict(method="pre_ln", positions="learned", max_positions=20, embedding_norm=True),
        **dict(output_bias=True, shared_embeddings="decoder"),
    ),
    "T5ForConditionalGeneration": dict(
        **dict(method="pre_ln", positions="relative", norm="rms_norm", biases=False, head_width=6),
        **dict(activation="swiglu", shared_embeddings="inputs", relative_buckets=8, relative_distance=20),
    ),
}
"""Class -> options of a model that it can represent."""


@pytest.mark.parametrize("name", quick_and_slow(tuple(STOCK), tuple(STOCK)[:1]))
def test_the_options_select_the_class(name: str, tmp_path: Path) -> None:
    """With unused tokens, for which some classes have no bias, and more learned positions than sentences may have."""
    model = Transformer(dataclasses.replace(SMALL, **STOCK[name]), WORDS, WORDS, (5, 17))
    params, ours = random_params(model)
    plain = fold.fold(model, params, ALPHA)
    ids = huggingface.write(plain, model.config, DecodeConfig(), VOCABULARY, tmp_path, 16)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
    sides = zip(ids, (SOURCES, TARGETS), strict=True)
    theirs = huggingface.log_probs(tmp_path, *([side[line].tolist() for line in lines] for side, lines in sides))
    for target, a, b in zip(TARGETS, ours, theirs, strict=True):
        used = ~np.isin(target, (5, 17))
        np.testing.assert_allclose(a[used], b[used], atol=5e-5)
        assert (b[~used] < -1e6).all()


@pytest.mark.slow
def test_hugging_face_rejects_models_that_no_class_can_represent() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"method": "pre_ln"}, "MarianMTModel cannot have Pre-LN; M2M100.* cannot have model.positions=marian$"),
        ({"positions": "learned"}, "BartForConditionalGeneration always has a norm after the embeddings"),
        ({"method": "admin"}, "MarianMTModel cannot have a factor per feature in the first skip connection$"),
        ({"method": "pre_ln", "positions": "learned"}, "MBart.* always has a norm after the embeddings$"),
        ({**STOCK["T5ForConditionalGeneration"], "output_bias": True}, "T5.* cannot have a bias of the logits$"),
    ]
    for changes, message in cases:
        model = Transformer(dataclasses.replace(SMALL, **changes), WORDS, WORDS)
        with pytest.raises(UserError, match=message):
            huggingface.fitting(fold.fold(model, random_tree(model), ALPHA), model.config)


def test_exported_models_respect_nbest_and_min_length(tmp_path: Path) -> None:
    """The model always prefers EOS, so a translation has exactly `min_length` tokens before EOS in both engines."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = Transformer(dataclasses.replace(SMALL, output_bias=True), WORDS, WORDS)
    plain = fold.fold(model, random_params(model)[0], ALPHA)
    plain = plain._replace(bias=plain.bias + 100 * (np.arange(WORDS) == EOS).astype(np.float32))
    for shortest in (0, 1, 3):
        decode = DecodeConfig(beam_size=4, nbest=2, min_length=shortest)
        huggingface.write(plain, model.config, decode, VOCABULARY, tmp_path, 64)
        theirs = transformers.MarianMTModel.from_pretrained(tmp_path)
        translations = theirs.generate(torch.tensor([SOURCES[1]])).tolist()
        assert len(translations) == 2
        best = translations[0][1:]  # without the token that decoding starts with
        assert best.index(EOS) == shortest
        ctranslate2.write(plain, model.config, (PIECES, PIECES), tmp_path, 64, "")
        settings = ctranslate2.search_settings(decode, 64)
        (other,) = ctranslate2.imported().Translator(str(tmp_path)).translate_batch(words(SOURCES[1:2]), **settings)
        assert len(other.hypotheses[0]) == shortest


def export_config(trained: Path, folder: Path, lines: int, **decode: Any) -> Config:
    """Returns the config of a run with the options that export it to a folder."""
    config = configs.load(trained / "config.json")
    return dataclasses.replace(
        config,
        decode=dataclasses.replace(config.decode, **decode),
        export=ExportConfig(path=str(folder), check_lines=lines),
    )


def test_check_skips_pairs_longer_than_the_exported_maximum(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short: dict[str, Any] = dict(max_length_a=0.0, max_length_b=4, max_input_length=28)
    export(export_config(trained, tmp_path / "out", 40, temperature=1.0, **short), Workdir(trained))
    log = capsys.readouterr().err
    assert (tmp_path / "out" / "model.bin").exists()
    skipped = re.search(r"skips (\d+) of 40 validation pairs .* exported model's maximum, 28 tokens", log)
    assert skipped and 0 < int(skipped[1]) < 40
    assert f"over {40 - int(skipped[1])} validation pairs" in log
    assert "decode.temperature is not exported" in log


def test_nothing_is_written_if_no_pair_fits(trained: Path, tmp_path: Path) -> None:
    short: dict[str, Any] = dict(max_length_a=0.0, max_length_b=1, max_input_length=4)
    with pytest.raises(UserError, match=r"first 2 validation pairs.*decode\.max_input_length.*export\.check_lines=0"):
        export(export_config(trained, tmp_path / "out", 2, **short), Workdir(trained))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["folder", "file", "here"])
def test_existing_files_are_not_replaced(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    monkeypatch.chdir(mine)
    there = {"folder": mine, "file": mine / "thesis.txt", "here": Path()}[which]
    with pytest.raises(UserError, match=r"export\.path=.*it exists and is not an empty folder"):
        export(export_config(trained, there, 2), Workdir(trained))
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_earlier_export_in_the_workdir_is_replaced(trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    config = export_config(trained, tmp_path, 0)
    config = dataclasses.replace(config, export=dataclasses.replace(config.export, path=""))
    for _ in range(2):
        export(config, Workdir(run))
        assert not (run / "export" / "ctranslate2" / "old").exists()
        (run / "export" / "ctranslate2" / "old").touch()

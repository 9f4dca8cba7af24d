"""A run that starts from the vocabulary, parameters and alpha of another run."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from branchnorm_jax import config as configs
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.tags import new_languages
from branchnorm_jax.data.tokenizer import Tokenizer, load_tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.model import growth
from branchnorm_jax.model.coefficients import uniform
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.runs import sweep
from branchnorm_jax.options import Config, ModelConfig, SweepConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training import logs, loop, schedules
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.finetune import corpus_of, first_parameters
from branchnorm_jax.training.network import make_model
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir
from tests.conftest import HASTY, run_main

DEEPER = (
    "--config.model.encoder_layers=4",
    "--config.model.decoder_layers=4",
    "--config.model.grown_from=2L-2L",
    "--config.model.alpha_steps=20",
)
"""Options of a child with twice the layers of `trained`."""


def child_of(parent: Path, which: str = "last", model: dict[str, Any] | None = None, **train: Any) -> Config:
    """Returns the parent's config with other text and new training. The learning rate is 0 unless `train` sets it."""
    config = configs.load(parent / "config.json")
    frozen = {"steps": 2, "learning_rate": 0.0, "warmup_init": 0.0}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **(model or {})),
        data=dataclasses.replace(config.data, numerals_pairs=200),
        train=dataclasses.replace(config.train, **{"finetune_from": f"{parent}:{which}"} | frozen | train),
    )


def read(workdir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


@pytest.mark.slow
def test_child_starts_with_vocabulary_parameters_and_alpha_of_the_parent(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 10 updates with T = 40, alpha is 0.25. It continues from 0.25 with T = 400. Rate 0 changes no parameter."""
    parent_config = configs.load(trained / "config.json")
    parent_config = dataclasses.replace(
        parent_config,
        model=dataclasses.replace(parent_config.model, alpha_steps=40),
        train=dataclasses.replace(parent_config.train, steps=10),
    )
    parent, child = Workdir(tmp_path / "parent"), Workdir(tmp_path / "child")
    loop.train(parent_config, parent)
    config = child_of(parent.path, "10", model={"dropout": 0.3, "alpha_steps": 400}, ema_decay=0.9)
    loop.train(config, child)
    assert (child / "vocabulary" / "source.model").read_bytes() == (parent / "vocabulary" / "source.model").read_bytes()
    _, model = network(config, child)
    params, _, _ = restore_model(parent_config, parent, model, "10")
    child_params, _, step = restore_model(config, child, model, "last")
    assert step == 2
    jax.tree.map(np.testing.assert_array_equal, child_params, params)
    alphas = [line["alpha"] for line in read(child.path, "metrics.jsonl")]
    np.testing.assert_allclose(alphas, [100 / 400, 101 / 400], rtol=1e-6)
    # The same mean, but more in the encoder and less in the decoder.
    capsys.readouterr()
    other = child_of(parent.path, "10", model={"alpha_steps": 400, "alpha_end": "2/sqrt(n)"})
    first_parameters(other, model, make_mesh(config.parallel))
    assert "but not its values in some layers" in capsys.readouterr().err


@pytest.mark.slow
def test_child_continues_from_the_loss_of_the_parent(trained: Path, tmp_path: Path) -> None:
    """On the same text, the first loss is near the parent's last loss, and the child's last loss is below it."""
    config = dataclasses.replace(
        child_of(trained, steps=40, learning_rate=5e-3, eval_every=10),
        data=configs.load(trained / "config.json").data,
    )
    loop.train(config, Workdir(tmp_path / "child"))
    last = read(trained, "validation.jsonl")[-1]["loss"]
    untrained, first = (read(run, "metrics.jsonl")[0]["loss"] for run in (trained, tmp_path / "child"))
    assert abs(first - last) < 0.5 * (untrained - last)
    assert read(tmp_path / "child", "validation.jsonl")[-1]["loss"] < last


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [pytest.param(("finetune_from",), id="fine-tuned"), pytest.param(("deepen_from", *DEEPER), id="deepened")],
)
def test_children_on_a_mesh_equal_those_on_one_device(trained: Path, tmp_path: Path, start: tuple[str, ...]) -> None:
    """No device holds all parameters of the parent, so the state takes their memory over."""
    option, *further = start
    losses = []
    for fsdp in (1, 2):
        child = tmp_path / str(fsdp)
        done = run_main(
            *HASTY, *further, f"--workdir={child}", f"--config.train.{option}={trained}", "--config.train.steps=3",
            f"--config.parallel.fsdp={fsdp}", "--config.model.dropout=0", devices=fsdp,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "donated" not in done.stderr
        losses.append([line["loss"] for line in read(child, "metrics.jsonl")])
    alone, split = losses
    np.testing.assert_allclose(split, alone, rtol=1e-5)


@pytest.mark.slow
def test_parent_may_be_deleted_after_the_first_checkpoint(trained: Path, tmp_path: Path) -> None:
    parent = shutil.copytree(trained, tmp_path / "parent")
    config, child = child_of(parent, learning_rate=1e-3), Workdir(tmp_path / "child")
    loop.train(config, child)
    shutil.rmtree(parent)
    loop.train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4)), child)
    assert json.loads((child / "status.json").read_text())["step"] == 4


@pytest.mark.slow
def test_vocabulary_of_the_parent_replaces_an_earlier_one(trained: Path, tmp_path: Path) -> None:
    """A vocabulary that `prepare` made earlier, for a plan or preflight, does not fit the parent's parameters."""
    config, child = child_of(trained), Workdir(tmp_path / "child")
    child.create()
    other = dataclasses.replace(config.data, vocab_size=200)
    before = prepare(other, child.path, logs.say).tokenizer.sha256
    loop.train(config, child)
    assert child.data_identity()["vocabulary"] == Workdir(trained).data_identity()["vocabulary"] != before


def test_unused_pieces_follow_the_new_text_at_every_start(trained: Path, tmp_path: Path) -> None:
    config, child = child_of(trained), Workdir(tmp_path / "child")
    child.create()
    unused = [corpus_of(config, child).tokenizer.unused_target for _ in range(2)]
    assert unused[0] == unused[1] != load_tokenizer(trained / "vocabulary").unused_target
    used = np.unique(corpus_of(config, child).train.stores[0].target_tokens)
    assert not set(unused[0]) & set(used.tolist())


def test_child_must_keep_the_language_tags_of_the_parent(trained: Path, tmp_path: Path) -> None:
    parent = shutil.copytree(trained, tmp_path / "parent")
    untagged = configs.load(parent / "config.json")
    tagged = dataclasses.replace(untagged, data=dataclasses.replace(untagged.data, pairs="en-de,de-en", tags="both"))
    (parent / "config.json").write_text(configs.to_json(tagged))
    config, child = child_of(parent), Workdir(tmp_path / "child")
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"pairs": ""}, "set data.pairs"),
        ({"tags": "source"}, r"set data\.tags=both here"),
    ]
    for changed, message in mistakes:
        with pytest.raises(UserError, match=message):
            loop.train(dataclasses.replace(config, data=dataclasses.replace(config.data, **changed)), child)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"ffn_width": 32, "method": "deepnorm"},
            r"has a different model; set model\.ffn_width=24 model\.method=branchnorm",
        ),
        ({"positions": "fairseq"}, r"has a different model; set model\.positions=marian"),
        ({"family": "decoder"}, "is encoder-decoder, that of the new run decoder; name another run"),
    ],
)
def test_different_models_are_rejected(trained: Path, tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loop.train(child_of(trained, model=model), Workdir(tmp_path / "child"))


def test_no_layer_of_a_child_has_a_smaller_alpha_than_the_parent_at_the_end(trained: Path, tmp_path: Path) -> None:
    """The parent, 2L-2L, ends at 1. The child's encoder of 4 sub-layers does, too, but not its decoder of 6."""
    message = r"alpha of decoder layer 1 is 1 in .*, but ends at 0.816 here; set model.alpha_end=7/cbrt\(n\)"
    with pytest.raises(UserError, match=message):
        loop.train(child_of(trained, model={"alpha_end": "2/sqrt(n)"}), Workdir(tmp_path / "child"))


def test_alpha_must_not_begin_above_that_of_the_parent(trained: Path, tmp_path: Path) -> None:
    parent = configs.load(trained / "config.json")
    # The clock of this parent has reached a fifth of T.
    parent = dataclasses.replace(parent, model=dataclasses.replace(parent.model, alpha_steps=100))
    before, child = Workdir(tmp_path / "parent"), Workdir(tmp_path / "child")
    loop.train(dataclasses.replace(parent, train=dataclasses.replace(parent.train, steps=20)), before)
    message = r"alpha is 0.2 in .*, but begins at 0.\d+ here; set model.alpha_start= model.alpha_order=equal"
    for model in ({"alpha_start": "0.6"}, {"alpha_order": "fix_sqrt_L"}):
        with pytest.raises(UserError, match=message):
            loop.train(child_of(before.path, model=model), child)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained parent with the tags de and en, an unshared vocabulary and an output bias."""
    values = configs.default_config("1L-1L")
    values.model.update(width=16, ffn_width=16, heads=2, shared_embeddings="none", output_bias=True)
    values.data.update(pairs="en-de,de-en", tags="each", numerals_pairs=200, vocab_size=300, shared_vocab=False)
    values.train.update(batch_tokens=1024, eval_bleu_sentences=2, best_metric="loss")
    config, workdir = configs.from_config_dict(values), Workdir(tmp_path_factory.mktemp("tagged") / "run")
    workdir.create()
    tokenizer = prepare(config.data, workdir.path, logs.say).tokenizer
    model = make_model(config.model, tokenizer)
    params = jax.jit(model.init)(jax.random.key(0))
    params["embedding"]["bias"] = jax.random.normal(jax.random.key(1), params["embedding"]["bias"].shape)
    checkpoints = Checkpoints(workdir.stored("checkpoints"), config.train, logs.say)
    checkpoints.save_params(0, params, uniform(0.5, model.depth), {})
    (workdir / "data.json").write_text(json.dumps({"vocabulary": tokenizer.sha256}))
    (workdir / "config.json").write_text(configs.to_json(config))
    return workdir.path


def without(array: Any, axis: int) -> np.ndarray:
    """Removes the entries of the two new tags."""
    return np.delete(np.asarray(array), np.array([5, 6]), axis)


def test_new_languages_get_tags(tagged: Path, tmp_path: Path) -> None:
    """Text has the same pieces as before; old languages have the same probabilities, up to that of the new tags."""
    config, child = child_of(tagged), Workdir(tmp_path / "child")
    pairs = dataclasses.replace(config.data, pairs="cs-fr,en-de")
    config = dataclasses.replace(config, data=pairs)
    child.create()
    corpus = corpus_of(config, child)
    parent, old = network(configs.load(tagged / "config.json"), Workdir(tagged))
    new = corpus.tokenizer
    assert (parent.languages, new.languages) == (["de", "en"], ["de", "en", "cs", "fr"])
    assert sorted(set(new.target_pieces) - set(parent.target_pieces)) == [">>cs<<", ">>fr<<"]
    lines = ["twenty-one", "zwölf", "eight"]
    for encode, again in ((parent.encode_source, new.encode_source), (parent.encode_target, new.encode_target)):
        assert [[i + 2 * (i > 4) for i in ids] for ids in encode(lines)] == again(lines)
    assert new.decode_target(new.encode_target(["zwölf"])[0]) == "zwölf"
    assert not new.spm[0].is_unknown(new.source_pieces.index(">>fr<<"))
    assert new.tags(config.data, "cs", "fr") == ((5,), (6,))
    assert [new.source_pieces[5], new.target_pieces[6]] == [">>cs<<", ">>fr<<"]

    model = make_model(dataclasses.replace(config.model, mask_unused=False), new)
    old = dataclasses.replace(old, unused=())
    params, _ = first_parameters(config, model, make_mesh(config.parallel))
    old_params, alpha, _ = restore_model(config, Workdir(tagged), old, "last")
    for name, table in params["embedding"].items():
        rows = np.asarray(old_params["embedding"][name])
        np.testing.assert_array_equal(without(table, 0), rows)
        np.testing.assert_allclose(table[5:7], [rows[3:5].mean(0)] * 2, rtol=1e-6, atol=1e-8)

    def logits(model: Transformer, params: Params, tokenizer: Tokenizer) -> np.ndarray:
        ids = []
        for source, target in (("en", "de"), ("de", "en")):
            tags = tokenizer.tags(config.data, source, target)
            texts = tokenizer.encode_source(["twenty-one"])[0], tokenizer.encode_target(["acht zwölf"])[0]
            ids.append([[*tag, *text] for tag, text in zip(tags, texts, strict=True)])
        sources, targets = (jnp.array(side) for side in zip(*ids, strict=True))
        return np.asarray(model(params, sources, decoder_inputs(targets), alpha), np.float64)

    before, after = logits(old, old_params, parent), logits(model, params, new)
    np.testing.assert_allclose(without(after, 2), before, atol=1e-6)
    change = logsumexp(after, axis=-1) - logsumexp(before, axis=-1)
    np.testing.assert_allclose(change, np.log1p(np.exp(after[..., 5:7]).sum(-1) / np.exp(before).sum(-1)), atol=1e-6)
    # If the new rows are masked, the probabilities are those of the parent.
    masked = logits(dataclasses.replace(model, unused=(5, 6)), params, new)
    assert np.isneginf(masked[..., 5:7]).all()
    np.testing.assert_array_equal(without(masked, 2), without(after, 2))


@pytest.mark.slow
def test_new_languages_are_trained_and_translated(tagged: Path, tmp_path: Path) -> None:
    config = child_of(tagged, learning_rate=1e-3)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, pairs="en-fr,en-de"))
    loop.train(config, child := Workdir(tmp_path / "child"))
    translations = run_main(
        "--mode=translate", f"--workdir={child.path}", stdin=">>fr<< twenty-one\n>>de<< twenty-one\n"
    )
    assert translations.returncode == 0, translations.stderr
    assert len(translations.stdout.splitlines()) == 2
    grandchild = child_of(child.path)
    grandchild = dataclasses.replace(grandchild, data=dataclasses.replace(grandchild.data, pairs="en-pl"))
    loop.train(grandchild, Workdir(tmp_path / "grandchild"))
    assert load_tokenizer(tmp_path / "grandchild" / "vocabulary").languages == ["de", "en", "fr", "pl"]


def test_another_code_of_a_known_language_is_no_new_language() -> None:
    assert new_languages(["deu_Latn", "fra_Latn"], ["fra_Latn", "glg_Latn", "fra_CA"]) == ["glg_Latn", "fra_CA"]
    assert new_languages(["de", "fr_CA"], ["gl", "fr_CA"]) == ["gl"]
    with pytest.raises(UserError, match="the vocabulary has no language 'de', but deu_Latn; use that name"):
        new_languages(["deu_Latn", "fra_Latn"], ["fra_Latn", "de"])
    # The tokenizers of NLLB and mBART would take another name for a piece of text.
    with pytest.raises(UserError, match="have names such as deu_Latn, fra_Latn; so must 'gl'"):
        new_languages(["deu_Latn", "fra_Latn"], ["gl"])


def test_parent_without_tags_rejects_language_pairs(trained: Path, tmp_path: Path) -> None:
    config = child_of(trained)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, pairs="en-de,de-en"))
    with pytest.raises(UserError, match=r"has no language tags; leave data\.pairs empty"):
        loop.train(config, Workdir(tmp_path / "child"))


def test_sweep_checks_every_run_before_the_first_starts(trained: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(child_of(trained), sweep=SweepConfig(grid="method=branchnorm,post_ln"))
    with pytest.raises(UserError, match=r"sweep\.grid: post_ln: .* set model\.method=branchnorm here"):
        sweep(config, Workdir(tmp_path / "sweep"))
    assert not (tmp_path / "sweep").exists()


def test_invalid_parents_are_rejected(trained: Path, tmp_path: Path) -> None:
    run = Workdir(tmp_path / "child")
    for name, message in (
        (str(tmp_path), "no training run in this folder"),
        (f"{trained}:7", "no checkpoint of step 7; the existing steps are"),
        (f"{trained}:newest", "unknown checkpoint 'newest'; use best, last"),
        (":7", "no workdir given"),
    ):
        with pytest.raises(UserError, match=message):
            loop.train(child_of(trained, finetune_from=name), run)
        assert not (run / "vocabulary").exists(), "the error must come before any text is prepared"
    copied = shutil.copytree(trained, tmp_path / "copied")
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(UserError, match="this is the --workdir of the new run"):
        loop.train(child_of(trained, finetune_from=str(copied)), Workdir(copied))


@settings(max_examples=25)
@given(
    schedule=st.sampled_from(["linear", "exp", "sigmoid", "adaptive"]),
    order=st.sampled_from(["equal", "bottom_up", "top_down", "progressive"]),
    steps=st.integers(1, 500),
    clock=st.integers(0, 1000),
)
def test_clock_at_inverts_alpha(schedule: str, order: str, steps: int, clock: int) -> None:
    """Returns the first clock with this alpha. It is an earlier clock only where alpha is constant in between."""
    model = ModelConfig(
        encoder_layers=3, decoder_layers=5, alpha_schedule=schedule, alpha_order=order, alpha_steps=steps
    )
    alpha = jax.jit(growth.alpha(model))
    first = schedules.clock_at(model, alpha(jnp.int32(clock)))
    assert first <= min(clock, steps)
    jax.tree.map(np.testing.assert_array_equal, alpha(jnp.int32(first)), alpha(jnp.int32(clock)))


def test_clock_at_accepts_alpha_of_another_schedule() -> None:
    """Halfway through T = 1000 is halfway through T = 100."""
    alpha = growth.alpha(ModelConfig(alpha_steps=1000))(jnp.int32(500))
    assert schedules.clock_at(ModelConfig(alpha_steps=100), alpha) == 50

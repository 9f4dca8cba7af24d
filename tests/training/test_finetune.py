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

from branchnorm_jax import config as configs
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.tokenizer import load_tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.model import growth
from branchnorm_jax.modes.runs import sweep
from branchnorm_jax.options import Config, ModelConfig, SweepConfig
from branchnorm_jax.training import logs, loop, schedules
from branchnorm_jax.training.finetune import corpus_of
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir


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
def test_child_starts_with_vocabulary_parameters_and_alpha_of_the_parent(trained: Path, tmp_path: Path) -> None:
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
    values = json.loads((parent / "config.json").read_text())
    values["data"] |= {"pairs": "en-de,de-en", "tags": "both"}
    (parent / "config.json").write_text(json.dumps(values))
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
    ],
)
def test_different_models_are_rejected(trained: Path, tmp_path: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loop.train(child_of(trained, model=model), Workdir(tmp_path / "child"))


def test_parent_without_tags_rejects_language_pairs(trained: Path, tmp_path: Path) -> None:
    config = child_of(trained)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, pairs="en-de,de-en"))
    with pytest.raises(UserError, match=r"has no language tags; leave data\.pairs empty"):
        loop.train(config, Workdir(tmp_path / "child"))


def test_sweep_checks_every_run_before_the_first_starts(trained: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(child_of(trained), sweep=SweepConfig("method=branchnorm,post_ln"))
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


@settings(max_examples=25, deadline=None)
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

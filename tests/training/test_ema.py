"""The moving average of the parameters: its values, and its use by validation and by readers of a run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.analysis.estimate import peak_bytes
from branchnorm_jax.analysis.plan import make_plan
from branchnorm_jax.data.batches import make_plans
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.common import load
from branchnorm_jax.options import Config, DataConfig, ModelConfig, ParallelConfig, PlanConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training import logs, loop
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.digests import sha256
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, abstract_state, init_state
from branchnorm_jax.training.step import loss_sums, make_train_step
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir

MODEL = ModelConfig(encoder_layers=2, decoder_layers=2, width=16, ffn_width=24, heads=2, alpha_steps=40)
TRAIN = TrainConfig(steps=20, learning_rate=1e-2, warmup_steps=5, ema_decay=0.5)
WORDS = 40


def batch_of(seed: int) -> Batch:
    return Batch(*jax.random.randint(jax.random.key(seed), (2, 8, 12), 3, WORDS))


def fresh(config: Config) -> tuple[Any, TrainState]:
    """Returns the update function and the state before the first update."""
    model, optimizer = Transformer(config.model, WORDS, WORDS), make_optimizer(config.train)
    mesh = make_mesh(ParallelConfig())
    state = init_state(model, optimizer, mesh, 0, batch_of(0), bool(config.train.ema_decay))
    return jax.jit(make_train_step(model, optimizer, config), donate_argnums=0), state


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]).astype(np.float64)


@pytest.mark.parametrize(
    ("model", "train", "empty"),
    [
        pytest.param({}, {"accumulation": 2, "clip_norm": 1.0}, (), id="accumulation"),
        pytest.param({}, {"nonfinite": "skip"}, (4, 9), id="skip"),
        pytest.param({"remat": "nested"}, {"update_in_backward": True}, (), id="in_backward"),
    ],
)
@pytest.mark.slow
def test_average_equals_its_closed_form(model: dict[str, Any], train: dict[str, Any], empty: tuple[int, ...]) -> None:
    """The average is sum_k share_k prod_(j > k) (1 - share_j) theta_k over all updates k.

    The initial parameters have share 1. The loss of an `empty` batch is 0 / 0, which is not finite: its update is
    skipped and has share 0.
    """
    config = Config(model=dataclasses.replace(MODEL, **model), train=dataclasses.replace(TRAIN, **train))
    step, state = fresh(config)
    thetas, shares = [flat(state.params)], [1.0]
    np.testing.assert_array_equal(flat(state.ema), thetas[0])
    for t in range(14):
        batch = batch_of(t)
        state, _ = step(state, jax.tree.map(jnp.zeros_like, batch) if t in empty else batch)
        thetas.append(flat(state.params))
        shares.append(0.0 if t in empty else 1 - min(0.5, (1 + t) / (10 + t)))
    left = np.append(np.cumprod(1 - np.array(shares[:0:-1]))[::-1], 1.0)
    expected = (np.array(shares) * left) @ np.array(thetas)
    assert (shares[1], shares[-1]) == (0.9, 0.5)
    # Each update rounds three times, and each later update halves these errors.
    bound = 6 * np.finfo(np.float32).eps * np.abs(thetas).max()
    np.testing.assert_allclose(flat(state.ema), expected, rtol=0, atol=bound)
    assert np.abs(expected - thetas[-1]).max() > 1000 * bound


@pytest.mark.slow
def test_state_without_ema_is_unchanged() -> None:
    """It has no additional leaf and the same digest."""
    config = Config(model=MODEL, train=dataclasses.replace(TRAIN, ema_decay=0.0))
    state = fresh(config)[1]
    averaged = fresh(Config(model=MODEL, train=TRAIN))[1]
    assert len(jax.tree.leaves(averaged)) == len(jax.tree.leaves(state)) + len(jax.tree.leaves(state.params))
    assert state.eval_params is state.params
    assert sha256(dataclasses.replace(averaged, ema=None)) == sha256(state) != sha256(averaged)


RUN = Config(
    model=dataclasses.replace(MODEL, dropout=0.1),
    data=DataConfig(numerals_pairs=600, vocab_size=300, max_length=128, batch_shapes=1),
    train=TrainConfig(
        steps=20,
        batch_tokens=1024,
        learning_rate=5e-3,
        warmup_steps=5,
        ema_decay=0.9,
        eval_every=0,
        eval_bleu_sentences=0,
        best_metric="loss",
        checkpoint_every=10,
        log_every=1,
    ),
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Workdir:
    """Returns the workdir of an uninterrupted run of 20 updates."""
    workdir = Workdir(tmp_path_factory.mktemp("ema"))
    loop.train(RUN, workdir)
    return workdir


def lines(workdir: Workdir, name: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (workdir / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in records]


def state_of(workdir: Workdir) -> TrainState:
    _, model = network(RUN, workdir)
    abstract = abstract_state(model, make_optimizer(RUN.train), make_mesh(ParallelConfig()), ema=True)
    checkpoints = Checkpoints(workdir / "checkpoints", RUN.train, logs.say, read_only=True)
    restored = checkpoints.restore_latest(abstract)
    assert restored is not None
    return restored[0]


@pytest.mark.slow
def test_resumed_run_is_bit_for_bit_equal(uninterrupted: Workdir, tmp_path: Path) -> None:
    workdir = Workdir(tmp_path)
    loop.train(dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, steps=10)), workdir)
    loop.train(RUN, workdir)
    status, other = (json.loads((folder / "status.json").read_text()) for folder in (workdir, uninterrupted))
    assert status["state_sha256"] == other["state_sha256"]
    assert lines(workdir, "metrics.jsonl") == lines(uninterrupted, "metrics.jsonl")
    np.testing.assert_array_equal(flat(state_of(workdir)), flat(state_of(uninterrupted)))


@pytest.mark.slow
def test_validation_and_restored_models_use_the_average(uninterrupted: Workdir) -> None:
    """Validation and restored models use the average, not the parameters that training continues from."""
    _, model = network(RUN, uninterrupted)
    state = state_of(uninterrupted)
    assert state.ema is not None
    assert np.abs(flat(state.ema) - flat(state.params)).max() > 1e-3
    for which in ("last", "best", "20"):
        params, alpha, step = restore_model(RUN, uninterrupted, model, which)
        np.testing.assert_array_equal(flat(params), flat(state.ema))
        assert ({float(x) for values in alpha.values() for x in values}, step) == ({20 / 40}, 20)
    corpus = prepare(RUN.data, uninterrupted.path, logs.say)
    _, (valid,) = make_plans(RUN.data, corpus.train, corpus.valid, RUN.train.batch_tokens, RUN.train.seed)
    sums = jax.jit(lambda params, batch: loss_sums(model, params, batch, alpha, 0.1)[0])

    def loss(params: Any) -> float:
        parts = [sums(params, Batch(*map(jnp.asarray, batch))) for batch in valid.in_order()]
        return float(sum(part.loss for part in parts) / sum(part.tokens for part in parts))

    (validation,) = lines(uninterrupted, "validation.jsonl")
    assert validation["loss"] == pytest.approx(loss(state.ema), rel=1e-5)
    assert validation["loss"] != pytest.approx(loss(state.params), rel=1e-3)


@pytest.mark.slow
def test_translation_needs_only_the_average(uninterrupted: Workdir) -> None:
    """The run computes BLEU from its own translations, which equal the translations of the restored model."""
    corpus = prepare(RUN.data, uninterrupted.path, logs.say)
    run = loop.Run(RUN, uninterrupted, "", corpus, make_mesh(RUN.parallel), lambda needed: "")
    run.state = dataclasses.replace(run.state, params={})
    (scores,) = run.validator.scores(run.state, 2, lambda: None).values()
    assert all(np.isfinite(score) for score in scores.values())
    trained = load(RUN, uninterrupted)
    np.testing.assert_array_equal(flat(trained.params), flat(run.state.ema))


@pytest.mark.slow
def test_plan_includes_the_average() -> None:
    run = Config(
        model=dataclasses.replace(MODEL, width=64, ffn_width=256, remat="full"),
        data=DataConfig(vocab_size=400, max_length=32),
        train=dataclasses.replace(TRAIN, batch_tokens=256, update_in_backward=True),
        plan=PlanConfig(device="h200"),
    )
    plan = make_plan(run)
    assert plan["ema_bytes"] == 4 * plan["parameters"]
    assert plan["state_bytes"] == 16 * plan["parameters"] + 4
    without = dataclasses.replace(run, train=dataclasses.replace(run.train, ema_decay=0.0))
    assert plan["peak_bytes"] >= peak_bytes(without, 1) + plan["ema_bytes"]

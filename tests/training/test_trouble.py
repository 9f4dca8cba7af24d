"""Spikes and non-finite values: how the loop detects them and how it reacts."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.config import from_config_dict
from branchnorm_jax.data.batches import make_plans
from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.errors import DivergedError, UserError
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DataConfig, ModelConfig, TrainConfig
from branchnorm_jax.training import loop, trouble
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.training.step import Metrics
from branchnorm_jax.workdir import Workdir

CONFIG = Config(
    model=ModelConfig(encoder_layers=2, decoder_layers=2, width=16, ffn_width=24, heads=2, dropout=0.1, alpha_steps=40),
    data=DataConfig(numerals_pairs=600, vocab_size=300, max_length=128, batch_shapes=1),
    train=TrainConfig(
        steps=80,
        batch_tokens=1024,
        learning_rate=5e-3,
        warmup_steps=10,
        eval_every=0,
        eval_bleu_sentences=0,
        best_metric="loss",
        checkpoint_every=10,
        keep_last=5,
        keep_best=0,
        log_every=1,
        watch_every=20,
        rollback_updates=4,
    ),
)
POLICIES = [(30.0, "spike"), pytest.param(float("nan"), "nonfinite", marks=pytest.mark.slow)]
BAD = 65
"""The update with the bad batch: late enough for the running statistics to be known."""


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The sum of the words in the batch of update `BAD`, which identifies this batch."""
    corpus = prepare(CONFIG.data, tmp_path_factory.mktemp("corpus"), print)
    plan, _ = make_plans(CONFIG.data, corpus.train, corpus.valid, CONFIG.train.batch_tokens, CONFIG.train.seed)
    sums = [int(plan.batch_at(step).source.sum()) for step in range(80)]
    assert sums.count(sums[BAD]) == 1
    return sums[BAD]


@dataclasses.dataclass(frozen=True)
class Poisoned(Transformer):
    """A network that multiplies its output by `factor` if the words of the batch sum to `poison`."""

    poison: int = 0
    factor: float = 1.0

    def hidden(self, params: Any, source_BS: jax.Array, *arguments: Any, **options: Any) -> Any:
        x, by_layer = super().hidden(params, source_BS, *arguments, **options)
        return x * jnp.where(source_BS.sum() == self.poison, self.factor, 1.0), by_layer


def run(directory: Path, poison: int, factor: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, Any]:
    """Trains with one bad batch. Returns the status, the metrics and the events of the run."""

    def make_model(*arguments: Any) -> Transformer:
        sound = real(*arguments)
        return Poisoned(sound.config, sound.source_vocab, sound.target_vocab, sound.unused, sound.tags, poison, factor)

    real = loop.make_model
    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_model", make_model)
        config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, **options))
        try:
            loop.train(config, Workdir(directory))
        except DivergedError as error:
            assert error.exit_code == 3

    def lines(name: str) -> list[dict[str, Any]]:
        path = directory / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    status = json.loads((directory / "status.json").read_text())
    return status | {"metrics": lines("metrics.jsonl"), "events": lines("events.jsonl")}


@pytest.mark.slow
def test_without_trouble_nothing_is_noted(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, poison, 1.0, monkeypatch)
    assert (found["status"], found["spikes"], found["rollbacks"], found["events"]) == ("done", 0, 0, [])


@pytest.mark.slow
def test_a_spike_is_noted_and_trained_on(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, poison, 30.0, monkeypatch)
    assert found["status"] == "done"
    assert found["events"][0]["step"] == BAD
    assert found["events"][0]["kind"] == "spike"
    assert found["spikes"] == len(found["events"])
    bad = found["metrics"][BAD]
    assert bad["loss_deviations"] > 8
    assert [line["step"] for line in found["metrics"]] == list(range(80))


@pytest.mark.slow
def test_a_spike_can_end_the_run(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, poison, 30.0, monkeypatch, spike="stop")
    assert found["status"] == "diverged"
    assert f"at step {BAD} the" in found["reason"]
    assert "standard deviations above" in found["reason"]
    assert "layer" in found["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "policy"), POLICIES)
def test_its_update_can_be_skipped(
    factor: float, policy: str, poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log keeps the update; the loss continues as if the batch had not been there."""
    found = run(tmp_path / "sick", poison, factor, monkeypatch, **{policy: "skip"})
    well = run(tmp_path / "well", poison, 1.0, monkeypatch)
    assert (found["status"], found["skipped_updates"]) == ("done", 1)
    assert [(event["step"], event["policy"]) for event in found["events"]] == [(BAD, "skip")]
    assert [line["step"] for line in found["metrics"]] == list(range(80))
    assert [line["loss"] for line in found["metrics"][:BAD]] == [line["loss"] for line in well["metrics"][:BAD]]
    assert found["metrics"][-1]["loss"] == pytest.approx(well["metrics"][-1]["loss"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "policy"), POLICIES)
def test_it_can_be_rolled_back_and_its_batches_left_out(
    factor: float, policy: str, poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run returns to the checkpoint before the blamed batches, repeats the updates before them and skips them."""
    found = run(tmp_path / "sick", poison, factor, monkeypatch, **{policy: "rollback"})
    well = run(tmp_path / "well", poison, 1.0, monkeypatch)
    assert (found["status"], found["rollbacks"]) == ("done", 1)
    left_out = list(range(BAD - 3, BAD + 1))
    assert found["left_out"] == [[left_out[0], left_out[-1]]]
    assert [(event["step"], event["kind"]) for event in found["events"]] == [
        (BAD, "spike" if policy == "spike" else "nonfinite"),
        (BAD, "rollback"),
    ]
    assert found["events"][1]["to"] == 60
    assert [line["step"] for line in found["metrics"]] == [step for step in range(80) if step not in left_out]
    kept = [line["loss"] for line in found["metrics"] if line["step"] < left_out[0]]
    assert kept == [line["loss"] for line in well["metrics"][: left_out[0]]]
    assert found["metrics"][-1]["loss"] == pytest.approx(well["metrics"][-1]["loss"], rel=0.05)


@pytest.mark.slow
def test_or_alpha_stands(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha is held from the checkpoint to `rollback_updates` after the trouble. If it recurs, the run ends."""
    model = dataclasses.replace(CONFIG.model, alpha_steps=160)
    monkeypatch.setattr("tests.training.test_trouble.CONFIG", dataclasses.replace(CONFIG, model=model))
    found = run(tmp_path, poison, float("nan"), monkeypatch, nonfinite="rollback", rollback="alpha")
    assert (found["status"], found["rollbacks"]) == ("diverged", 1)
    assert "holding alpha did not prevent it" in found["reason"]
    alphas = {line["step"]: line["alpha"] for line in found["metrics"]}
    assert alphas[60] == alphas[BAD] == 60 / 160
    assert alphas[50] == 50 / 160


def test_alpha_cannot_stand_where_there_is_none(tmp_path: Path) -> None:
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, method="deepnorm"),
        train=dataclasses.replace(CONFIG.train, spike="rollback", rollback="alpha"),
    )
    with pytest.raises(UserError, match="deepnorm has no alpha"):
        loop.check_names(config)


def metrics(**changes: float) -> Metrics:
    """Metrics of a healthy update, as Python numbers."""
    numbers: dict[str, Any] = dict.fromkeys(Metrics._fields, 1.0) | {"layers": {}} | changes
    return Metrics(**numbers)


@pytest.mark.parametrize(
    ("changes", "options", "action", "kind", "reason"),
    [
        ({}, {}, "go", "", ""),
        ({"loss": math.nan}, {}, "stop", "nonfinite", "at step 7 the loss is nan"),
        ({"grad_norm": math.inf}, {"nonfinite": "skip"}, "skip", "nonfinite", "the gradient norm is inf"),
        ({"update_norm": math.nan}, {"nonfinite": "rollback"}, "rollback", "nonfinite", "at step 7 the update norm"),
        ({"loss_deviations": 9.0}, {}, "go", "spike", "the loss is 1, 9 standard deviations above"),
        ({"loss_deviations": 7.9}, {"spike": "stop"}, "go", "", ""),
        ({"update_deviations": 9.0}, {"spike": "skip"}, "skip", "spike", "the update norm is 1, 9 standard"),
        ({"loss": math.nan, "update_deviations": 9.0}, {"spike": "skip"}, "stop", "nonfinite", "at step 7 the loss"),
    ],
)
def test_the_decision_about_an_update(
    changes: dict[str, float], options: dict[str, Any], action: str, kind: str, reason: str
) -> None:
    decision = trouble.decide(7, metrics(**changes), {}, dataclasses.replace(CONFIG.train, **options))
    assert (decision.action, decision.kind, decision.step) == (action, kind, 7)
    assert decision.reason.startswith(reason)
    assert decision.ends == (action in ("stop", "rollback"))


def test_the_reason_names_the_layer() -> None:
    layers = {
        stack: {"branch": np.array([1.0, broken]), "gradient": np.ones(2), "update": np.ones(2)}
        for stack, broken in (("encoder", 1.0), ("decoder", math.nan))
    }
    decision = trouble.decide(7, metrics(loss=math.nan), layers, CONFIG.train)
    assert decision.reason == "at step 7 the loss is nan, first in the forward pass of decoder layer 2"


@pytest.mark.parametrize(("policy", "action"), [("stop", "stop"), ("skip", "stop"), ("rollback", "rollback")])
def test_a_state_that_is_not_finite_cannot_be_skipped(policy: str, action: str) -> None:
    """The decision blames the update before this state."""
    train = dataclasses.replace(CONFIG.train, nonfinite=policy)
    decision = trouble.decide_about_state(20, "validation loss", math.nan, train)
    assert (decision.action, decision.policy, decision.step) == (action, policy, 19)
    assert trouble.decide_about_state(20, "validation loss", 1.0, train).action == "go"


def test_ten_skipped_updates_in_a_row_stop_the_run() -> None:
    assert trouble.decide_about_skips(9, 9, {}).action == "go"
    assert trouble.decide_about_skips(10, 10, {}).action == "stop"


def test_a_rollback_leaves_out_the_batches_to_blame_or_holds_alpha() -> None:
    spike = trouble.Decision("rollback", 20, "spike", "rollback", "at step 20 the loss is 9")
    train = dataclasses.replace(CONFIG.train, rollback="batches")
    assert trouble.plan_rollback(spike, train, LoopState()) == (17, (17, 20))
    assert trouble.plan_rollback(spike._replace(step=1), train, LoopState()) == (0, (0, 1))
    with pytest.raises(DivergedError, match="rolled back 5 times already"):
        trouble.plan_rollback(spike, train, LoopState(rollbacks=5))
    train = dataclasses.replace(train, rollback="alpha")
    assert trouble.plan_rollback(spike, train, LoopState(troubled=19)) == (20, None)
    with pytest.raises(DivergedError, match="holding alpha did not prevent it"):
        trouble.plan_rollback(spike, train, LoopState(troubled=20))


def told(figures: np.ndarray, limit: float = 8.0) -> tuple[np.ndarray, trouble.RunningStats]:
    """Deviations for each element of a series of (loss, log update), and the running statistics after it."""

    def step(usual: trouble.RunningStats, now: jax.Array) -> tuple[trouble.RunningStats, jax.Array]:
        return trouble.update_stats(usual, now, limit), trouble.deviations(usual, now)

    usual, above = jax.jit(lambda f: jax.lax.scan(step, trouble.initial_stats(), f))(jnp.asarray(figures, jnp.float32))
    return np.asarray(above), usual


def test_what_is_usual_is_the_mean_and_variance_of_the_last_updates() -> None:
    figures = np.random.default_rng(0).normal((3.0, -1.0), (0.2, 0.3), (100, 2))
    _, usual = told(figures)
    np.testing.assert_allclose(usual.mean, figures.mean(0), rtol=1e-4)
    np.testing.assert_allclose(usual.variance, figures.var(0), rtol=1e-3)


def test_few_false_alarms_and_every_jump() -> None:
    """Noise and a falling loss raise no alarm in 20,000 updates; a doubled update raises one at once."""
    steps = np.arange(20_000)
    noise = np.random.default_rng(1).normal(0, 1, (len(steps), 2))
    calm = np.stack([2 + 6 * np.exp(-steps / 2000) + 0.05 * noise[:, 0], -1 + 0.02 * noise[:, 1]], 1)
    above, _ = told(calm)
    assert (above < 8).all()
    for where in (60, 500, 19_000):
        jumped = calm.copy()
        jumped[where, 1] += np.log(2)
        assert told(jumped[: where + 1])[0][where, 1] > 8


@settings(deadline=None, max_examples=30)
@given(level=st.floats(1, 1e4), seed=st.integers(0, 100))
def test_a_new_level_becomes_usual(level: float, seed: int) -> None:
    """Each spike enters the statistics as `limit` deviations, so after some updates a lasting level is no spike."""
    noise = np.random.default_rng(seed).normal(0, 0.05, (3000, 2))
    noise[200:, 0] += level
    above, _ = told(noise)
    assert above[200, 0] > 8
    assert (above[-100:, 0] < 8).all()


def test_what_is_not_finite_is_forgotten() -> None:
    figures = np.random.default_rng(2).normal(0, 1, (80, 2))
    broken = np.insert(figures, 70, (np.nan, 1.0), 0)
    for a, b in zip(told(figures)[1], told(broken)[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_rate_of_0_does_not_count() -> None:
    """If updates of size 0 counted, every other update would look small for hundreds of updates."""
    figures = np.random.default_rng(3).normal((3.0, -1.0), 0.05, (60, 2))
    figures[0, 1] = -np.inf
    figures[59, 1] += np.log(2)
    assert told(figures)[0][59, 1] > 8


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"spike": "rollback", "checkpoint_every": 0}, "checkpoint_every"),
        ({"nonfinite": "rollback", "checkpoint_every": 10, "keep_last": 2}, "raise train.keep_last"),
    ],
)
def test_a_rollback_needs_checkpoints(train: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_config_dict({"train": train})


@pytest.mark.slow
def test_a_rollback_goes_past_newer_checkpoints(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble at 65 is blamed on updates 58 to 65: the run returns to checkpoint 50 and rewrites checkpoint 60."""
    found = run(tmp_path, poison, float("nan"), monkeypatch, nonfinite="rollback", rollback_updates=8)
    assert (found["status"], found["rollbacks"]) == ("done", 1)
    assert found["events"][1]["to"] == 50
    assert found["compiled_shapes"] == 1


@pytest.mark.slow
def test_with_no_old_checkpoint_the_oldest_is_better_than_none(
    poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(
        tmp_path, poison, float("nan"), monkeypatch, nonfinite="rollback", rollback="alpha", keep_last=1, spike="stop"
    )
    assert found["events"][1]["to"] == 60
    few: dict[str, Any] = dict(rollback_updates=8, keep_last=1)
    found = run(tmp_path / "batches", poison, float("nan"), monkeypatch, nonfinite="rollback", **few)
    assert (found["status"], found["events"][1]["to"], found["left_out"]) == ("done", 60, [[58, 65]])


@pytest.mark.slow
def test_skipping_too_much_ends_the_run_whatever_else_is_rolled_back(
    poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "SKIPPED_IN_A_ROW", 1)
    found = run(tmp_path, poison, 30.0, monkeypatch, spike="skip", nonfinite="rollback")
    assert (found["status"], found["rollbacks"]) == ("diverged", 0)
    assert [event["kind"] for event in found["events"]] == ["spike", "skipped"]

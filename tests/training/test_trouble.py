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
def test_healthy_run_records_no_events(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, poison, 1.0, monkeypatch)
    assert (result["status"], result["spikes"], result["rollbacks"], result["events"]) == ("done", 0, 0, [])


@pytest.mark.slow
def test_spike_is_recorded_and_training_continues(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, poison, 30.0, monkeypatch)
    assert result["status"] == "done"
    assert result["events"][0]["step"] == BAD
    assert result["events"][0]["kind"] == "spike"
    assert result["spikes"] == len(result["events"])
    bad = result["metrics"][BAD]
    assert bad["loss_deviations"] > 8
    assert [line["step"] for line in result["metrics"]] == list(range(80))


@pytest.mark.slow
def test_spike_can_stop_the_run(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, poison, 30.0, monkeypatch, spike="stop")
    assert result["status"] == "diverged"
    assert f"at step {BAD} the" in result["reason"]
    assert "standard deviations above" in result["reason"]
    assert "layer" in result["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "policy"), POLICIES)
def test_bad_update_can_be_skipped(
    factor: float, policy: str, poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics include the skipped update. The loss continues as if the batch had not existed."""
    result = run(tmp_path / "sick", poison, factor, monkeypatch, **{policy: "skip"})
    healthy = run(tmp_path / "well", poison, 1.0, monkeypatch)
    assert (result["status"], result["skipped_updates"]) == ("done", 1)
    assert [(event["step"], event["policy"]) for event in result["events"]] == [(BAD, "skip")]
    assert [line["step"] for line in result["metrics"]] == list(range(80))
    assert [line["loss"] for line in result["metrics"][:BAD]] == [line["loss"] for line in healthy["metrics"][:BAD]]
    assert result["metrics"][-1]["loss"] == pytest.approx(healthy["metrics"][-1]["loss"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "policy"), POLICIES)
def test_bad_update_can_be_rolled_back_and_its_batches_skipped(
    factor: float,
    policy: str,
    poison: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run returns to the checkpoint before the blamed batches, repeats the updates before them and skips them."""
    result = run(tmp_path / "sick", poison, factor, monkeypatch, **{policy: "rollback"})
    said = capsys.readouterr().err
    assert "rolled back to step 60, leaving out the batches" in said and "repeating updates" not in said
    healthy = run(tmp_path / "well", poison, 1.0, monkeypatch)
    assert (result["status"], result["rollbacks"]) == ("done", 1)
    left_out = list(range(BAD - 3, BAD + 1))
    assert result["left_out"] == [[left_out[0], left_out[-1]]]
    assert [(event["step"], event["kind"]) for event in result["events"]] == [
        (BAD, "spike" if policy == "spike" else "nonfinite"),
        (BAD, "rollback"),
    ]
    assert result["events"][1]["to"] == 60
    assert [line["step"] for line in result["metrics"]] == [step for step in range(80) if step not in left_out]
    repeated = [line["loss"] for line in result["metrics"] if line["step"] < left_out[0]]
    assert repeated == [line["loss"] for line in healthy["metrics"][: left_out[0]]]
    assert result["metrics"][-1]["loss"] == pytest.approx(healthy["metrics"][-1]["loss"], rel=0.05)


@pytest.mark.slow
def test_rollback_can_hold_alpha(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha is held from the checkpoint to `rollback_updates` after the bad update. If it recurs, the run ends."""
    model = dataclasses.replace(CONFIG.model, alpha_steps=160)
    monkeypatch.setattr("tests.training.test_trouble.CONFIG", dataclasses.replace(CONFIG, model=model))
    result = run(tmp_path, poison, float("nan"), monkeypatch, nonfinite="rollback", rollback="alpha")
    assert (result["status"], result["rollbacks"]) == ("diverged", 1)
    assert "holding alpha did not prevent it" in result["reason"]
    alphas = {line["step"]: line["alpha"] for line in result["metrics"]}
    assert alphas[60] == alphas[BAD] == 60 / 160
    assert alphas[50] == 50 / 160


def test_holding_alpha_requires_a_method_with_alpha(tmp_path: Path) -> None:
    train = dataclasses.replace(CONFIG.train, spike="rollback", rollback="alpha")
    loop.check_names(dataclasses.replace(CONFIG, train=train))
    constant: tuple[dict[str, Any], ...] = ({"method": "deepnorm"}, {"alpha_order": "fix_sqrt_L"})
    for model in constant:
        config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, **model), train=train)
        with pytest.raises(UserError, match=f"alpha does not grow with {config.model.method} and these options"):
            loop.check_names(config)


def metrics(**changes: float) -> Metrics:
    """Returns the metrics of a healthy update as Python numbers."""
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
def test_decisions_about_updates(
    changes: dict[str, float], options: dict[str, Any], action: str, kind: str, reason: str
) -> None:
    decision = trouble.decide(7, metrics(**changes), {}, dataclasses.replace(CONFIG.train, **options))
    assert (decision.action, decision.kind, decision.step) == (action, kind, 7)
    assert decision.reason.startswith(reason)
    assert bool(decision.reason) == bool(kind)
    assert decision.ends == (action in ("stop", "rollback"))


def test_reason_names_the_layer() -> None:
    layers = {
        stack: {"branch": np.array([1.0, broken]), "gradient": np.ones(2), "update": np.ones(2)}
        for stack, broken in (("encoder", 1.0), ("decoder", math.nan))
    }
    decision = trouble.decide(7, metrics(loss=math.nan), layers, CONFIG.train)
    assert decision.reason == "at step 7 the loss is nan, first in the forward pass of decoder layer 2"


@pytest.mark.parametrize(("policy", "action"), [("stop", "stop"), ("skip", "stop"), ("rollback", "rollback")])
def test_nonfinite_states_cannot_be_skipped(policy: str, action: str) -> None:
    """The decision blames the update before this state."""
    train = dataclasses.replace(CONFIG.train, nonfinite=policy)
    decision = trouble.decide_about_state(20, "validation loss", math.nan, train)
    assert (decision.action, decision.policy, decision.step) == (action, policy, 19)
    assert trouble.decide_about_state(20, "validation loss", 1.0, train).action == "go"


def test_ten_skipped_updates_in_a_row_stop_the_run() -> None:
    assert trouble.decide_about_skips(9, 9, {}).action == "go"
    assert trouble.decide_about_skips(10, 10, {}).action == "stop"


def test_rollback_skips_the_blamed_batches_or_holds_alpha() -> None:
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


def deviations_of(figures: np.ndarray, limit: float = 8.0) -> tuple[np.ndarray, trouble.RunningStats]:
    """Returns the deviations of each element of a series of (loss, log update), and the final running statistics."""

    def step(stats: trouble.RunningStats, now: jax.Array) -> tuple[trouble.RunningStats, jax.Array]:
        return trouble.update_stats(stats, now, limit), trouble.deviations(stats, now)

    stats, result = jax.jit(lambda f: jax.lax.scan(step, trouble.initial_stats(), f))(jnp.asarray(figures, jnp.float32))
    return np.asarray(result), stats


def test_running_statistics_equal_mean_and_variance() -> None:
    figures = np.random.default_rng(0).normal((3.0, -1.0), (0.2, 0.3), (100, 2))
    _, stats = deviations_of(figures)
    np.testing.assert_allclose(stats.mean, figures.mean(0), rtol=1e-4)
    np.testing.assert_allclose(stats.variance, figures.var(0), rtol=1e-3)


def test_noise_raises_no_alarm_and_every_jump_does() -> None:
    """Noise and a falling loss raise no alarm in 20,000 updates; a doubled update raises one at once."""
    steps = np.arange(20_000)
    noise = np.random.default_rng(1).normal(0, 1, (len(steps), 2))
    calm = np.stack([2 + 6 * np.exp(-steps / 2000) + 0.05 * noise[:, 0], -1 + 0.02 * noise[:, 1]], 1)
    above, _ = deviations_of(calm)
    assert (above < 8).all()
    for where in (60, 500, 19_000):
        jumped = calm.copy()
        jumped[where, 1] += np.log(2)
        assert deviations_of(jumped[: where + 1])[0][where, 1] > 8


@settings(max_examples=30)
@given(level=st.floats(1, 1e4), seed=st.integers(0, 100))
def test_running_statistics_adapt_to_a_new_level(level: float, seed: int) -> None:
    """A spike counts as `limit` deviations in the statistics, so a lasting level is no spike after some updates."""
    noise = np.random.default_rng(seed).normal(0, 0.05, (3000, 2))
    noise[200:, 0] += level
    above, _ = deviations_of(noise)
    assert above[200, 0] > 8
    assert (above[-100:, 0] < 8).all()


def test_nonfinite_values_do_not_change_running_statistics() -> None:
    figures = np.random.default_rng(2).normal(0, 1, (80, 2))
    broken = np.insert(figures, 70, (np.nan, 1.0), 0)
    for a, b in zip(deviations_of(figures)[1], deviations_of(broken)[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_updates_of_size_0_do_not_count() -> None:
    """If they counted, a doubled update would not be a spike for hundreds of updates."""
    figures = np.random.default_rng(3).normal((3.0, -1.0), 0.05, (60, 2))
    figures[0, 1] = -np.inf
    figures[59, 1] += np.log(2)
    assert deviations_of(figures)[0][59, 1] > 8


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"spike": "rollback", "checkpoint_every": 0}, "checkpoint_every"),
        ({"nonfinite": "rollback", "checkpoint_every": 10, "keep_last": 2}, "raise train.keep_last"),
    ],
)
def test_rollback_requires_checkpoints(train: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_config_dict({"train": train})


@pytest.mark.slow
def test_rollback_ignores_newer_checkpoints(poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates 58 to 65 are blamed for step 65. The run returns to checkpoint 50 and writes checkpoint 60 again."""
    result = run(tmp_path, poison, float("nan"), monkeypatch, nonfinite="rollback", rollback_updates=8)
    assert (result["status"], result["rollbacks"]) == ("done", 1)
    assert result["events"][1]["to"] == 50
    assert result["compiled_shapes"] == 1


@pytest.mark.slow
def test_rollback_uses_the_oldest_checkpoint_if_none_is_old_enough(
    poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(
        tmp_path, poison, float("nan"), monkeypatch, nonfinite="rollback", rollback="alpha", keep_last=1, spike="stop"
    )
    assert result["events"][1]["to"] == 60
    few: dict[str, Any] = dict(rollback_updates=8, keep_last=1)
    result = run(tmp_path / "batches", poison, float("nan"), monkeypatch, nonfinite="rollback", **few)
    assert (result["status"], result["events"][1]["to"], result["left_out"]) == ("done", 60, [[60, 65]])


@pytest.mark.slow
def test_too_many_skipped_updates_end_the_run_despite_rollback(
    poison: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "SKIPPED_IN_A_ROW", 1)
    result = run(tmp_path, poison, 30.0, monkeypatch, spike="skip", nonfinite="rollback")
    assert (result["status"], result["rollbacks"]) == ("diverged", 0)
    assert [event["kind"] for event in result["events"]] == ["spike", "skipped"]

"""Validations that a signal interrupts, and the best checkpoint by a metric that needs the sources."""

import dataclasses
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from branchnorm_jax.errors import Preempted
from branchnorm_jax.evaluation.bleu import Score
from branchnorm_jax.options import Config, DataConfig, EvaluateConfig, ModelConfig, TrainConfig
from branchnorm_jax.training import loop, validation
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.logs import read_lines
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.training.state import TrainState
from branchnorm_jax.workdir import Workdir
from tests.conftest import read_status

CONFIG = Config(
    model=ModelConfig(encoder_layers=1, decoder_layers=1, width=16, ffn_width=24, heads=2),
    data=DataConfig(numerals_pairs=200, vocab_size=300, max_length=128, batch_shapes=1),
    train=TrainConfig(
        steps=6, batch_tokens=512, eval_every=2, eval_bleu_sentences=3, checkpoint_every=4, watch_every=0
    ),
)


@pytest.mark.slow
def test_a_signal_ends_a_validation_which_the_next_start_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one of the run. The state is saved at once, and the results are those of an undisturbed run.

    The loss rises from update 2 to 4, so the last validation reduces the learning rate, also that of a longer run.
    """
    original, interrupted, made = validation.Validator.source_gain, list[int](), list[int]()

    def source_gain(self: validation.Validator, state: TrainState) -> float:
        if (step := int(state.step)) in (2, 4) and step not in interrupted:
            interrupted.append(step)
            signal.raise_signal(signal.SIGTERM)
        made.append(step)
        return original(self, state)

    train = dataclasses.replace(
        CONFIG.train,
        schedule="val_decay",
        decay_patience=1,
        learning_rate=1.0,
        warmup_steps=1,
        best_metric="loss",
    )
    config, longer = (dataclasses.replace(CONFIG, train=dataclasses.replace(train, steps=steps)) for steps in (4, 6))
    loop.train(config, Workdir(tmp_path / "whole"))
    monkeypatch.setattr(validation.Validator, "source_gain", source_gain)
    parts = Workdir(tmp_path / "parts")
    for step in (2, 4):
        with pytest.raises(Preempted, match=f"stopped by signal 15, saved at step {step}"):
            loop.train(config, parts)
        assert [line["step"] for line in read_lines(parts / "validation.jsonl")] == [*range(2, step, 2)]
    loop.train(config, parts)
    made.clear()
    loop.train(config, parts)
    assert not made  # The run is finished.
    whole = tmp_path / "whole"
    for each in (config, longer):
        if each is longer:
            for workdir in (Workdir(whole), parts):
                loop.train(longer, workdir)
        for name in ("validation.jsonl", "metrics.jsonl"):
            ours, theirs = ([line | {"seconds": 0} for line in read_lines(run / name)] for run in (parts, whole))
            assert ours == theirs
        assert ours[-1]["learning_rate"] == pytest.approx(1.0 if each is config else 0.8)
        assert read_status(parts.path)["state_sha256"] == read_status(whole)["state_sha256"]
        folders = [Workdir(folder).stored("checkpoints") for folder in (parts.path, whole)]
        first, second = (Checkpoints(folder, CONFIG.train, print, read_only=True).best_step() for folder in folders)
        assert first == second


@pytest.mark.slow
def test_comet_decides_which_checkpoint_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMET itself cannot be installed beside jax's versions; this measure falls from one validation to the next."""
    seen: list[tuple[int, int, int]] = []

    def measure(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[Score]:
        seen.append((len(sources), len(hypotheses), len(references)))
        return [Score("comet", 90.0 - len(seen), "signature")]

    monkeypatch.setattr(validation, "load_comet", {"a/model": measure}.__getitem__)
    train = dataclasses.replace(CONFIG.train, best_metric="comet", checkpoint_every=2)
    config = dataclasses.replace(CONFIG, train=train, evaluate=EvaluateConfig(comet="a/model"))
    loop.train(config, Workdir(tmp_path))
    assert set(seen) == {(3, 3, 3)}
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [line["comet"] for line in lines] == [90.0 - count for count in range(1, len(seen) + 1)]
    checkpoints = Checkpoints(Workdir(tmp_path).stored("checkpoints"), config.train, lambda line: None)
    assert checkpoints.best_step() == lines[0]["step"]


def test_an_equal_score_is_the_best_but_no_improvement() -> None:
    """A run that stays at BLEU 0 has to end by `train.patience`, and its latest state has seen the most data."""
    state, since = LoopState(), []
    for step, score in enumerate((0.0, 0.0, 0.0, 1.0, 0.5, 1.0)):
        state.add_score(step, score, 2)
        since.append((state.since_best, state.is_best))
    assert since == [(0, True), (1, True), (2, True), (0, True), (1, False), (2, True)]

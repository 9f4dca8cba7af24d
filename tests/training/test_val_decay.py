"""ValDecay in the loop: the learning rate of every update and the last update of the run, in closed form."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from branchnorm_jax.options import Config, DataConfig, ModelConfig, TrainConfig
from branchnorm_jax.training import loop, schedules
from branchnorm_jax.workdir import Workdir

PEAK, FACTOR, SMALLEST, WARMUP, EVERY = 5e-3, 0.9, 3e-3, 12, 5
CONFIG = Config(
    model=ModelConfig(encoder_layers=1, decoder_layers=1, width=16, ffn_width=24, heads=2),
    data=DataConfig(numerals_pairs=200, vocab_size=300, max_length=128, batch_shapes=1),
    train=TrainConfig(
        steps=60,
        batch_tokens=512,
        schedule="val_decay",
        learning_rate=PEAK,
        warmup_init=0.0,
        warmup_steps=WARMUP,
        decay_factor=FACTOR,
        min_learning_rate=SMALLEST,
        eval_every=EVERY,
        eval_bleu_sentences=0,
        best_metric="loss",
        checkpoint_every=0,
        log_every=1,
        watch_every=0,
    ),
)


@pytest.mark.slow
def test_rate_decays_after_the_warm_up_and_run_stops_below_the_minimum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every validation counts as worse. After k validations past the warm-up, the rate is peak x factor^k."""
    monkeypatch.setattr(schedules, "val_decay", lambda scores, patience: True)
    loop.train(CONFIG, Workdir(tmp_path))

    decays = math.floor(math.log(SMALLEST / PEAK) / math.log(FACTOR)) + 1
    first = math.ceil(WARMUP / EVERY) * EVERY
    last = first + EVERY * (decays - 1)
    updates = np.arange(last)
    expected = PEAK * np.minimum(updates / WARMUP, 1) * FACTOR ** np.maximum(0, (updates - first) // EVERY + 1)

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([line["learning_rate"] for line in records], expected, rtol=1e-6)
    assert expected[EVERY] < SMALLEST, "rates below the minimum during the warm-up must not stop the run"
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["step"]) == ("done", last)
    assert "train.min_learning_rate=0.003" in status["reason"]

    assert f"step {last}: stopped early: " in capsys.readouterr().err
    loop.train(CONFIG, Workdir(tmp_path))
    assert "this run stopped early" in (said := capsys.readouterr().err) and "training from" not in said
    again = json.loads((tmp_path / "status.json").read_text())
    assert (again["step"], again["reason"]) == (last, status["reason"]), "a finished run must not train on"


@pytest.mark.slow
def test_rate_is_constant_without_worse_validations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "val_decay", lambda scores, patience: False)
    train = {**vars(CONFIG.train), "steps": 20, "min_learning_rate": 0.0}
    loop.train(Config(CONFIG.model, CONFIG.data, TrainConfig(**train)), Workdir(tmp_path))
    rates = [json.loads(line)["learning_rate"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose(rates, PEAK * np.minimum(np.arange(20) / WARMUP, 1), rtol=1e-6)

"""The best checkpoint by a metric that needs the sources."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from branchnorm_jax.evaluation.bleu import Score
from branchnorm_jax.options import Config, DataConfig, EvaluateConfig, ModelConfig, TrainConfig
from branchnorm_jax.training import loop, validation
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.workdir import Workdir


@pytest.mark.slow
def test_comet_decides_which_checkpoint_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMET itself cannot be installed beside jax's versions; this measure falls from one validation to the next."""
    seen: list[tuple[int, int, int]] = []

    def measure(sources: Sequence[str], hypotheses: Sequence[str], references: Sequence[str]) -> list[Score]:
        seen.append((len(sources), len(hypotheses), len(references)))
        return [Score("comet", 90.0 - len(seen), "signature")]

    monkeypatch.setattr(validation, "load_comet", {"a/model": measure}.__getitem__)
    config = Config(
        model=ModelConfig(encoder_layers=1, decoder_layers=1, width=16, ffn_width=24, heads=2),
        data=DataConfig(numerals_pairs=200, vocab_size=300, max_length=128, batch_shapes=1),
        train=TrainConfig(
            steps=6,
            batch_tokens=512,
            eval_every=2,
            eval_bleu_sentences=3,
            best_metric="comet",
            checkpoint_every=2,
            watch_every=0,
        ),
        evaluate=EvaluateConfig(comet="a/model"),
    )
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

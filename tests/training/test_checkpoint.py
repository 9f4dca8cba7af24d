"""Which checkpoints are kept, and which one is the best."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig, TrainConfig
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import TrainState, first_state

MODEL = Transformer(ModelConfig(encoder_layers=1, decoder_layers=1, width=4, ffn_width=4, heads=1), 8, 8)
TRAIN = TrainConfig(keep_last=2, keep_best=1)


def state(step: int) -> TrainState:
    """One whose parameters are all its step."""
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, float(step)), MODEL.abstract_params())
    return dataclasses.replace(first_state(params, make_optimizer(TRAIN)), step=jnp.int32(step))


def opened(path: Path, **changes: Any) -> Checkpoints:
    return Checkpoints(path, dataclasses.replace(TRAIN, **changes), lambda line: None)


def save(checkpoints: Checkpoints, scores: dict[int, float | None]) -> None:
    for step, score in scores.items():
        checkpoints.save(state(step), jnp.float32(1.0), {}, score)
    checkpoints.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_the_best_is_kept_and_found(tmp_path: Path, reopened: bool) -> None:
    scores = {1: 0.5, 2: 0.9, 3: 0.1, 4: None, 5: 0.3}
    if reopened:  # as a resumed run does, which only knows what is on disk
        for step, score in scores.items():
            save(opened(tmp_path), {step: score})
    else:
        save(opened(tmp_path), scores)
    there = Checkpoints(tmp_path, TRAIN, lambda line: None, read_only=True)
    assert there.steps() == [2, 4, 5]
    assert there.best_step() == 2
    for which, expected in (("best", 2), ("last", 5), ("4", 4)):
        params, _, step = there.restore_params(which, MODEL.abstract_params())
        assert step == expected
        np.testing.assert_array_equal(params["embedding"]["shared"], expected)
    assert there.several("best:2") == [2, 5]


def test_of_equal_scores_the_latest_is_best(tmp_path: Path) -> None:
    save(opened(tmp_path), {1: 0.5, 2: 0.5, 3: 0.4, 4: 0.2})
    there = Checkpoints(tmp_path, TRAIN, lambda line: None, read_only=True)
    assert there.best_step() == 2


def test_without_validations_the_last_is_taken(tmp_path: Path) -> None:
    save(opened(tmp_path, keep_best=0), {1: None, 2: None, 3: None})
    there = Checkpoints(tmp_path, TRAIN, lambda line: None, read_only=True)
    assert there.steps() == [2, 3]
    assert there.best_step() is None
    assert there.restore_params("best", MODEL.abstract_params())[2] == 3

"""Compares the average of checkpoints with NumPy."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.errors import UserError
from branchnorm_jax.modes.average import average
from branchnorm_jax.options import AverageConfig
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.trained import network, restore_model
from branchnorm_jax.workdir import Workdir


def test_average_is_the_mean_of_the_checkpoints(trained: Path, tmp_path: Path) -> None:
    workdir = Workdir(shutil.copytree(trained, tmp_path / "run"))
    config = configs.load(workdir / "config.json")
    _, model = network(config, workdir)
    checkpoints = Checkpoints(workdir / "checkpoints", config.train, logs.say, read_only=True)
    steps = checkpoints.steps()
    assert len(steps) >= 2
    with pytest.raises(UserError, match="no average of checkpoints"):
        restore_model(config, workdir, model, "average")
    for which in (f"last:{len(steps)}", ",".join(map(str, reversed(steps)))):
        average(dataclasses.replace(config, average=AverageConfig(checkpoints=which)), workdir)
        averaged, alpha, step = restore_model(config, workdir, model, "average")
        each = [restore_model(config, workdir, model, str(step)) for step in steps]
        expected = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves, dtype=np.float64), 0), *[e[0] for e in each])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), averaged, expected)
        for stack, values in alpha.items():
            np.testing.assert_allclose(values, np.mean([e[1][stack] for e in each], axis=0), rtol=1e-6)
        assert step == steps[-1]


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = Workdir(shutil.copytree(trained, tmp_path / "run"))
    config = configs.load(workdir / "config.json")
    selected = Checkpoints.several

    def several(self: Checkpoints, which: str) -> list[int]:
        steps = selected(self, which)
        shutil.rmtree(workdir / "checkpoints" / str(steps[0]))
        return steps

    monkeypatch.setattr(Checkpoints, "several", several)
    with pytest.raises(UserError, match=r"the run that trains here deleted checkpoint [0-9]+ before it was read"):
        average(dataclasses.replace(config, average=AverageConfig(checkpoints="last:2")), workdir)


def test_selection_of_checkpoints(trained: Path) -> None:
    config = configs.load(trained / "config.json")
    checkpoints = Checkpoints(trained / "checkpoints", config.train, logs.say, read_only=True)
    steps = checkpoints.steps()
    assert checkpoints.several("last:1") == steps[-1:]
    assert checkpoints.several(f"{steps[0]}") == steps[:1]
    with pytest.raises(UserError, match=r"train\.keep_last"):
        checkpoints.several("last:99")
    with pytest.raises(UserError, match=r"no checkpoint of step 7; the existing steps are [0-9]+"):
        checkpoints.several(f"7,{steps[0]}")
    for wrong in ("last", "last:0", "best:x", "newest:2", ""):
        with pytest.raises(UserError, match="neither last:n"):
            checkpoints.several(wrong)

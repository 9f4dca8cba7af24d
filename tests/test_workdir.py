"""What happens to a run whose folder other processes use, move or delete."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.bucket import MARK
from branchnorm_jax.errors import UserError
from branchnorm_jax.modes.evaluate import evaluate
from branchnorm_jax.training import loop
from branchnorm_jax.workdir import Workdir


@pytest.mark.parametrize(
    "lose",
    [
        shutil.rmtree,
        lambda folder: folder.rename(folder.with_name("elsewhere")),
        lambda folder: (folder / MARK).write_text("that of another process\n"),
    ],
    ids=["deleted", "moved", "taken over"],
)
@pytest.mark.parametrize("when", ["_read", "_save"])
def test_a_run_that_loses_its_workdir_ends(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], Any], when: str
) -> None:
    """It loses it before a save, or after the last one has begun, and writes nothing in its place."""
    folder = shutil.copytree(trained, tmp_path / "run")
    config = configs.load(folder / "config.json")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=122))
    method = getattr(loop.Run, when)

    def losing(run: loop.Run, *arguments: Any, **options: Any) -> None:
        method(run, *arguments, **options)
        run.checkpoints.wait()
        if not lost:
            lost.append(True)
            lose(folder)

    lost: list[bool] = []
    monkeypatch.setattr(loop.Run, when, losing)
    with pytest.raises(UserError, match="its workdir was deleted or moved, or another process began to train in it"):
        loop.train(config, Workdir(folder))
    assert folder.exists() == (folder / "config.json").exists()


def test_a_run_is_evaluated_by_one_process_at_a_time(trained: Path, tmp_path: Path) -> None:
    """Otherwise results.json could name the translations of another process."""
    workdir = Workdir(shutil.copytree(trained, tmp_path / "run"))
    with workdir.evaluated(), pytest.raises(UserError, match="another process is evaluating this run"):
        evaluate(configs.load(workdir / "config.json"), workdir)


def test_a_workdir_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("file", "link"):
        with pytest.raises(UserError, match=f"{name}: this is a file, or a link that leads to no folder"):
            Workdir(tmp_path / name).make()

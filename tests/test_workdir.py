"""What happens to a run whose folder other processes use, move or delete."""

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.bucket import MARK
from branchnorm_jax.errors import UserError
from branchnorm_jax.training import loop
from branchnorm_jax.workdir import Workdir


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def take_over(folder: Path) -> None:
    (folder / MARK).write_text("that of another process\n")


@pytest.mark.parametrize(
    ("lose", "when"),
    [
        (move, "_read"),
        (take_over, "_save"),
        pytest.param(take_over, "_read", marks=pytest.mark.slow),
        pytest.param(move, "_save", marks=pytest.mark.slow),
        pytest.param(shutil.rmtree, "_read", marks=pytest.mark.slow),
        pytest.param(shutil.rmtree, "_save", marks=pytest.mark.slow),
    ],
)
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
            lost.append((folder / "status.json").read_bytes())
            lose(folder)

    lost: list[bytes] = []
    monkeypatch.setattr(loop.Run, when, losing)
    with pytest.raises(UserError, match="its workdir was deleted or moved, or another process began to train in it"):
        loop.train(config, Workdir(folder))
    assert {path.read_bytes() for path in folder.glob("status.json")} <= {*lost}
    assert folder.exists() == (folder / "config.json").exists()


def test_a_run_is_evaluated_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Otherwise results.json could name the translations of another process."""
    workdir, order = Workdir(tmp_path), list[str]()

    def second() -> None:
        with workdir.evaluated(order.append):
            order.append("second")

    with workdir.evaluated(order.append):
        other = threading.Thread(target=second)
        other.start()
        while not order:
            time.sleep(0.01)
        order.append("first")
    other.join()
    assert order == [
        f"{tmp_path}: another process is evaluating this run; waiting until it has ended",
        "first",
        "second",
    ]


def test_a_workdir_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("file", "link"):
        with pytest.raises(UserError, match=f"{name}: this is a file, or a link that leads to no folder"):
            Workdir(tmp_path / name).make()

"""COMET with a fake package, because the real one is not installed: tests the calls and the returned scores."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.evaluation import comet as module
from branchnorm_jax.evaluation.comet import load_comet


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet", None)
    with pytest.raises(UserError, match="pip install unbabel-comet"):
        load_comet("Unbabel/wmt22-comet-da")


def test_package_receives_the_samples_and_its_score_is_returned_in_percent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The interface of unbabel-comet 2.2 takes samples with src, mt and ref, and returns scores and their mean."""

    def predict(samples: list[dict[str, str]], batch_size: int, gpus: int, progress_bar: bool) -> Any:
        scores = [0.5 * (sample["mt"] == sample["ref"]) + 0.25 * (sample["mt"] == sample["src"]) for sample in samples]
        return SimpleNamespace(scores=scores, system_score=sum(scores) / len(scores))

    def download_model(name: str) -> Path:
        downloaded.append(name)
        return tmp_path / "model.ckpt"

    package = ModuleType("comet")
    downloaded: list[str] = []
    package.__dict__["download_model"] = download_model
    package.__dict__["load_from_checkpoint"] = lambda path: SimpleNamespace(predict=predict)
    monkeypatch.setitem(sys.modules, "comet", package)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "2.2.7")
    (score,) = load_comet("some/model")(["a", "b"], ["x", "b"], ["x", "y"])
    assert (score.name, score.score) == ("comet", 37.5)
    assert score.signature == "some/model|unbabel-comet-2.2.7"
    assert downloaded == ["some/model"]
    (tmp_path / "here.ckpt").touch()
    load_comet(str(tmp_path / "here.ckpt"))
    assert downloaded == ["some/model"]

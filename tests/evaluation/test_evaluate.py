"""results.json: which scores an evaluation keeps."""

import json
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax.evaluation.bleu import Score
from branchnorm_jax.evaluation.evaluate import earlier_results, write_results

RUN: dict[str, Any] = {"step": 7, "pairs": "en-de,de-en", "models": [(1, 2)]}


def write(path: Path, split: str, value: float, run: dict[str, Any]) -> None:
    write_results(path, {split: [Score("bleu", value, "tok:13a")]}, path.parent / "evaluation", run)


def test_scores_of_the_same_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, "test", 1.0, RUN)
    write(path, "valid", 2.0, RUN)
    write(path, "test", 3.0, RUN)
    content = json.loads(path.read_text())
    assert {split: content[split]["bleu"]["score"] for split in ("test", "valid")} == {"test": 3.0, "valid": 2.0}


def test_scores_of_another_run_are_removed_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, "test", 1.0, RUN)
    write(path, "valid", 2.0, RUN)
    other = RUN | {"pairs": "en-de", "step": 8}
    assert earlier_results(path, other) == (
        {},
        f"{path}: the scores of test, valid are removed: they were made with different pairs, step",
    )
    write(path, "test", 3.0, other)
    assert set(json.loads(path.read_text())) == {"test", "run"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"test": {}, "run": 3}', "{"])
def test_a_file_without_the_options_of_its_scores_is_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    assert earlier_results(path, RUN) == ({}, "")

"""JSON Lines files: written lines are read back, broken lines are reported. Modules are hidden from a library."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from branchnorm_jax.training.logs import JsonLines, hidden, read_lines


def test_lines_of_repeated_updates_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for first, last in ((0, 5), (3, 7)):
        lines = JsonLines(path, first)
        for step in range(first, last):
            lines.write({"step": step, "run": first})
        lines.close()
        assert lines.end == (5 if first else 0)
    assert [(line["step"], line["run"]) for line in read_lines(path)] == [(s, 0 if s < 3 else 3) for s in range(7)]


def test_nonfinite_values_are_null(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = JsonLines(path, 0)
    lines.write({"step": 0, "loss": float("nan"), "norm": float("inf"), "nll": 0.5})
    lines.close()
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 0,
        "loss": None,
        "norm": None,
        "nll": 0.5,
    }


@pytest.mark.parametrize(
    ("content", "steps", "broken"),
    [
        ('{"step": 1, "a": 1}\n{"step": 2, "a"', [1], 0),
        ('{"step": 1, "a": 1}\nxx\n[1]\n{}\n{"step": 2}\n{"step": 3, "a": 1}\n', [1, 3], 4),
        ("\x00\xff\n", [], 1),
        ("", [], 0),
    ],
    ids=["unfinished", "broken", "binary", "empty"],
)
def test_broken_lines_are_skipped_and_reported(
    content: str, steps: list[int], broken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content.encode("latin-1"))
    assert [line["step"] for line in read_lines(path, ("a",))] == steps
    message = capsys.readouterr().err
    assert (f"lines.jsonl: {broken} lines cannot be read" in message) == bool(broken)


def test_hidden_modules_cannot_be_imported_unless_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with hidden("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert "this" not in sys.modules
    monkeypatch.setitem(sys.modules, "this", sys)
    with hidden("this"):
        assert importlib.import_module("this") is sys
    assert sys.modules["this"] is sys

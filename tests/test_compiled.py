"""Checksums of compiled programs."""

import json
import os
from pathlib import Path

import pytest

from branchnorm_jax import compiled
from tests.conftest import HASTY, run_main


def start(folder: Path) -> list[str]:
    """Opens a folder as a process does that adds the program "new"; returns what it says."""
    said: list[str] = []
    with compiled.checked(folder, said.append):
        folder.mkdir(exist_ok=True)
        (folder / "new-cache").write_bytes(b"program")
    return said


def test_damaged_programs_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "compile_cache"
    assert start(folder) == []
    (folder / "killed-cache").write_bytes(b"not recorded")
    (folder / "new-cache").write_bytes(b"prograM")
    (said,) = start(folder)
    assert said.startswith(f"{folder}: deleted new-cache, ")
    assert {path.name for path in folder.iterdir()} == {"new-cache", "killed-cache", compiled.SUMS}
    (folder / "killed-cache").write_bytes(b"zeros")
    (said,) = start(folder)
    assert "deleted killed-cache" in said
    assert set(json.loads((folder / compiled.SUMS).read_text())) == {"new-cache"}
    for content in ("", "[]", '{"new-cache": "x"}', "{"):
        (folder / compiled.SUMS).write_text(content)
        assert start(folder) == []


@pytest.mark.slow
def test_a_flipped_bit_in_a_program_does_not_change_the_translation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX itself notices only some: without a check, a translation was another one, and no message said so."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    run = tmp_path / "run"
    done = run_main(*HASTY, f"--workdir={run}", "--config.train.steps=12", "--config.train.eval_every=0")
    assert done.returncode == 0, done.stderr
    translate = "--mode=translate", f"--workdir={run}", "--config.decode.format=jsonl"
    expected = run_main(*translate, stdin="twenty-one\n")
    assert expected.returncode == 0 and "deleted" not in expected.stderr
    cached = [path for path in (run / "compile_cache").glob("*-cache") if os.path.getsize(path) > 100]
    assert cached
    for path in cached:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    again = run_main(*translate, stdin="twenty-one\n")
    assert (again.returncode, again.stdout) == (0, expected.stdout)
    assert "which changed since JAX wrote it" in again.stderr

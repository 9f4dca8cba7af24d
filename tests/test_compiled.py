"""Checksums of compiled programs."""

import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from branchnorm_jax import compiled
from tests.conftest import HASTY, run_main

PROGRAM = zlib.compress(bytes(range(256)) * 40)


@pytest.mark.parametrize("compress", [zlib.compress, zstandard.compress], ids=["zlib", "zstandard"])
def test_a_part_of_a_program_is_not_complete(compress: Callable[[bytes], bytes]) -> None:
    content = compress(bytes(range(256)) * 40)
    assert compiled.complete(content)
    assert not any(compiled.complete(content[:size]) for size in range(len(content)))


def start(folder: Path) -> list[str]:
    """Opens a folder as a process does that adds the program "new"; returns what it says."""
    said: list[str] = []
    assert compiled.usable(folder, said.append)
    folder.mkdir(exist_ok=True)
    (folder / "new-cache").write_bytes(PROGRAM)
    compiled.record(folder)
    return said


def test_damaged_programs_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "compile_cache"
    assert start(folder) == []
    (folder / "killed-cache").write_bytes(PROGRAM)  # by a process that could not record it
    (folder / "new-cache").write_bytes(PROGRAM[:-1] + b"x")
    (said,) = start(folder)
    assert said.startswith(f"{folder}: deleted new-cache, ")
    assert {path.name for path in folder.iterdir()} == {"new-cache", "killed-cache", compiled.SUMS}
    (folder / "killed-cache").write_bytes(b"zeros")
    (said,) = start(folder)
    assert "deleted killed-cache" in said
    assert set(json.loads((folder / compiled.SUMS).read_text())) == {"new-cache"}


@pytest.mark.parametrize("sums", ["", "[]", "{", '{"new-cache": 1e999}', "[" * 10_000])
def test_damaged_checksums_are_made_again(sums: str, tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / compiled.SUMS).write_text(sums)
    start(tmp_path)
    assert json.loads((tmp_path / compiled.SUMS).read_text()) == {"new-cache": zlib.crc32(PROGRAM)}


def test_checksums_delete_no_other_files(tmp_path: Path) -> None:
    other = tmp_path / "other-cache"
    other.write_text("precious")
    start(folder := tmp_path / "cache")
    (folder / compiled.SUMS).write_text(json.dumps({"../other-cache": 1, str(other): 1}))
    start(folder)
    assert other.read_text() == "precious"


def test_unfinished_programs_are_deleted_unless_another_process_may_be_writing_them(tmp_path: Path) -> None:
    """JAX does not replace a file that is there, so it would compile the program again at every start."""
    part = tmp_path / "part-cache"
    for age, kept in ((0.0, True), (2 * compiled.YOUNG, False)):
        part.write_bytes(PROGRAM[:-9])
        os.utime(part, (time.time() - age,) * 2)
        start(tmp_path)
        assert part.exists() == kept
        assert set(json.loads((tmp_path / compiled.SUMS).read_text())) == {"new-cache"}


def test_a_folder_with_a_damaged_program_that_cannot_be_deleted_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    (tmp_path / "new-cache").write_bytes(b"damaged")

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    said: list[str] = []
    assert not compiled.usable(tmp_path, said.append)
    assert "cannot be deleted; this folder is not used" in said[0]


@pytest.mark.slow
def test_a_flipped_bit_in_a_program_does_not_change_the_translation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX itself notices only some: without a check, a translation was another one, and no message said so."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    run = tmp_path / "run"
    done = run_main(*HASTY, f"--workdir={run}", "--config.train.steps=12", "--config.train.eval_every=0")
    assert done.returncode == 0, done.stderr
    translate = "--mode=translate", f"--workdir={run}", "--config.decode.format=jsonl"
    expected = run_main(*translate, stdin="twenty-one\n")
    assert expected.returncode == 0 and "deleted" not in expected.stderr
    cached = [path for path in (run / "compile_cache").glob("*-cache") if os.path.getsize(path) > 100]
    recorded = json.loads((run / "compile_cache" / compiled.SUMS).read_text())
    assert cached and {path.name for path in cached} <= recorded.keys(), "the files of this JAX are complete programs"
    for path in cached:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    again = run_main(*translate, stdin="twenty-one\n")
    assert (again.returncode, again.stdout) == (0, expected.stdout)
    assert "which changed since JAX wrote it" in again.stderr

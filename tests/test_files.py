"""Atomic replacement of files and directories, and what killed processes leave behind."""

import json
import os
import time
from pathlib import Path

import pytest

from branchnorm_jax.errors import StorageError
from branchnorm_jax.files import ABANDONED, atomic_directory, delete_abandoned, storing, write_atomically

HEX = "0123456789abcdef" * 2


def left_behind(path: Path, days: float) -> Path:
    """Creates a file in which nothing has changed for `days` days."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("half")
    before = time.time() - days * ABANDONED
    for each in (path, path.parent):
        os.utime(each, (before, before))
    return path


def test_a_write_deletes_what_killed_processes_have_left_of_the_same_file(tmp_path: Path) -> None:
    old = left_behind(tmp_path / f".config.json.{HEX}.tmp", 1.1)
    others = [
        left_behind(tmp_path / name, days)
        for name, days in [
            (f".config.json.{HEX[::-1]}.tmp", 0.9),
            (f".data.json.{HEX}.tmp", 2),
            (f".config.{HEX}.tmp", 2),
            (".config.json.swp", 2),
            ("config.json.tmp", 2),
        ]
    ]
    write_atomically(tmp_path / "config.json", "{}")
    assert not old.exists()
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "config.json"])


def test_names_that_are_not_utf8_survive_in_json(tmp_path: Path) -> None:
    names = {"path": os.fsdecode(b"/data/k\xff"), "language": "עברית"}
    write_atomically(tmp_path / "meta.json", json.dumps(names, ensure_ascii=False))
    content = (tmp_path / "meta.json").read_text(encoding="utf-8")
    assert json.loads(content) == names
    assert "עברית" in content


def test_a_failed_write_names_the_file_and_the_advice() -> None:
    with pytest.raises(StorageError) as caught, storing(Path("a.de"), "empty the disk"), open("/dev/full", "w") as file:
        file.write("x")
        file.flush()
    assert str(caught.value) == "a.de: cannot be written (No space left on device); empty the disk"


def test_the_start_of_a_run_deletes_what_was_left_in_its_corpus(tmp_path: Path) -> None:
    old = left_behind(tmp_path / "corpus" / f".valid.{HEX}.tmp", 1.1)
    others = [left_behind(tmp_path / "corpus" / name, 2) for name in ("valid", f".valid.{HEX}", ".valid.tmp")]
    delete_abandoned(tmp_path / "corpus")
    assert not old.exists()
    assert sorted((tmp_path / "corpus").iterdir()) == sorted(others)


def test_a_directory_that_is_still_written_to_is_kept(tmp_path: Path) -> None:
    begun = left_behind(tmp_path / f".train.{HEX}.tmp" / "tokens.bin", 3)
    abandoned = left_behind(tmp_path / f".train.{HEX[::-1]}.tmp" / "tokens.bin", 3)
    replaced = left_behind(tmp_path / f".train.{HEX[::-1]}.old" / "tokens.bin", 3)
    os.utime(begun)
    with atomic_directory(tmp_path / "train") as folder:
        (folder / "tokens.bin").write_text("whole")
    assert begun.exists()
    assert not abandoned.parent.exists() and not replaced.parent.exists()
    assert (tmp_path / "train/tokens.bin").read_text() == "whole"


def test_a_failed_write_names_the_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.mkdir()  # A file cannot replace it.
    with pytest.raises(StorageError, match=r"config\.json: cannot be written \(Is a directory\)"):
        write_atomically(path, "{}")
    assert list(tmp_path.iterdir()) == [path]

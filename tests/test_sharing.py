"""What a run tells about its machine and its user, and who may read its files."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from branchnorm_jax.data import numerals
from tests.conftest import HASTY, ROOT, run_main

SECRETS = {
    "HOME": "/tmp/home-of-quetzalcoatl",
    "USER": "quetzalcoatl",
    "LOGNAME": "quetzalcoatl",
    "API_TOKEN": "xochitl-4711",
}

PLACE = "tlaltecuhtli"
"""Name of the folder of the training text."""

NAMES_TEXT = {
    *("config.json", "vocabulary/made_of.json", "corpus/report.json"),
    *("corpus/train/meta.json", "corpus/valid/meta.json"),
}
"""The files of a workdir that may contain `data.path`, as docs/reference.md says."""


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run on text, with exports, of a user with another umask and another environment."""
    folder = tmp_path_factory.mktemp("sharing")
    text, run = folder / PLACE, folder / "run"
    text.mkdir()
    for split in ("train", "valid", "test"):
        for lang, lines in zip(("en", "de"), zip(*numerals.pairs(split, "en", "de", 200), strict=True), strict=True):
            (text / f"{split}.{lang}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(os.umask, os.umask(0o027))
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        options = ("--config.data.source=text", f"--config.data.path={text}", "--config.train.steps=10")
        done = run_main(*HASTY, *options, f"--workdir={run}")
        assert done.returncode == 0, done.stderr
        for form in ("ctranslate2", "huggingface"):
            done = run_main("--mode=export", f"--config.export.format={form}", f"--workdir={run}")
            assert done.returncode == 0, done.stderr
    yield run
    shutil.rmtree(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the bytes of each file, and its path, because names tell something, too."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {name: name.encode() + path.read_bytes() for path in paths if (name := str(path.relative_to(folder)))}


@pytest.mark.slow
def test_exports_tell_nothing_about_user_and_machine(workdir: Path) -> None:
    found = contents(workdir / "export")
    assert {Path(name).parts[0] for name in found} == {"ctranslate2", "huggingface"}
    for secret in (*SECRETS.values(), PLACE, str(ROOT), str(workdir.parent)):
        assert [name for name, content in found.items() if secret.encode() in content] == []


@pytest.mark.slow
def test_workdirs_name_the_text_and_nothing_else(workdir: Path) -> None:
    found = contents(workdir)
    for secret in (*SECRETS.values(), str(ROOT)):
        assert [name for name, content in found.items() if secret.encode() in content] == []
    assert {name for name, content in found.items() if PLACE.encode() in content} == NAMES_TEXT


@pytest.mark.slow
def test_the_umask_decides_who_may_read(workdir: Path) -> None:
    modes = {path: path.stat().st_mode & 0o777 for path in (workdir, *workdir.rglob("*"))}
    wrong = {str(path): oct(mode) for path, mode in modes.items() if mode != (0o750 if path.is_dir() else 0o640)}
    assert wrong == {}

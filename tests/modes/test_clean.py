"""--mode=clean on text with planted faults."""

import json
from pathlib import Path

import pytest

from branchnorm_jax import config as configs
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.errors import UserError
from branchnorm_jax.modes.clean import clean
from branchnorm_jax.options import Config
from branchnorm_jax.workdir import Workdir
from tests.conftest import run_main
from tests.data.test_quality import sentences

GOOD = sentences(300)
VALID = [*sentences(310)[305:], GOOD[7]]
DIRT = [GOOD[3], ("Tom &amp; Jerry went home", "ο Τομ &amp; ο Τζέρι πήγαν"), ("", "τίποτα"), ("x\ty 12", "x\ty 12")]


def write(folder: Path) -> Path:
    folder.mkdir()
    for split, pairs in (("train", [*GOOD, *DIRT]), ("valid", VALID)):
        for side, language in enumerate(("en", "el")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    return folder


def config_of(text: Path, **options: object) -> Config:
    values = configs.default_config("1L-1L")
    with values.unlocked():
        values.data.update(source="text", path=str(text), source_lang="en", target_lang="el")
        values.clean.update(options)
    return configs.from_config_dict(values)


def test_faulty_pairs_are_removed_and_listed(tmp_path: Path) -> None:
    clean(config_of(write(tmp_path / "text")), Workdir(tmp_path / "run"))
    folder = tmp_path / "run" / "clean"
    kept = [pair for pair in GOOD if pair != GOOD[7]] + [("Tom & Jerry went home", "ο Τομ & ο Τζέρι πήγαν")]
    assert list(read_pairs(config_of(folder).data, "train")) == kept
    assert list(read_pairs(config_of(folder).data, "valid")) == VALID
    assert not list(folder.glob("test.*"))
    rows = [line.split("\t") for line in (folder / "removed.tsv").read_text(encoding="utf-8").splitlines()]
    assert rows == [
        ["line", "faults", "source", "target"],
        ["8", "held_out", *GOOD[7]],
        ["301", "duplicate", *GOOD[3]],
        ["303", "empty", "", "τίποτα"],
        ["304", "copy,script", "x y 12", "x y 12"],
    ]
    assert json.loads((folder / "clean.json").read_text()) == {
        "read": 304,
        "kept": 300,
        "unescaped": 1,
        "removed": {"empty": 1, "copy": 1, "duplicate": 1, "script": 1, "held_out": 1},
    }


def test_entities_never_break_lines(tmp_path: Path) -> None:
    write(tmp_path / "text")
    for language in ("en", "el"):
        with open(tmp_path / "text" / f"train.{language}", "a", encoding="utf-8") as file:
            file.write(
                "one&#13;two&#8232;three&Tab;four 10² 3³\n" if language == "en" else "ένα δύο τρία τέσσερα 10² 3³\n"
            )
    clean(config_of(tmp_path / "text"), Workdir(tmp_path / "run"))
    *_, last = (tmp_path / "run" / "clean" / "train.en").read_text(encoding="utf-8").splitlines()
    assert last == "one two three four 10² 3³"


def test_only_the_named_faults_are_removed(tmp_path: Path) -> None:
    options = {"drop": "empty, entities", "unescape": False, "path": str(tmp_path / "out")}
    clean(config_of(write(tmp_path / "text"), **options), Workdir(tmp_path / "run"))
    text = list(read_pairs(config_of(tmp_path / "out").data, "train"))
    assert text == [*GOOD, DIRT[0], DIRT[3]]
    with pytest.raises(UserError, match="not an empty folder"):
        clean(config_of(tmp_path / "text", **options), Workdir(tmp_path / "run"))


def test_mistakes_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "text")
    with pytest.raises(UserError, match="'copies'; use empty, copy"):
        clean(config_of(tmp_path / "text", drop="copies"), Workdir(tmp_path / "run"))
    with pytest.raises(UserError, match=r"needs clean\.unescape=False"):
        clean(config_of(tmp_path / "text", drop="entities"), Workdir(tmp_path / "run"))
    with pytest.raises(UserError, match="this is the text itself"):
        clean(config_of(tmp_path / "run" / "clean"), Workdir(tmp_path / "run"))
    write(tmp_path / "damaged")
    (tmp_path / "damaged" / "valid.en").write_text("one line\n")
    with pytest.raises(UserError, match="valid"):
        clean(config_of(tmp_path / "damaged"), Workdir(tmp_path / "run"))
    with pytest.raises(UserError, match="no pair is left"):
        names = "empty,script,copy,duplicate,held_out"
        (tmp_path / "text" / "valid.en").write_bytes((tmp_path / "text" / "train.en").read_bytes())
        (tmp_path / "text" / "valid.el").write_bytes((tmp_path / "text" / "train.el").read_bytes())
        clean(config_of(tmp_path / "text", drop=names, unescape=False), Workdir(tmp_path / "run"))
    assert not (tmp_path / "run" / "clean").exists()


@pytest.mark.slow
def test_clean_text_trains(tmp_path: Path) -> None:
    languages = "--config.data.source_lang=en", "--config.data.target_lang=el"
    text = "--config=configs/text.py:1L-1L", *languages, f"--workdir={tmp_path / 'run'}"
    done = run_main("--mode=clean", *text, f"--config.data.path={write(tmp_path / 'text')}")
    assert done.returncode == 0, done.stderr
    folder = done.stdout.strip()
    assert folder == str(tmp_path / "run" / "clean")
    small = "--config.model.width=16", "--config.model.ffn_width=16", "--config.model.heads=2"
    train = "--config.data.vocab_size=100", "--config.train.steps=1", "--config.train.batch_tokens=2048"
    done = run_main(*text, f"--config.data.path={folder}", *small, *train)
    assert done.returncode == 0, done.stderr
    assert "train: 300 pairs read, 300 kept" in done.stderr
    assert "also in the training text" not in done.stderr

"""--mode=clean on text with planted faults."""

import dataclasses
import json
import shutil
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
    """Returns a config that cleans `text`. Sentences of random words are in no language, so it is not identified."""
    values = configs.default_config("1L-1L")
    with values.unlocked():
        values.data.update(source="text", path=str(text), source_lang="en", target_lang="el")
        values.clean.drop = values.clean.drop.replace("language,", "")
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


def test_sides_in_another_language_are_removed(tmp_path: Path) -> None:
    write(tmp_path / "text")
    foreign = ("Personne ne sait qui a construit la vieille maison.", "Κανείς δεν ξέρει ποιος έχτισε το παλιό σπίτι.")
    for text, language in zip(foreign, ("en", "el"), strict=True):
        with open(tmp_path / "text" / f"train.{language}", "a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    clean(config_of(tmp_path / "text", drop="language,empty"), Workdir(tmp_path / "run"))
    rows = (tmp_path / "run" / "clean" / "removed.tsv").read_text(encoding="utf-8").splitlines()
    assert rows[-1].split("\t") == ["305", "language=fr", *foreign]
    assert "303\tempty\t\tτίποτα" in rows


def test_only_whole_entities_are_replaced(tmp_path: Path) -> None:
    """Addresses have names of entities without a semicolon; `html.unescape` would replace these, too."""
    write(tmp_path / "text")
    target = "το ροκ και η ρέγκε και μία διεύθυνση"
    for language, text in (("en", "rock&reggae ?id=3&copy=2&section=5 &section; &lt;"), ("el", target)):
        with open(tmp_path / "text" / f"train.{language}", "a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    clean(config_of(tmp_path / "text"), Workdir(tmp_path / "run"))
    *_, last = read_pairs(config_of(tmp_path / "run" / "clean").data, "train")
    assert last == ("rock&reggae ?id=3&copy=2&section=5 &section; <", target)


@pytest.mark.parametrize("unescape", [True, False])
def test_pairs_of_the_other_splits_are_found_in_the_form_that_is_written(unescape: bool, tmp_path: Path) -> None:
    write(tmp_path / "text")
    for split in ("train", "valid"):
        for language, text in (("en", "one &amp;\u2028two three"), ("el", "ένα &amp;\u2028δύο τρία")):
            with open(tmp_path / "text" / f"{split}.{language}", "a", encoding="utf-8") as file:
                file.write(f"{text}\n")
    clean(config_of(tmp_path / "text", unescape=unescape), Workdir(tmp_path / "run"))
    rows = (tmp_path / "run" / "clean" / "removed.tsv").read_text(encoding="utf-8").splitlines()
    assert [row.split("\t")[:2] for row in rows[-1:]] == [["305", "held_out"]]


def test_no_break_is_left_inside_a_line(tmp_path: Path) -> None:
    write(tmp_path / "text")
    for language in ("en", "el"):
        with open(tmp_path / "text" / f"train.{language}", "a", encoding="utf-8", newline="") as file:
            file.write("one\ttwo\u2028three four\n" if language == "en" else "ένα δύο\u0085τρία τέσσερα\n")
    clean(config_of(tmp_path / "text"), Workdir(tmp_path / "run"))
    *_, last = read_pairs(config_of(tmp_path / "run" / "clean").data, "train")
    assert last == ("one two three four", "ένα δύο τρία τέσσερα")


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
    assert text == [*GOOD, DIRT[0], ("x y 12", "x y 12")]
    with pytest.raises(UserError, match="not an empty folder"):
        clean(config_of(tmp_path / "text", **options), Workdir(tmp_path / "run"))


def test_each_pair_of_a_multilingual_corpus_is_cleaned_once(tmp_path: Path) -> None:
    """One folder serves both directions."""
    write(tmp_path / "text")
    for split in ("train", "valid"):
        lines = (tmp_path / "text" / f"{split}.en").read_text().splitlines()
        reverse = "".join(" ".join(reversed(line.split())) + "\n" for line in lines)
        (tmp_path / "text" / f"{split}.de").write_text(reverse)
    config = config_of(tmp_path / "text")
    data = dataclasses.replace(config.data, pairs="en+el,en-de", files="{split}.{lang}")
    clean(dataclasses.replace(config, data=data), Workdir(tmp_path / "run"))
    folder = tmp_path / "run" / "clean"
    assert sorted(path.name for path in folder.iterdir()) == ["en-de", "en-el"]
    clean(config, Workdir(tmp_path / "alone"))
    for file in (tmp_path / "alone" / "clean").iterdir():
        assert (folder / "en-el" / file.name).read_bytes() == file.read_bytes()
    data = dataclasses.replace(data, path=str(folder), files="{pair}/{split}.{lang}")
    for direction in data.directions():
        count = json.loads((folder / ("en-de" if "de" in direction.pair else "en-el") / "clean.json").read_text())[
            "kept"
        ]
        assert len(list(read_pairs(direction, "train"))) == count


def test_each_corpus_is_cleaned_into_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "text")
    for language in ("en", "el"):
        (folder / "web").mkdir(exist_ok=True)
        (folder / f"train.{language}").rename(folder / f"news.{language}")
        first = "".join((folder / f"news.{language}").read_text(encoding="utf-8").splitlines(keepends=True)[:3])
        (folder / "web" / f"all.{language}").write_text(first + "new words\n", encoding="utf-8")
    config = config_of(folder, drop="duplicate,held_out")
    split = dataclasses.replace(config.data, train_split="news:2,web/all")
    clean(dataclasses.replace(config, data=split), Workdir(tmp_path / "run"))
    copy = dataclasses.replace(split, path=str(tmp_path / "run" / "clean"), train_split="news:2,web-all:1")
    (news, _), (web, _) = copy.corpora()
    assert list(read_pairs(web, "train")) == [("new words", "new words")]
    assert len(list(read_pairs(news, "train"))) == 302
    assert len((tmp_path / "run" / "clean" / "removed.web-all.tsv").read_text().splitlines()) == 4
    numbers = json.loads((tmp_path / "run" / "clean" / "clean.json").read_text())
    assert numbers["web-all"]["removed"] == {"duplicate": 3} and numbers["news"]["kept"] == 302
    both = dataclasses.replace(config.data, train_split="web/all,web-all")
    with pytest.raises(UserError, match="would be the files web-all, web-all"):
        clean(dataclasses.replace(config, data=both), Workdir(tmp_path / "other"))


def test_filters_of_opusfilter_see_only_pairs_without_faults(tmp_path: Path) -> None:
    pytest.importorskip("opusfilter", reason="needs the extra [clean]")
    (tmp_path / "filters.yaml").write_text("- LengthFilter: {unit: word, max_length: 8}", encoding="utf-8")
    clean(config_of(write(tmp_path / "text"), filters=str(tmp_path / "filters.yaml")), Workdir(tmp_path / "run"))
    folder = tmp_path / "run" / "clean"
    short = [pair for pair in GOOD if pair != GOOD[7] and max(len(text.split()) for text in pair) <= 8]
    assert list(read_pairs(config_of(folder).data, "train")) == [
        *short,
        ("Tom & Jerry went home", "ο Τομ & ο Τζέρι πήγαν"),
    ]
    rows = [line.split("\t")[:2] for line in (folder / "removed.tsv").read_text(encoding="utf-8").splitlines()]
    faults = {"8": "held_out", "301": "duplicate", "303": "empty", "304": "copy,script"}
    long = {str(line): "LengthFilter" for line, pair in enumerate(GOOD, start=1) if pair not in (*short, GOOD[7])}
    assert dict(rows[1:]) == faults | long
    assert [int(line) for line, _ in rows[1:]] == sorted(int(line) for line in faults | long)
    assert json.loads((folder / "clean.json").read_text())["removed"]["LengthFilter"] == len(long)


def test_mistakes_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "text")
    with pytest.raises(UserError, match="'copies'; use empty, copy"):
        clean(config_of(tmp_path / "text", drop="copies"), Workdir(tmp_path / "run"))
    with pytest.raises(UserError, match=r"needs clean\.unescape=False"):
        clean(config_of(tmp_path / "text", drop="entities"), Workdir(tmp_path / "run"))
    with pytest.raises(UserError, match="this would replace the text itself"):
        clean(config_of(tmp_path / "run" / "clean"), Workdir(tmp_path / "run"))
    (tmp_path / "run" / "clean").mkdir(parents=True)
    write(tmp_path / "run" / "clean" / "en-el")
    with pytest.raises(UserError, match="this would replace the text itself"):
        clean(config_of(tmp_path / "run" / "clean" / "en-el"), Workdir(tmp_path / "run"))
    assert (tmp_path / "run" / "clean" / "en-el" / "train.en").exists()
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"data\.path=.*loop: no such folder"):
        clean(config_of(tmp_path / "loop"), Workdir(tmp_path / "run"))
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
    drop = "--config.clean.drop=empty,copy,duplicate,held_out"
    done = run_main("--mode=clean", *text, drop, f"--config.data.path={write(tmp_path / 'text')}")
    assert done.returncode == 0, done.stderr
    folder = done.stdout.strip()
    assert folder == str(tmp_path / "run" / "clean")
    small = "--config.model.width=16", "--config.model.ffn_width=16", "--config.model.heads=2"
    train = "--config.data.vocab_size=100", "--config.train.steps=1", "--config.train.batch_tokens=2048"
    done = run_main(*text, f"--config.data.path={folder}", *small, *train)
    assert done.returncode == 0, done.stderr
    assert "train: 300 pairs read, 300 kept" in done.stderr
    assert "first in pair" not in done.stderr

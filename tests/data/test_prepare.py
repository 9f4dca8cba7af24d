"""Preparation of vocabulary and stores: what is reused, and what is rebuilt."""

import dataclasses
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.prepare import announced, prepare
from branchnorm_jax.data.tokenizer import ORIGIN
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import CleanConfig, DataConfig
from tests.data.test_quality import sentences

CONFIG = DataConfig(numerals_pairs=200, vocab_size=200)


def vocabulary(config: DataConfig, folder: Path, keep: bool = False) -> str:
    return prepare(config, folder, lambda line: None, keep).tokenizer.sha256


def test_vocabulary_is_rebuilt_for_other_text_or_options(tmp_path: Path) -> None:
    """This happens if another mode prepared the run, or if the run failed before its first checkpoint."""
    first = vocabulary(CONFIG, tmp_path)
    written = (tmp_path / "vocabulary" / "source.model").stat().st_mtime_ns
    assert vocabulary(CONFIG, tmp_path) == first
    assert (tmp_path / "vocabulary" / "source.model").stat().st_mtime_ns == written
    seen = {first}
    for changed in ({"vocab_size": 180}, {"vocab_type": "bpe"}, {"target_lang": "fr"}, {"numerals_pairs": 300}):
        config = dataclasses.replace(CONFIG, **changed)
        digest = vocabulary(config, tmp_path)
        assert digest == vocabulary(config, tmp_path / "alone" / next(iter(changed)))
        seen.add(digest)
    assert len(seen) == 5


def test_vocabulary_is_kept_if_requested_or_supplied_by_the_user(tmp_path: Path) -> None:
    first, other = vocabulary(CONFIG, tmp_path), dataclasses.replace(CONFIG, target_lang="fr")
    assert vocabulary(other, tmp_path, keep=True) == first
    (tmp_path / "vocabulary" / ORIGIN).unlink()
    assert vocabulary(other, tmp_path) == first


def test_an_interrupted_start_leaves_no_list_of_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary stays the same, and has unused pieces of the first text that the second one has."""
    first = dataclasses.replace(CONFIG, max_ratio=1.05)
    prepare(first, tmp_path, lambda line: None)
    with monkeypatch.context() as patch:
        patch.setattr(np, "unique", lambda tokens: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(CONFIG, tmp_path, lambda line: None)
    again = prepare(CONFIG, tmp_path, lambda line: None).tokenizer
    alone = prepare(CONFIG, tmp_path / "alone", lambda line: None).tokenizer
    assert again.sha256 == alone.sha256
    assert again.unused_target == alone.unused_target
    assert again.unused_target != prepare(first, tmp_path, lambda line: None).tokenizer.unused_target


def test_unknown_characters_are_reported(tmp_path: Path) -> None:
    log: list[str] = []
    prepare(CONFIG, tmp_path, log.append)
    assert not any("unknown" in line for line in log)
    corpus = prepare(dataclasses.replace(CONFIG, target_lang="cs"), tmp_path, log.append, keep=True)
    (train,) = (line for line in log if line.startswith("train") and "unknown" in line)
    unknown = sum(token == 2 for token in corpus.train.stores[0].target_tokens.tolist())
    share = unknown / len(corpus.train.stores[0].target_tokens)
    assert share > 0.01
    assert f"; {share:.1%} of the target's tokens are unknown to the vocabulary" in train


def test_other_processes_do_not_need_the_text(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("train", "valid"):
        for lang in ("en", "de"):
            (text / f"{name}.{lang}").write_text("".join(f"{lang} {number}\n" for number in range(100)))
    config = DataConfig(source="text", path=str(text), files="{split}.{lang}", vocab_size=24, byte_fallback=False)
    first = prepare(config, tmp_path / "run", lambda line: None)
    for file in text.iterdir():
        file.unlink()
    other = prepare(config, tmp_path / "run", lambda line: None, keep=True, trust=True)
    assert other.identity() == first.identity()
    assert all(store.reused for store in (*other.train.stores, *other.valid))
    with pytest.raises(UserError, match="no file matches"):
        prepare(config, tmp_path / "run", lambda line: None, keep=True)


def write(folder: Path, splits: Mapping[str, Sequence[tuple[str, str]]]) -> DataConfig:
    folder.mkdir(exist_ok=True)
    for split, pairs in splits.items():
        for side, language in enumerate(("en", "el")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
    return DataConfig(source="text", path=str(folder), source_lang="en", target_lang="el", vocab_size=80)


@pytest.mark.parametrize("options", [{}, {"subword_samples": 2}, {"pairs": "en-el,el-en"}, {"train_split": "a:2,b"}])
def test_changed_text_is_refused_before_it_is_tokenised(tmp_path: Path, options: dict[str, Any]) -> None:
    """The text of a run is only read: the hashes are those of the stores that it would have."""
    some = sentences(200)
    config = write(tmp_path / "text", {"train": some, "a": some[:120], "b": some[120:], "valid": some[:5]})
    config = dataclasses.replace(config, max_ratio=3.0, **options)
    run, identities = tmp_path / "run", list[dict[str, str]]()
    first = prepare(config, run, lambda line: None, check=identities.append).identity()
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*.bin")}
    text = tmp_path / "text" / ("b.el" if "train_split" in options else "train.el")
    content = text.read_text(encoding="utf-8")
    text.write_text(content.replace("α", "ά"), encoding="utf-8")

    def refuse(identity: dict[str, str]) -> None:
        identities.append(identity)
        raise UserError("changed")

    with pytest.raises(UserError, match="changed"):
        prepare(config, run, lambda line: None, keep=True, check=refuse)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*.bin")} == files
    changed = prepare(config, run, lambda line: None, keep=True).identity()
    text.write_text(content, encoding="utf-8")
    again = prepare(config, run, lambda line: None, keep=True, check=identities.append).identity()
    assert identities == [first, changed, again]
    assert again == first != changed


def test_the_report_judges_each_corpus_by_itself(tmp_path: Path) -> None:
    """In one corpus, a target is as long as its source; in the other one, it is eight times as long."""
    even = sentences(300)
    steep = [(source, " ".join([target] * 8)) for source, target in even[100:]]
    unclean = [*even[:100], ("a house \x1b[2J is red", "ένα σπίτι είναι κόκκινο")]
    config = write(tmp_path / "text", {"a": unclean, "b": steep, "valid": even[:5]})
    said: list[str] = []
    reports = prepare(dataclasses.replace(config, train_split="a,b"), tmp_path / "run", said.append).reports["en-el"]
    assert reports["train b"]["faults"] == {}
    assert set(reports["train a"]["faults"]) == {"characters", "held_out"}
    assert any(r"first in pair 101: a house \x1b[2J is red | " in line for line in said)


def test_faults_of_all_splits_are_reported_once(tmp_path: Path) -> None:
    good, new = sentences(200), sentences(210)[200:]
    splits = {
        "train": [*good, good[0], ("Tom &amp; me here", "ο Τομ κι εγώ εδώ")],
        "valid": [good[5], *new[:4], ("something", "")],
        "test": [*new[5:], (good[7][0], "μια άλλη μετάφραση τώρα"), ("this is English", "this is English, too")],
    }
    config = write(tmp_path / "text", splits)
    said: list[str] = []
    reports = prepare(config, tmp_path / "run", said.append).reports
    hint = "--mode=clean lists faulty training pairs, and writes a copy without them to train on in a new workdir"
    assert [line for line in said if "first in pair" in line or "clean" in line] == [
        f"train: 1 pair also in another split, first in pair 6: {good[5][0]} | {good[5][1]}",
        f"train: 1 pair with a source that has another translation in another split, first in pair 8: "
        f"{good[7][0]} | {good[7][1]}",
        f"train: 1 pair that occurred before, first in pair 201: {good[0][0]} | {good[0][1]}",
        "train: 1 pair with entities such as &quot;, first in pair 202: Tom &amp; me here | ο Τομ κι εγώ εδώ",
        f"valid: 1 pair also in another split, first in pair 1: {good[5][0]} | {good[5][1]}",
        "valid: 1 pair with an empty side, first in pair 6: something | ",
        f"test: 1 pair with a source that has another translation in another split, first in pair 6: "
        f"{good[7][0]} | μια άλλη μετάφραση τώρα",
        "test: 1 pair with a side in another script than its language, first in pair 7: "
        "this is English | this is English, too",
        hint,
        "--mode=clean keeps the pairs with a source that has another translation in another split; to remove them, "
        f"too, set clean.drop={CleanConfig().drop},held_out_source",
    ]
    assert {split: found["pairs"] for split, found in reports["en-el"].items()} == {"train": 202, "valid": 6, "test": 7}
    duplicate = {"pairs": 1, "line": 201, "source": good[0][0], "target": good[0][1]}
    assert reports["en-el"]["train"]["faults"]["duplicate"] == duplicate
    said.clear()
    assert prepare(config, tmp_path / "run", said.append).reports == reports
    assert not any("first in pair" in line for line in said)
    # The validation text changes what is wrong with the training text.
    write(tmp_path / "text", {"valid": new[:4]})
    again = prepare(config, tmp_path / "run", said.append).reports["en-el"]
    assert again["valid"] == {"pairs": 4, "faults": {}}
    assert "held_out" not in again["train"]["faults"] and "held_out_source" in again["train"]["faults"]


def test_missing_and_damaged_test_text_is_said(tmp_path: Path) -> None:
    config = write(tmp_path / "text", {"train": sentences(200), "valid": sentences(210)[200:]})
    said: list[str] = []
    assert set(prepare(config, tmp_path / "run", said.append).reports["en-el"]) == {"train", "valid"}
    (missing,) = (line for line in said if line.startswith("no test text: "))
    assert "no file matches test.en" in missing
    write(tmp_path / "text", {"test": sentences(212)[210:]})
    (tmp_path / "text" / "test.el").write_text("μόνο μία γραμμή\n", encoding="utf-8")
    assert set(prepare(config, tmp_path / "run", said.append).reports["en-el"]) == {"train", "valid"}
    assert re.fullmatch(r"no test text: .*test.en has 2 lines but .*test.el has 1.*", said[-1])


def test_missing_validation_text_is_an_error_before_the_vocabulary_is_trained(tmp_path: Path) -> None:
    config = write(tmp_path / "text", {"train": sentences(200)})
    said: list[str] = []
    with pytest.raises(UserError, match=r"no file matches valid\.en"):
        prepare(config, tmp_path / "run", said.append)
    assert said == []


def test_a_test_text_without_a_name_is_not_looked_for(tmp_path: Path) -> None:
    config = write(tmp_path / "text", {"train": sentences(200), "valid": sentences(210)[200:]})
    config = dataclasses.replace(config, test_split="")
    said: list[str] = []
    assert set(prepare(config, tmp_path / "run", said.append).reports["en-el"]) == {"train", "valid"}
    assert not any("test text" in line for line in said)
    with pytest.raises(UserError, match=r"the split has no name; set data\.valid_split or data\.test_split"):
        next(read_pairs(config, "test"))


def test_long_steps_say_that_they_go_on() -> None:
    """A reminder that never comes makes the test wait forever, not fail at random."""
    said: list[str] = []
    twice = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            twice.set()

    with pytest.raises(KeyError), announced("counting sheep", say, every=0.01):
        twice.wait()
        raise KeyError
    after = len(said)
    assert said[0] == "counting sheep"
    assert all(re.fullmatch(r"still counting sheep \(\d+ s\)", line) for line in said[1:])
    time.sleep(0.05)
    assert len(said) == after

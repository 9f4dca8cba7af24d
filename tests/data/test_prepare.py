"""Preparation of vocabulary and stores: what is reused, and what is rebuilt."""

import dataclasses
import re
import threading
import time
from pathlib import Path

import pytest

from branchnorm_jax.data.prepare import announced, prepare
from branchnorm_jax.data.tokenizer import ORIGIN
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig
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


def test_faults_and_pairs_of_both_splits_are_reported_once(tmp_path: Path) -> None:
    good = sentences(200)
    train = [*good, good[0], ("Tom &amp; me here", "ο Τομ κι εγώ εδώ")]
    for split, pairs in {"train": train, "valid": [good[5], *sentences(205)[200:]]}.items():
        for side, language in enumerate(("en", "el")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (tmp_path / f"{split}.{language}").write_text(text, encoding="utf-8")
    config = DataConfig(source="text", path=str(tmp_path), source_lang="en", target_lang="el", vocab_size=90)
    expected = [
        "train: 1 pair that occurred before, 1 with entities such as &quot;; "
        "--mode=clean lists them, and writes a copy to train on in a new workdir",
        "valid: 1 of 6 pairs are also in the training text",
    ]
    said: list[str] = []
    store = prepare(config, tmp_path / "run", said.append).train.stores[0]
    assert [line for line in said if line in expected] == expected
    assert store.quality["duplicate"] == {"pairs": 1, "line": 201, "source": good[0][0], "target": good[0][1]}
    said.clear()
    again = prepare(config, tmp_path / "run", said.append).train.stores[0]
    assert again.quality == store.quality
    assert not any(line in expected for line in said)


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

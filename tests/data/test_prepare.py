"""Preparation of vocabulary and stores: what is reused, and what is rebuilt."""

import dataclasses
from pathlib import Path

from branchnorm_jax.data.prepare import prepare
from branchnorm_jax.data.tokenizer import ORIGIN
from branchnorm_jax.options import DataConfig

CONFIG = DataConfig(numerals_pairs=200, vocab_size=200)


def vocabulary(config: DataConfig, folder: Path, keep: bool = False) -> str:
    return prepare(config, folder, lambda line: None, keep).tokenizer.sha256


def test_vocabulary_is_rebuilt_for_other_text_or_options(tmp_path: Path) -> None:
    """This happens if another mode prepared the run, or if the run failed before its first checkpoint."""
    first = vocabulary(CONFIG, tmp_path)
    written = (tmp_path / "vocabulary" / "vocab.model").stat().st_mtime_ns
    assert vocabulary(CONFIG, tmp_path) == first
    assert (tmp_path / "vocabulary" / "vocab.model").stat().st_mtime_ns == written
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

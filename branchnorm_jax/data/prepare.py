"""From a config to what training reads: vocabulary and token stores, made once per workdir."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.store import TokenStore, build_store, describe_counts
from branchnorm_jax.data.tokenizer import UNUSED, Tokenizer, load_tokenizer, note_unused, train_tokenizer
from branchnorm_jax.options import DataConfig


class Corpus(NamedTuple):
    """What a run learns from."""

    tokenizer: Tokenizer
    train: TokenStore
    valid: TokenStore

    def identity(self) -> dict[str, str]:
        """Hashes by which a resumed run knows that it reads the same text with the same vocabulary."""
        return {
            "vocabulary": self.tokenizer.sha256,
            "train": self.train.fingerprint,
            "valid": self.valid.fingerprint,
        }


def prepare(config: DataConfig, directory: Path, say: Callable[[str], None]) -> Corpus:
    """Loads or makes `vocabulary/` and `corpus/` under `directory`; `say` receives what was done, a line each."""
    vocabulary = directory / "vocabulary"
    if vocabulary.exists():
        tokenizer = load_tokenizer(vocabulary)
    else:
        say(f"training a vocabulary of {config.vocab_size} pieces")
        tokenizer = train_tokenizer(config, read_pairs(config, "train"), vocabulary)
    stores = {}
    for split in ("train", "valid"):
        stores[split] = build_store(config, tokenizer, split, directory / "corpus", filter=split == "train")
        say(describe_counts(split, stores[split]))
    if not (vocabulary / UNUSED).exists() or not stores["train"].reused:
        tokenizer = note_unused(tokenizer, np.unique(stores["train"].target_tokens), vocabulary)
    return Corpus(tokenizer, stores["train"], stores["valid"])

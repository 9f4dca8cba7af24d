"""From a config to what training reads: vocabulary and token stores, made once per workdir."""

import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.data.mixture import Mixture
from branchnorm_jax.data.store import build_store, describe_counts
from branchnorm_jax.data.tokenizer import UNUSED, Tokenizer, load_tokenizer, note_unused, train_tokenizer
from branchnorm_jax.options import DataConfig


class Corpus(NamedTuple):
    """What a run learns from: its directions, all of them for training, and each by itself for validation."""

    tokenizer: Tokenizer
    directions: Sequence[DataConfig]
    train: Mixture
    valid: Sequence[Mixture]

    def identity(self) -> dict[str, str]:
        """Hashes by which a resumed run knows that it reads the same text with the same vocabulary."""
        prints = {
            "train": [store.fingerprint for store in self.train.stores],
            "valid": [mixture.stores[0].fingerprint for mixture in self.valid],
        }
        return {"vocabulary": self.tokenizer.sha256} | {
            split: found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
            for split, found in prints.items()
        }


def prepare(config: DataConfig, directory: Path, say: Callable[[str], None]) -> Corpus:
    """Loads or makes `vocabulary/` and `corpus/` under `directory`; `say` receives what was done, a line each.

    With several pairs, each has a folder of its own under `corpus/`.
    """
    vocabulary, directions = directory / "vocabulary", config.directions()
    if vocabulary.exists():
        tokenizer = load_tokenizer(vocabulary)
    else:
        say(f"training a vocabulary of {config.vocab_size} pieces")
        text = itertools.chain.from_iterable(read_pairs(direction, "train") for direction in directions)
        tokenizer = train_tokenizer(config, text, vocabulary)
    stores = {}
    for split in ("train", "valid"):
        stores[split] = [
            build_store(
                direction,
                tokenizer,
                split,
                directory / "corpus" / (direction.pair if config.pairs else ""),
                filter=split == "train",
                tags=tokenizer.tags(config, direction.target_lang),
            )
            for direction in directions
        ]
        for direction, store in zip(directions, stores[split], strict=True):
            say(describe_counts(f"{split} {direction.pair}" if config.pairs else split, store))
    if not (vocabulary / UNUSED).exists() or not all(store.reused for store in stores["train"]):
        used = np.unique(np.concatenate([np.unique(store.target_tokens) for store in stores["train"]]))
        tokenizer = note_unused(tokenizer, used, vocabulary)
    train = Mixture(stores["train"], config.temperature)
    if config.pairs:
        drawn = zip(directions, train.draws, strict=True)
        say("an epoch draws " + ", ".join(f"{count:,} of {direction.pair}" for direction, count in drawn))
    return Corpus(tokenizer, directions, train, [Mixture([store]) for store in stores["valid"]])

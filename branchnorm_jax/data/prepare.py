"""From a config to what training reads: vocabulary and token stores, made once per workdir."""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from branchnorm_jax.data.corpus import corpus_key, read_pairs
from branchnorm_jax.data.mixture import Mixture
from branchnorm_jax.data.store import TokenStore, build_store, describe_counts
from branchnorm_jax.data.tokenizer import ORIGIN, UNUSED, Tokenizer, load_tokenizer, note_unused, train_tokenizer
from branchnorm_jax.options import DataConfig


class Corpus(NamedTuple):
    """What a run learns from: all its directions, and what is validated, each direction by itself."""

    tokenizer: Tokenizer
    validated: Sequence[DataConfig]
    train: Mixture
    valid: Sequence[TokenStore]

    def identity(self) -> dict[str, str]:
        """Hashes by which a resumed run knows that it reads the same text with the same vocabulary."""
        prints = {
            "train": [store.fingerprint for store in self.train.stores],
            "valid": [store.fingerprint for store in self.valid],
        }
        return {"vocabulary": self.tokenizer.sha256} | {
            split: found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()
            for split, found in prints.items()
        }


INGREDIENTS = "vocab_size", "vocab_type", "shared_vocab", "byte_fallback", "vocab_sentences", "pairs", "tags"
"""Options that a vocabulary depends on, beside the text."""


def prepare(config: DataConfig, directory: Path, say: Callable[[str], None], keep: bool = False) -> Corpus:
    """Loads or makes `vocabulary/` and `corpus/` under `directory`; `say` receives what was done, a line each.

    With several pairs, each has a folder of its own under `corpus/`. A vocabulary that was made of other text, or with
    other options, is made anew, unless the run is to `keep` it; one that does not say what it was made of is kept.
    """
    vocabulary, directions = directory / "vocabulary", config.directions()
    validated = [direction for direction in directions if direction in config.validated()]
    origin = origin_of(config)
    if vocabulary.exists() and (keep or reusable(vocabulary, origin, say)):
        tokenizer = load_tokenizer(vocabulary)
    else:
        say(f"training a vocabulary of {config.vocab_size} pieces")
        text = itertools.chain.from_iterable(read_pairs(direction, "train") for direction in directions)
        tokenizer = train_tokenizer(config, text, vocabulary, origin)
    train: list[TokenStore] = []
    valid: list[TokenStore] = []
    for direction in directions:
        folder = directory / "corpus" / (direction.pair if config.pairs else "")
        tags = tokenizer.tags(config, direction.target_lang)
        name = f"train {direction.pair}" if config.pairs else "train"
        for sample in range(config.subword_samples) or [None]:
            where, which = folder, name
            if sample is not None:
                where, which = folder / f"sample-{sample}", f"{name}, tokenisation {sample + 1}"
            train.append(build_store(direction, tokenizer, "train", where, filter=True, tags=tags, sample=sample))
            say(describe_counts(which, train[-1]))
        if direction in validated:
            valid.append(build_store(direction, tokenizer, "valid", folder, filter=False, tags=tags))
            say(describe_counts(name.replace("train", "valid"), valid[-1]))
    if not (vocabulary / UNUSED).exists() or not all(store.reused for store in train):
        used = np.unique(np.concatenate([np.unique(store.target_tokens) for store in train]))
        tokenizer = note_unused(tokenizer, used, vocabulary)
    mixture = Mixture(train, config.temperature)
    if config.pairs:
        drawn = np.array(mixture.draws).reshape(len(directions), -1)[:, 0]
        say("an epoch draws " + ", ".join(f"{n:,} of {d.pair}" for n, d in zip(drawn, directions, strict=True)))
    return Corpus(tokenizer, validated, mixture, valid)


def origin_of(config: DataConfig) -> str:
    """What a vocabulary is made of, as JSON."""
    options = {name: getattr(config, name) for name in INGREDIENTS}
    text = [corpus_key(direction, "train") for direction in config.directions()]
    return json.dumps({"options": options, "text": text}, indent=2) + "\n"


def reusable(vocabulary: Path, origin: str, say: Callable[[str], None]) -> bool:
    """Whether the vocabulary is not known to be of another origin."""
    made_of = vocabulary / ORIGIN
    if not made_of.exists():
        say(f"{vocabulary}: there is no {ORIGIN} that tells what it was made of; it is taken as it is")
        return True
    return made_of.read_text(encoding="utf-8") == origin

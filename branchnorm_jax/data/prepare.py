"""Prepares the vocabulary and the token stores of a run, once per workdir."""

import contextlib
import functools
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.data.corpus import corpus_key, read_pairs
from branchnorm_jax.data.documents import read_documents
from branchnorm_jax.data.mixture import Mixture, Store
from branchnorm_jax.data.report import report
from branchnorm_jax.data.store import TokenStore, build_store, describe_counts
from branchnorm_jax.data.texts import TextRows, build_text
from branchnorm_jax.data.tokenizer import (
    ORIGIN,
    UNUSED,
    Tokenizer,
    load_tokenizer,
    note_unused,
    train_text_tokenizer,
    train_tokenizer,
)
from branchnorm_jax.options import DataConfig


class Corpus(NamedTuple):
    """The data of a run: a mixture of all training directions, and one validation store per validated direction.

    `reports`: language pair -> `report.report`; empty if another process prepared the data.
    """

    tokenizer: Tokenizer
    validated: Sequence[DataConfig]
    train: Mixture
    valid: Sequence[Store]
    reports: Mapping[str, Any]

    def identity(self) -> dict[str, str]:
        """Returns hashes of the text and the vocabulary.

        A resumed run uses them to check that neither has changed.
        """
        fingerprints = {
            "train": [store.fingerprint for store in self.train.stores],
            "valid": [store.fingerprint for store in self.valid],
        }
        return {"vocabulary": self.tokenizer.sha256} | {
            split: values[0] if len(values) == 1 else hashlib.sha256("".join(values).encode()).hexdigest()
            for split, values in fingerprints.items()
        }


PATIENCE = 30
"""Seconds between two reminders of a long step."""

INGREDIENTS = (
    *("vocab_size", "vocab_type", "shared_vocab", "byte_fallback", "vocab_sentences", "pairs", "tags"),
    *("source_normalization", "target_normalization", "max_length"),
)
"""Options that a vocabulary depends on, in addition to the text."""


def prepare(
    config: DataConfig, directory: Path, say: Callable[[str], None], keep: bool = False, trust: bool = False
) -> Corpus:
    """Loads or creates `vocabulary/` and `corpus/` under `directory`.

    With several language pairs, each pair has its own folder under `corpus/`. The vocabulary is trained again if its
    training text or options have changed. It is not trained again if `keep` is set, or if it does not record its
    origin.

    Args:
      config: specifies the corpora and the vocabulary.
      directory: parent folder, usually the workdir.
      say: called with one line per completed step.
      keep: whether to keep an existing vocabulary even if its text or options have changed.
      trust: whether to open existing stores without looking at the text, which another process has just tokenised.
    """
    if config.source == "documents":
        return prepare_text(config, directory, say, keep, trust)
    vocabulary, directions = directory / "vocabulary", config.directions()
    build = functools.partial(build_store, trust=trust)
    validated = [direction for direction in directions if direction in config.validated()]
    if vocabulary.exists() and (keep or reusable(vocabulary, origin_of(config), say)):
        tokenizer = load_tokenizer(vocabulary)
    else:
        with announced(f"training a vocabulary of {config.vocab_size} pieces", say):
            text = itertools.chain.from_iterable(read_pairs(direction, "train") for direction in directions)
            tokenizer = train_tokenizer(config, text, vocabulary, origin_of(config), say)
    train: list[TokenStore] = []
    valid: list[TokenStore] = []
    reports: dict[str, Any] = {}
    for direction in directions:
        folder = directory / "corpus" / (direction.pair if config.pairs else "")
        tags = tokenizer.tags(config, direction.source_lang, direction.target_lang)
        name = f"train {direction.pair}" if config.pairs else "train"
        for sample in range(config.subword_samples) or [None]:
            parent, label = folder, name
            if sample is not None:
                parent, label = folder / f"sample-{sample}", f"{name}, tokenisation {sample + 1}"
            train.append(build(direction, tokenizer, "train", parent, filter=True, tags=tags, sample=sample))
            say(describe_counts(label, train[-1]))
        if direction in validated:
            valid.append(build(direction, tokenizer, "valid", folder, filter=False, tags=tags))
            label = name.replace("train", "valid")
            say(describe_counts(label, valid[-1]))
        # The built-in corpus is clean, and its splits have no pair in common.
        if not trust and config.source != "numerals":
            held_out = ["valid", "test"] if direction in validated else ["test"]
            label = f" {direction.pair}" if config.pairs else ""
            reports[direction.pair] = report(direction, folder, held_out, label, say)
    if not (vocabulary / UNUSED).exists() or not all(store.reused for store in train):
        used = np.unique(np.concatenate([np.unique(store.target_tokens) for store in train]))
        tokenizer = note_unused(tokenizer, used, vocabulary)
    mixture = Mixture(train, config.temperature)
    if config.pairs:
        drawn = np.array(mixture.draws).reshape(len(directions), -1)[:, 0]
        say(
            "sentence pairs per epoch: "
            + ", ".join(f"{n:,} of {d.pair}" for n, d in zip(drawn, directions, strict=True))
        )
    return Corpus(tokenizer, validated, mixture, valid, reports)


def prepare_text(config: DataConfig, directory: Path, say: Callable[[str], None], keep: bool, trust: bool) -> Corpus:
    """Does the same as `prepare` for the text of a language model."""
    vocabulary = directory / "vocabulary"
    if vocabulary.exists() and (keep or reusable(vocabulary, origin_of(config), say)):
        tokenizer = load_tokenizer(vocabulary)
    else:
        with announced(f"making a vocabulary of {config.vocab_size} pieces", say):
            text = (text for text, _ in read_documents(config, "train"))
            tokenizer = train_text_tokenizer(config, text, vocabulary, origin_of(config))
    rows = []
    for split in ("train", "valid"):
        store = build_text(config, tokenizer, split, directory / "corpus", trust)
        say(store.describe(split))
        rows.append(TextRows(store, config.context, config.rows == "packed"))
    train, valid = rows
    if not (vocabulary / UNUSED).exists() or not train.store.reused:
        tokenizer = note_unused(tokenizer, np.unique(train.store.tokens), vocabulary)
    return Corpus(tokenizer, [config], Mixture([train]), [valid], {})


@contextlib.contextmanager
def announced(what: str, say: Callable[[str], None], every: float = PATIENCE) -> Iterator[None]:
    """Says that a step begins, and every `every` seconds how long it has taken."""
    say(what)
    done, begin = threading.Event(), time.perf_counter()

    def remind() -> None:
        while not done.wait(every):
            say(f"still {what} ({time.perf_counter() - begin:,.0f} s)")

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield
    finally:
        done.set()
        reminder.join()


def origin_of(config: DataConfig) -> str:
    """Returns the text and the options that determine a vocabulary, as JSON."""
    options = {name: getattr(config, name) for name in INGREDIENTS}
    text = [corpus_key(direction, "train") for direction in config.directions()]
    return json.dumps({"options": options, "text": text}, indent=2) + "\n"


def reusable(vocabulary: Path, origin: str, say: Callable[[str], None]) -> bool:
    """Returns whether an existing vocabulary may be reused.

    It may if its recorded origin matches, or if it has none.
    """
    recorded = vocabulary / ORIGIN
    if not recorded.exists():
        say(f"{vocabulary}: has no {ORIGIN} file, so its training text is unknown; using it unchanged")
        return True
    return recorded.read_text(encoding="utf-8") == origin

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
from urllib.parse import quote

import numpy as np

from branchnorm_jax.data.corpus import check_texts, corpus_key, read_pairs
from branchnorm_jax.data.documents import read_documents
from branchnorm_jax.data.mixture import Mixture, Store, repeats
from branchnorm_jax.data.report import report
from branchnorm_jax.data.store import TokenStore, build_store, describe_counts, fingerprint_of, text_digest
from branchnorm_jax.data.texts import TextRows, build_text, rows_fingerprint, text_fingerprint
from branchnorm_jax.data.tokenizer import (
    ORIGIN,
    Tags,
    Tokenizer,
    load_tokenizer,
    train_text_tokenizer,
    train_tokenizer,
    with_unused,
)
from branchnorm_jax.errors import UserError
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
        stores = {"train": self.train.stores, "valid": self.valid}
        return identity_of(self.tokenizer, {name: [one.fingerprint for one in each] for name, each in stores.items()})


def identity_of(tokenizer: Tokenizer, fingerprints: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns hashes of a vocabulary and of the stores of each split."""
    return {"vocabulary": tokenizer.sha256} | {
        split: values[0] if len(values) == 1 else hashlib.sha256("".join(values).encode()).hexdigest()
        for split, values in fingerprints.items()
    }


class Wanted(NamedTuple):
    """A token store that a run needs."""

    config: DataConfig
    split: str
    directory: Path
    tags: Tags
    sample: int | None
    label: str
    """Name of the store in messages."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `build_store` and `fingerprint_of`, beside the tokenizer."""
        given = {name: value for name, value in self._asdict().items() if name != "label"}
        return given | {"filter": self.split == "train"}


PATIENCE = 30
"""Seconds between two reminders of a long step."""

INGREDIENTS = (
    *("vocab_size", "vocab_type", "shared_vocab", "byte_fallback", "vocab_sentences", "pairs", "tags"),
    *("source_normalization", "target_normalization", "max_length"),
)
"""Options that a vocabulary depends on, in addition to the text."""


def prepare(
    config: DataConfig,
    directory: Path,
    say: Callable[[str], None],
    keep: bool = False,
    trust: bool = False,
    check: Callable[[dict[str, str]], None] | None = None,
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
      check: called with the identity of the corpus before any text is tokenised; raises an error to refuse it.
    """
    if config.source == "documents":
        return prepare_text(config, directory, say, keep, trust, check)
    if not trust:
        check_texts(config.directions(), ["train"], "data.pairs")
        check_texts(config.validated(), ["valid"], "data.valid_pairs")
    tokenizer = vocabulary_of(config, directory / "vocabulary", say, keep)
    wanted = list(wanted_stores(config, tokenizer, directory / "corpus"))
    if check is not None:
        digest = functools.cache(text_digest)
        prints: dict[str, list[str]] = {"train": [], "valid": []}
        for one in wanted:
            prints[one.split].append(fingerprint_of(tokenizer=tokenizer, digest=digest, **one.arguments))
        check(identity_of(tokenizer, prints))
    stores: dict[str, list[TokenStore]] = {"train": [], "valid": []}
    for one in wanted:
        stores[one.split].append(build_store(tokenizer=tokenizer, trust=trust, **one.arguments))
        say(describe_counts(one.label, stores[one.split][-1]))
    train = stores["train"]

    def used() -> np.ndarray:
        return np.unique(np.concatenate([np.unique(store.target_tokens) for store in train]))

    tokenizer = with_unused(tokenizer, [store.fingerprint for store in train], used, directory / "vocabulary")
    pairs = {direction.pair for direction in config.validated()}
    reports: dict[str, Any] = {}
    # The built-in corpus is clean, and its splits have no pair in common.
    for direction in config.directions() if not trust and config.source != "numerals" else ():
        held_out = ["valid"] * (direction.pair in pairs) + ["test"] * bool(config.test_split)
        folder, label = folder_of(config, direction, directory / "corpus"), f" {direction.pair}" if config.pairs else ""
        reports[direction.pair] = report(direction, folder, held_out, label, say)
    validated = [direction for direction in config.directions() if direction.pair in pairs]
    return Corpus(tokenizer, validated, mixed(config, train, say), stores["valid"], reports)


def vocabulary_of(config: DataConfig, vocabulary: Path, say: Callable[[str], None], keep: bool) -> Tokenizer:
    """Loads the vocabulary, or trains it; see `prepare`."""
    if vocabulary.exists() and (keep or reusable(vocabulary, origin_of(config), say)):
        return load_tokenizer(vocabulary)
    origin = origin_of(config)  # finds missing files before any text is read
    in_bytes = config.vocab_type == "bytes"
    what = "making the vocabulary of bytes" if in_bytes else f"training a vocabulary of {config.vocab_size} pieces"
    with announced(what, say):
        if config.source == "documents":
            return train_text_tokenizer(
                config, (text for text, _ in read_documents(config, "train")), vocabulary, origin
            )
        text = itertools.chain.from_iterable(read_pairs(direction, "train") for direction in config.directions())
        return train_tokenizer(config, text, vocabulary, origin, say)


def folder_of(config: DataConfig, direction: DataConfig, directory: Path) -> Path:
    """Returns the folder of the stores of a direction."""
    return directory / (direction.pair if config.pairs else "")


def wanted_stores(config: DataConfig, tokenizer: Tokenizer, directory: Path) -> Iterator[Wanted]:
    """Yields the token stores of a run in their order: by direction, corpus and tokenisation."""
    validated = {direction.pair for direction in config.validated()}
    for direction in config.directions():
        folder = folder_of(config, direction, directory)
        tags = tokenizer.tags(config, direction.source_lang, direction.target_lang)
        for corpus, _ in direction.corpora():
            parent = folder / f"train-{quote(corpus.train_split, safe='')}" if several(config) else folder
            label = f"train{named(config, corpus)}"
            if not config.subword_samples:
                yield Wanted(corpus, "train", parent, tags, None, label)
            for sample in range(config.subword_samples):
                number = f"{label}, tokenisation {sample + 1}"
                yield Wanted(corpus, "train", parent / f"sample-{sample}", tags, sample, number)
        if direction.pair in validated:
            label = f"valid {direction.pair}" if config.pairs else "valid"
            yield Wanted(direction, "valid", folder, tags, None, label)


def mixed(config: DataConfig, stores: Sequence[TokenStore], say: Callable[[str], None]) -> Mixture:
    """Returns the mixture of the training stores; says how many pairs of each corpus an epoch has.

    Args:
      config: gives weights and temperature.
      stores: a store for each direction, corpus and tokenisation, in this order.
      say: called with the line, if there are several directions or corpora.
    """
    corpora = [each for direction in config.directions() for each in direction.corpora()]
    weights = [weight for _, weight in config.corpora()]
    sizes = np.array([len(store) for store in stores[:: config.tokenisations]]).reshape(-1, len(weights))
    times = repeats(sizes, weights, config.temperature)
    mixture = Mixture(stores, np.repeat(times, config.tokenisations).tolist())
    if config.pairs or several(config):
        drawn = mixture.draws[:: config.tokenisations]
        each = [
            f"{n:,} of{named(config, corpus)} ({n / sum(drawn):.1%})"
            for n, (corpus, _) in zip(drawn, corpora, strict=True)
        ]
        say(f"sentence pairs per epoch: {', '.join(each)}")
    return mixture


def several(config: DataConfig) -> bool:
    """Returns whether a direction has several training corpora."""
    return len(config.corpora()) > 1


def named(config: DataConfig, corpus: DataConfig) -> str:
    """Returns what distinguishes a corpus from the others of the run: " en-de news", " en-de", " news" or ""."""
    return f" {corpus.pair}" * bool(config.pairs) + f" {corpus.train_split}" * several(config)


def prepare_text(
    config: DataConfig,
    directory: Path,
    say: Callable[[str], None],
    keep: bool,
    trust: bool,
    check: Callable[[dict[str, str]], None] | None,
) -> Corpus:
    """Prepares the vocabulary and the texts of a language model. The arguments are those of `prepare`."""
    splits = ("train", "valid")
    if not trust:
        for split in splits:
            next(read_documents(config, split), None)
    tokenizer = vocabulary_of(config, directory / "vocabulary", say, keep)
    if check is not None:
        texts = {split: text_fingerprint(config, tokenizer, split) for split in splits}
        check(identity_of(tokenizer, {split: [rows_fingerprint(texts[split], config)] for split in splits}))
    if not trust and config.test_split:
        try:
            next(read_documents(config, "test"))
        except UserError as error:
            say(f"no test text, which --mode=evaluate needs: {error}")
    rows = []
    for split in splits:
        store = build_text(config, tokenizer, split, directory / "corpus", trust)
        say(store.describe(split))
        mark = rows_fingerprint(store.fingerprint, config)
        rows.append(TextRows(store, config.context, config.rows == "packed", mark))
    train, valid = rows
    store = train.store
    tokenizer = with_unused(tokenizer, [store.fingerprint], lambda: np.unique(store.tokens), directory / "vocabulary")
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

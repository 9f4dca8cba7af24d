"""Sources of parallel text: the built-in numerals corpus, text files, and TFDS data sets."""

import hashlib
import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from branchnorm_jax.data import documents, numerals, textfiles, tfds
from branchnorm_jax.data.formats import Pair
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig

_HELD_OUT_NUMERALS = 500


def read_pairs(config: DataConfig, split: str) -> Iterator[Pair]:
    """Streams the (source, target) sentence pairs of a split in a fixed order.

    Surrounding white space is stripped. Empty sentences are kept, so the position of a pair is its line number. Several
    training corpora follow one another, each once.

    Args:
      config: specifies the source and the languages.
      split: "train", "valid" or "test"; `config.<split>_split` is the name of the split in the source.

    Raises:
      UserError: during iteration, if the text is missing, unreadable, not UTF-8, not parallel or empty.
    """
    if split == "train" and len(corpora := config.corpora()) > 1:
        return itertools.chain.from_iterable(read_pairs(corpus, split) for corpus, _ in corpora)
    if config.source == "numerals":
        return numerals.pairs(split, config.source_lang, config.target_lang, _numerals_count(config, split))
    pairs = {"text": textfiles.pairs, "tfds": tfds.pairs}[config.source]
    return pairs(config, _split_name(config, split))


def corpus_key(config: DataConfig, split: str) -> dict[str, Any]:
    """Returns a cache key, of JSON values, that changes when the corpus changes.

    The text itself is not read. Text files are identified by resolved path, size and modification time; files at
    URLs by URL, size and version (generation or ETag); numerals by parameters, generator code and library versions;
    TFDS data sets by full name with version, folder and size.

    Raises:
      UserError: if the text is missing.
    """
    key: dict[str, Any] = {"source": config.source, "languages": [config.source_lang, config.target_lang]}
    if split == "train" and len(corpora := config.corpora()) > 1:
        return key | {"corpora": [corpus_key(corpus, split) for corpus, _ in corpora]}
    if config.source == "numerals":
        module = Path(numerals.__file__)
        code = module.read_bytes() + module.with_suffix(".toml").read_bytes()
        return key | {
            "split": split,
            "pairs": _numerals_count(config, split),
            "generator": hashlib.sha256(code).hexdigest(),
            "versions": [importlib.metadata.version(name) for name in ("num2words", "babel")],
        }
    if config.source == "documents":
        return key | documents.version(config, split)
    version = {"text": textfiles.version, "tfds": tfds.version}[config.source]
    return key | version(config, _split_name(config, split))


def check_texts(directions: Sequence[DataConfig], splits: Sequence[str], option: str) -> None:
    """Checks that there is text for several directions, of which the user may have meant only some.

    Args:
      directions: one config per direction.
      splits: those that are needed.
      option: the option that selects directions.

    Raises:
      UserError: if the text of one is missing; with `option`, if there are several directions.
    """
    for direction, split in itertools.product(directions, splits):
        try:
            corpus_key(direction, split)
        except UserError as error:
            if len(directions) == 1:
                raise
            raise UserError(
                f"{error}; {option} can select some of the {len(directions):,} directions, such as {option}="
                f"{directions[0].pair}"
            ) from error


def _split_name(config: DataConfig, split: str) -> str:
    return {"train": config.corpora()[0][0].train_split, "valid": config.valid_split, "test": config.test_split}[split]


def _numerals_count(config: DataConfig, split: str) -> int:
    return config.numerals_pairs if split == "train" else _HELD_OUT_NUMERALS

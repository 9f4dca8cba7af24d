"""Token stores: memory-mapped token ids of a split, built once and reused while nothing has changed."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.data.corpus import corpus_key, read_pairs
from branchnorm_jax.data.formats import Pair
from branchnorm_jax.data.meta import read_meta, token_dtype, write_meta
from branchnorm_jax.data.sampling import Sampler
from branchnorm_jax.data.tokenizer import NO_TAGS, Tags, Tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import UNK

_FORMAT = 1  # increase it when the meaning of the files or of the filters changes
_CHUNK_PAIRS = 8192
_SIDES = ("source", "target")
NOTED = 1e-3
"""If the fraction of unknown tokens is above this value, `describe_counts` reports it."""

_OUTCOMES = ("kept", "empty", "too_long", "bad_ratio")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """Memory-mapped token ids of sentence pairs, EOS included, in corpus order.

    Attributes:
      source_tokens: concatenated source sentences, uint16 or uint32.
      target_tokens: concatenated target sentences.
      source_offsets: sentence i is source_tokens[source_offsets[i]:source_offsets[i + 1]]; int64 [n + 1].
      target_offsets: offsets into the target sentences.
      fingerprint: SHA-256 of the text, the vocabulary and the filters; equal fingerprints mean equal sentences.
      counts: number of pairs `read`, which is the sum of `kept`, `empty`, `too_long` and `bad_ratio`.
      max_length: maximum length of a sentence in tokens, EOS included.
      max_ratio: maximum length ratio of a pair, EOS excluded; 0 for no limit.
      reused: whether the store was opened instead of built.
    """

    source_tokens: np.ndarray
    target_tokens: np.ndarray
    source_offsets: np.ndarray
    target_offsets: np.ndarray
    fingerprint: str
    counts: dict[str, int]
    max_length: int
    max_ratio: float
    reused: bool

    def __len__(self) -> int:
        return len(self.source_offsets) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Source and target length of each pair in tokens, EOS included: int32 [n, 2]."""
        return np.stack([np.diff(self.source_offsets), np.diff(self.target_offsets)], axis=1).astype(np.int32)

    def drawn(self, epoch: int) -> np.ndarray:
        """Returns the pairs of an epoch: each pair once."""
        return np.arange(len(self))

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        """Returns the concatenated tokens of the sentences `ids`, EOS included.

        Args:
          side: "source" or "target".
          ids: indices of sentences, int [n].

        Returns:
          int32 [sum of lengths].
        """
        tokens, offsets = {
            "source": (self.source_tokens, self.source_offsets),
            "target": (self.target_tokens, self.target_offsets),
        }[side]
        starts = offsets[ids]
        lengths = offsets[ids + 1] - starts
        # Per output token: the distance from its position in the output to its position in the store.
        shift = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return tokens[shift + np.arange(len(shift))].astype(np.int32)


def build_store(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: str,
    directory: Path,
    filter: bool,
    tags: Tags = NO_TAGS,
    sample: int | None = None,
    trust: bool = False,
) -> TokenStore:
    """Tokenises a split into `directory/split`, or opens the existing store.

    An existing store is reused if text, vocabulary and filters are the same. Pairs with an empty side (only EOS) or
    with more than `config.max_length` tokens on a side are left out. With `filter`, pairs with a length ratio above
    `config.max_ratio` are left out as well. `TokenStore.counts` reports all of them. The directory is created
    atomically, so an interrupted or a concurrent process cannot leave a partial store.

    Args:
      config: specifies the corpus and the filters.
      tokenizer: the vocabulary.
      split: "train", "valid" or "test".
      directory: parent of the store's directory.
      filter: whether to apply the ratio filter, as in training.
      tags: language tags prepended to every sentence; they count towards its length.
      sample: index of a sampled tokenisation, see `sampling.py`; None for the best one.
      trust: whether to reuse an existing store without looking at the text.

    Raises:
      UserError: if the text cannot be read (see `read_pairs`), or no pair is left.
      StorageError: if the files cannot be written.
    """
    if trust and (store := open_store(directory / split, None)):
        return store
    key = _key(config, tokenizer, split, filter, tags, sample)
    store = open_store(directory / split, key)
    if store is not None:
        return store
    filters = key["filters"]
    with atomic_directory(directory / split) as temporary:
        counts, corpus_digest = _write(config, tokenizer, split, temporary, filters, tags, sample)
        if not counts["kept"]:
            option = {"too_long": "raise data.max_length", "bad_ratio": "raise data.max_ratio"}
            worst = max(_OUTCOMES[1:], key=counts.__getitem__)
            what = _described(split, counts, **filters)
            raise UserError(f"no pair is left after filtering: {what}; {option.get(worst, 'correct the text files')}")
        meta = {
            "key": key,
            "fingerprint": _fingerprint(key, corpus_digest),
            "counts": counts,
            "dtypes": {side: _dtype(tokenizer, side).name for side in _SIDES},
        }
        meta = write_meta(temporary, meta)
        # Open the store before it is moved: the maps stay valid even if another process replaces the directory.
        return _opened(temporary, meta, reused=False)


def fingerprint_of(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: str,
    directory: Path,
    filter: bool,
    tags: Tags = NO_TAGS,
    sample: int | None = None,
    digest: Callable[[DataConfig, str], str] | None = None,
) -> str:
    """Returns the fingerprint of the store that `build_store` would return, without tokenising.

    Reads the text only if it may have changed. `digest` computes its digest, by default `text_digest`.

    Raises:
      UserError: if the text cannot be read.
    """
    key = _key(config, tokenizer, split, filter, tags, sample)
    if store := open_store(directory / split, key):
        return store.fingerprint
    return _fingerprint(key, (digest or text_digest)(config, split))


def text_digest(config: DataConfig, split: str) -> str:
    """Returns a digest of all pairs of a split."""
    digest, pairs = hashlib.sha256(), read_pairs(config, split)
    while chunk := list(itertools.islice(pairs, _CHUNK_PAIRS)):
        _digest(digest, chunk)
    return digest.hexdigest()


def _key(
    config: DataConfig, tokenizer: Tokenizer, split: str, filter: bool, tags: Tags, sample: int | None
) -> dict[str, Any]:
    """Returns what a store is made of, as JSON values."""
    filters = {"max_length": config.max_length, "max_ratio": config.max_ratio if filter else 0.0}
    key: dict[str, Any] = {"corpus": corpus_key(config, split), "tokenizer": tokenizer.sha256, "filters": filters}
    # Without tags the key has no entry for them, so stores built before tags were introduced stay valid.
    key |= {"tags": [list(side) for side in tags]} if tags != NO_TAGS else {}
    key |= {} if sample is None else {"sample": [sample, config.subword_alpha]}
    return key | {"format": _FORMAT}


def _fingerprint(key: Mapping[str, Any], digest: str) -> str:
    """Returns the hash that identifies the sentences of a store, from its key and the digest of its text."""
    identity = [key["format"], digest, key["tokenizer"], key["filters"], *key.get("tags", ()), *key.get("sample", ())]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def open_store(path: Path, key: dict[str, Any] | None) -> TokenStore | None:
    """Opens the store at `path`, or returns None.

    The result is None if the store is incomplete or its key differs. If `key` is None, the store may have any key.
    """
    meta = read_meta(path, key)
    return None if meta is None else _opened(path, meta, reused=True)


def describe_counts(split: str, store: TokenStore) -> str:
    """Returns a line that says how many pairs were read, kept and left out, and why."""
    line = _described(split, store.counts, store.max_length, store.max_ratio)
    if store.reused:
        return f"{line}; tokens reused"
    for side, tokens in zip(_SIDES, (store.source_tokens, store.target_tokens), strict=True):
        unknown = np.count_nonzero(tokens == UNK) / len(tokens)
        line += f"; {unknown:.1%} of the {side}'s tokens are unknown to the vocabulary" if unknown > NOTED else ""
    return line


def _described(split: str, counts: dict[str, int], max_length: int, max_ratio: float) -> str:
    ratio = f", {counts['bad_ratio']:,} with a length ratio above {max_ratio:g}" if max_ratio else ""
    return (
        f"{split}: {counts['read']:,} pairs read, {counts['kept']:,} kept, {counts['too_long']:,} longer than "
        f"{max_length} tokens, {counts['empty']:,} with an empty side{ratio}"
    )


def _dtype(tokenizer: Tokenizer, side: str) -> np.dtype[Any]:
    return token_dtype(tokenizer.source_size if side == "source" else tokenizer.target_size)


def _opened(path: Path, meta: dict[str, Any], reused: bool) -> TokenStore:
    maps = {}
    for side in _SIDES:
        maps[f"{side}_tokens"] = np.memmap(path / f"{side}.tokens.bin", meta["dtypes"][side], mode="r")
        maps[f"{side}_offsets"] = np.memmap(path / f"{side}.offsets.bin", np.int64, mode="r")
    return TokenStore(
        **maps,
        fingerprint=meta["fingerprint"],
        counts=meta["counts"],
        max_length=meta["key"]["filters"]["max_length"],
        max_ratio=meta["key"]["filters"]["max_ratio"],
        reused=reused,
    )


def _write(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: str,
    path: Path,
    filters: dict[str, Any],
    tags: Tags,
    sample: int | None,
) -> tuple[dict[str, int], str]:
    """Streams the corpus into the four files at `path`.

    Returns the counts and a digest of all pairs read.
    """
    outcomes = np.zeros(len(_OUTCOMES), np.int64)
    digest = hashlib.sha256()
    ends = np.zeros(2, np.int64)
    encoders = [
        lambda lines, first: tokenizer.encode_source(lines),
        lambda lines, first: tokenizer.encode_target(lines),
    ]
    if sample is not None:
        encoders = [
            Sampler(each, config.subword_alpha, (sample, side)).encode for side, each in enumerate(tokenizer.spm)
        ]
    pairs = read_pairs(config, split)
    with contextlib.ExitStack() as stack:
        tokens, offsets = (
            [stack.enter_context(open(path / f"{side}.{kind}.bin", "wb")) for side in _SIDES]
            for kind in ("tokens", "offsets")
        )
        for file in offsets:
            file.write(np.int64(0).tobytes())
        while chunk := list(itertools.islice(pairs, _CHUNK_PAIRS)):
            _digest(digest, chunk)
            encoded = [
                [[*tags[side], *ids] for ids in encode([pair[side] for pair in chunk], int(outcomes.sum()))]
                for side, encode in enumerate(encoders)
            ]
            lengths = np.array([[len(ids) for ids in sentences] for sentences in encoded], np.int64)
            outcome = _outcome(lengths, [len(side) for side in tags], **filters)
            outcomes += np.bincount(outcome, minlength=len(_OUTCOMES))
            for side, sentences in enumerate(encoded):
                kept = itertools.compress(sentences, outcome == 0)
                flat = np.fromiter(itertools.chain.from_iterable(kept), _dtype(tokenizer, _SIDES[side]))
                tokens[side].write(flat.tobytes())
                offsets[side].write((ends[side] + np.cumsum(lengths[side, outcome == 0])).tobytes())
                ends[side] += len(flat)
    counts = {"read": int(outcomes.sum())} | dict(zip(_OUTCOMES, outcomes.tolist(), strict=True))
    return counts, digest.hexdigest()


def _outcome(lengths: np.ndarray, tags: Sequence[int], max_length: int, max_ratio: float) -> np.ndarray:
    """Returns the index into `_OUTCOMES` of each pair: the first reason that applies.

    Args:
      lengths: source and target lengths in tokens, EOS and tags included, int [2, pairs].
      tags: number of tags on each side.
      max_length: maximum length.
      max_ratio: maximum length ratio; 0 for no limit.
    """
    words = lengths - 1 - np.array(tags)[:, None]
    ratio = words.max(axis=0) / np.maximum(words.min(axis=0), 1)
    reasons = [(words == 0).any(axis=0), (lengths > max_length).any(axis=0), (max_ratio > 0) & (ratio > max_ratio)]
    return np.select(reasons, [1, 2, 3], default=0)


def _digest(digest: "hashlib._Hash", pairs: list[Pair]) -> None:
    """Adds pairs and their lengths to the digest.

    The lengths make the encoding unambiguous.
    """
    for pair in pairs:
        source, target = (sentence.encode() for sentence in pair)
        digest.update(struct.pack("<2Q", len(source), len(target)) + source + target)

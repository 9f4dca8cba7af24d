"""The token store: a split of the corpus as memory-mapped token ids, made once and reused while nothing changed."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.data.corpus import Pair, corpus_key, read_pairs
from branchnorm_jax.data.sampling import Sampler
from branchnorm_jax.data.tokenizer import NO_TAGS, Tags, Tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import UNK, DataConfig
from branchnorm_jax.workdir import atomic_directory

_FORMAT = 1  # raise it when the files or the filters change their meaning
_CHUNK_PAIRS = 8192
_SIDES = ("source", "target")
NOTED = 1e-3
"""Share of unknown tokens from which on it is told."""

_OUTCOMES = ("kept", "empty", "too_long", "bad_ratio")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenStore:
    """Sentence pairs as token ids, EOS included, in the order of the corpus. Nothing is read before it is used.

    Attributes:
      source_tokens: all source sentences end to end, uint16 or uint32.
      target_tokens: the same for the target.
      source_offsets: sentence i is source_tokens[source_offsets[i]:source_offsets[i + 1]]; int64 [n + 1].
      target_offsets: the same for the target.
      fingerprint: SHA-256 of the text, the vocabulary and the filters: equal means the same sentences.
      counts: pairs `read` = `kept` + `empty` + `too_long` + `bad_ratio`.
      max_length: most tokens of a kept sentence, EOS included.
      max_ratio: largest length ratio of a kept pair, EOS not counted; 0: any.
      reused: whether the files were there already.
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
        """Tokens of source and target, EOS included, int32 [n, 2]."""
        return np.stack([np.diff(self.source_offsets), np.diff(self.target_offsets)], axis=1).astype(np.int32)

    def drawn(self, epoch: int) -> np.ndarray:
        """The sentences of an epoch: each once."""
        return np.arange(len(self))

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        """The tokens of these sentences end to end, EOS included.

        Args:
          side: "source" or "target".
          ids: which sentences, int [n].

        Returns:
          int32 [sum of their lengths].
        """
        tokens, offsets = {
            "source": (self.source_tokens, self.source_offsets),
            "target": (self.target_tokens, self.target_offsets),
        }[side]
        starts = offsets[ids]
        lengths = offsets[ids + 1] - starts
        # Of sentence i, whose tokens follow those before it: where they are in the store.
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
) -> TokenStore:
    """Tokenises a split into `directory/split`, or opens what is there if neither text, vocabulary nor filters changed.

    Pairs with an empty side (no token but EOS) or with more than `config.max_length` tokens on a side are left out,
    with `filter` also those whose length ratio is above `config.max_ratio`; all are counted. The directory appears
    complete or not at all, so a killed or a second process does no harm.

    Args:
      config: names the corpus and the filters.
      tokenizer: the vocabulary.
      split: "train", "valid" or "test".
      directory: parent of the split's directory.
      filter: whether the ratio filter applies: on for training.
      tags: what comes before every sentence; counts in its length.
      sample: number of a tokenisation that is drawn, see `sampling.py`; None: the best one.

    Raises:
      UserError: if the text cannot be read (see `read_pairs`), or no pair is left.
      StorageError: if the files cannot be written.
    """
    filters: dict[str, Any] = {"max_length": config.max_length, "max_ratio": config.max_ratio if filter else 0.0}
    key: dict[str, Any] = {"corpus": corpus_key(config, split), "tokenizer": tokenizer.sha256, "filters": filters}
    # Where there are none, the key is that of the stores of runs that knew no tags.
    key |= {"tags": [list(side) for side in tags]} if tags != NO_TAGS else {}
    key |= {} if sample is None else {"sample": [sample, config.subword_alpha]}
    key["format"] = _FORMAT
    store = open_store(directory / split, key)
    if store is not None:
        return store
    with atomic_directory(directory / split) as temporary:
        counts, corpus_digest = _write(config, tokenizer, split, temporary, filters, tags, sample)
        if not counts["kept"]:
            option = {"too_long": "raise data.max_length", "bad_ratio": "raise data.max_ratio"}
            worst = max(_OUTCOMES[1:], key=counts.__getitem__)
            what = _described(split, counts, **filters)
            raise UserError(f"no pair is left to use: {what}; {option.get(worst, 'mend the text files')}")
        identity = [_FORMAT, corpus_digest, tokenizer.sha256, filters, *key.get("tags", ()), *key.get("sample", ())]
        meta = {
            "key": key,
            "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
            "counts": counts,
            "dtypes": {side: np.dtype(_dtype(tokenizer, side)).name for side in _SIDES},
            "bytes": {path.name: path.stat().st_size for path in sorted(temporary.iterdir())},
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        # Opened before it is moved: maps follow their files, whatever another process then does to the directory.
        return _opened(temporary, meta, reused=False)


def open_store(path: Path, key: dict[str, Any]) -> TokenStore | None:
    """The store at `path` if it is complete and was made with this key, else None."""
    try:
        meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if meta["key"] != key or any((path / name).stat().st_size != size for name, size in meta["bytes"].items()):
            return None
        return _opened(path, meta, reused=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, partial or not ours
        return None


def describe_counts(split: str, store: TokenStore) -> str:
    """One line: how many pairs were read, kept and left out, and why."""
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


def _dtype(tokenizer: Tokenizer, side: str) -> type[np.unsignedinteger[Any]]:
    size = tokenizer.source_size if side == "source" else tokenizer.target_size
    return np.uint16 if size <= 1 << 16 else np.uint32


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
    """Streams the corpus into the four files at `path`; returns the counts and the digest of all pairs read."""
    outcomes = np.zeros(len(_OUTCOMES), np.int64)
    digest = hashlib.sha256()
    ends = np.zeros(2, np.int64)
    encoders = [
        lambda lines, first: tokenizer.encode_source(lines),
        lambda lines, first: tokenizer.encode_target(lines),
    ]
    if sample is not None:
        processors = tokenizer.source_processor, tokenizer.target_processor
        encoders = [Sampler(each, config.subword_alpha, (sample, side)).encode for side, each in enumerate(processors)]
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
    """Index into `_OUTCOMES` of each pair; the first reason counts. `lengths` include EOS and tags, int [2, pairs]."""
    words = lengths - 1 - np.array(tags)[:, None]
    ratio = words.max(axis=0) / np.maximum(words.min(axis=0), 1)
    reasons = [(words == 0).any(axis=0), (lengths > max_length).any(axis=0), (max_ratio > 0) & (ratio > max_ratio)]
    return np.select(reasons, [1, 2, 3], default=0)


def _digest(digest: "hashlib._Hash", pairs: list[Pair]) -> None:
    """Adds pairs to the digest, each with its lengths, so that no two corpora look alike."""
    for pair in pairs:
        source, target = (sentence.encode() for sentence in pair)
        digest.update(struct.pack("<2Q", len(source), len(target)) + source + target)

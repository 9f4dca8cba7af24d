"""Texts of language models: memory-mapped tokens of a split, and the rows that batches consist of.

A text is a stream of documents, each preceded by EOS, with EOS at its end:

    EOS, document 0, EOS, document 1, EOS, ..., EOS

A model reads each token but the last, and predicts each token but the first. So it predicts every token of the text,
and the end of every document, exactly once.
"""

import dataclasses
import functools
import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.data.corpus import corpus_key
from branchnorm_jax.data.documents import Part, read_documents
from branchnorm_jax.data.meta import read_meta, token_dtype, write_meta
from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.errors import count
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import EOS, UNK

_FORMAT = 2  # increase it when the meaning of the files changes
_PARTS, _CHARACTERS = 1024, 1 << 22
"""Numbers of parts of documents and of their characters that are tokenised at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class TextStore:
    """Memory-mapped token ids of a text.

    Attributes:
      tokens: the stream, uint16 or uint32 [n].
      starts: positions of the EOS before each document, then of the last EOS, int64 [documents + 1].
      lines: position of the last token of each line, int64 [lines]; of EOS if the document ends there.
      line_bytes: length of each line in bytes of UTF-8, int64 [lines]; with its line feed, unless the line is a
        document.
      line_crc32: CRC-32 of each line in UTF-8, int64 [lines].
      fingerprint: SHA-256 of the text and of the vocabulary; equal fingerprints mean equal tokens.
      reused: whether the store was opened instead of built.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lines: np.ndarray
    line_bytes: np.ndarray
    line_crc32: np.ndarray
    fingerprint: str
    reused: bool

    @property
    def bytes(self) -> int:
        """Length of the text in bytes of UTF-8."""
        return int(self.line_bytes.sum())

    @property
    def unknown(self) -> int:
        """Number of tokens that are unknown to the vocabulary."""
        return int(np.count_nonzero(self.tokens == UNK))

    def describe(self, split: str) -> str:
        """Returns a line about the text."""
        unknown = self.unknown / len(self.tokens)
        documents, tokens = len(self.starts) - 1, len(self.tokens) - 1
        return (
            f"{split}: {count(documents, 'document')}, {self.bytes:,} bytes, {tokens:,} tokens to predict"
            + (f"; {unknown:.1%} of the tokens are unknown to the vocabulary" if unknown > 1e-3 else "")
            + ("; tokens reused" if self.reused else "")
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TextRows:
    """A text divided into rows or parts of rows; implements `batches.Sentences`.

    The source of a row is the token before each token of its target. In packed rows, several documents share a row, so
    each part begins with EOS instead.

    Attributes:
      store: the text.
      context: the longest row in tokens.
      packed: whether rows consist of whole documents, see `data.rows`.
      fingerprint: see `rows_fingerprint`.
    """

    store: TextStore
    context: int
    packed: bool
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self._parts[0])

    @functools.cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Position and size of each part: int64 [n], int64 [n]."""
        borders = self.store.starts if self.packed else self.store.starts[[0, -1]]
        counts = -(-np.diff(borders) // self.context)
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(borders[:-1], counts) + index * self.context
        return begins, np.minimum(self.context, np.repeat(borders[1:], counts) - begins)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Length of each part, for the source and for the target: int32 [n, 2]."""
        return np.repeat(self._parts[1][:, None], 2, axis=1).astype(np.int32)

    def drawn(self, epoch: int) -> np.ndarray:
        """Returns the parts of an epoch: each part once."""
        return np.arange(len(self))

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        """Returns the concatenated tokens of parts; the arguments are as in `store.TokenStore.gather`."""
        begins, sizes = (values[ids] for values in self._parts)
        ends = np.cumsum(sizes)
        places = np.repeat(begins - ends + sizes, sizes) + np.arange(ends[-1] if len(ends) else 0)
        tokens = self.store.tokens[places + (side == "target")].astype(np.int32)
        if side == "source" and self.packed:
            tokens[ends - sizes] = EOS
        return tokens


def build_text(config: DataConfig, tokenizer: Tokenizer, split: str, directory: Path, trust: bool = False) -> TextStore:
    """Tokenises a split into `directory/split`, or opens the existing store if text and vocabulary are the same.

    Args:
      config: specifies the text.
      tokenizer: the vocabulary.
      split: "train", "valid" or "test".
      directory: parent of the store's directory.
      trust: whether to reuse an existing store without looking at the text.

    Raises:
      UserError: if the text cannot be read (see `read_documents`).
      StorageError: if the files cannot be written.
    """
    path = directory / split
    if trust and (store := _open(path, None)):
        return store
    key = {"corpus": corpus_key(config, split), "tokenizer": tokenizer.sha256, "format": _FORMAT}
    if (store := _open(path, key)) is not None:
        return store
    dtype = token_dtype(tokenizer.target_size)
    digest = _Digest(tokenizer)
    with atomic_directory(path) as temporary:
        position = 0
        with open(temporary / "tokens.bin", "wb") as file, open(temporary / "lines.bin", "wb") as lines:
            file.write(np.array([EOS], dtype).tobytes())
            for text, ends, ids in _encoded(tokenizer, read_documents(config, split)):
                digest.add((text, ends))
                file.write(np.array([*ids, EOS] if ends else ids, dtype).tobytes())
                position += len(ids) + ends
                data = text.encode()
                lines.write(np.array([position, len(data), ends, zlib.crc32(data)], np.int64).tobytes())
        meta = write_meta(temporary, {"key": key, "fingerprint": digest.hexdigest(), "dtype": dtype.name})
        # Open the store before it is moved: the maps stay valid even if another process replaces the directory.
        return _opened(temporary, meta, reused=False)


class _Digest:
    """Digest of a text and its vocabulary, fed part by part."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A version of its own: resumed runs compare this digest with that of an earlier version of the files.
        self._sha256 = hashlib.sha256(f"1 {tokenizer.sha256}".encode())

    def add(self, part: Part) -> None:
        """Adds a part. The length makes the encoding unambiguous."""
        data = part[0].encode()
        self._sha256.update(struct.pack("<Q?", len(data), part[1]) + data)

    def hexdigest(self) -> str:
        """Returns the digest of all parts so far."""
        return self._sha256.hexdigest()


def text_fingerprint(config: DataConfig, tokenizer: Tokenizer, split: str) -> str:
    """Returns the fingerprint that `build_text` gives a split, from a pass over the text."""
    digest = _Digest(tokenizer)
    for part in read_documents(config, split):
        digest.add(part)
    return digest.hexdigest()


def rows_fingerprint(text: str, config: DataConfig) -> str:
    """Returns the fingerprint of `TextRows`, given that of their text. Equal fingerprints mean equal rows."""
    return hashlib.sha256(f"{text} {config.context} {config.rows}".encode()).hexdigest()


def _encoded(tokenizer: Tokenizer, parts: Iterable[Part]) -> Iterator[tuple[str, bool, list[int]]]:
    """Yields the parts with their token ids."""
    for chunk in _chunks(parts):
        encoded = tokenizer.encode_target([text for text, _ in chunk])
        yield from ((text, ends, ids[:-1]) for (text, ends), ids in zip(chunk, encoded, strict=True))  # without EOS


def _chunks(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yields the parts in lists of at most `_PARTS` parts, each closed as soon as it has `_CHARACTERS` characters."""
    chunk, size = list[Part](), 0
    for part in parts:
        chunk.append(part)
        size += len(part[0])
        if len(chunk) == _PARTS or size >= _CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _open(path: Path, key: dict[str, Any] | None) -> TextStore | None:
    """Opens the store at `path`, or returns None; see `read_meta`."""
    meta = read_meta(path, key)
    return _opened(path, meta, reused=True) if meta and meta["key"].get("format") == _FORMAT else None


def _opened(path: Path, meta: dict[str, Any], reused: bool) -> TextStore:
    lines, line_bytes, ends, line_crc32 = np.fromfile(path / "lines.bin", np.int64).reshape(-1, 4).T
    tokens = np.memmap(path / "tokens.bin", meta["dtype"], mode="r")
    starts = np.concatenate([[0], lines[ends == 1]])
    return TextStore(tokens, starts, lines, line_bytes, line_crc32, meta["fingerprint"], reused)

"""A model of another toolkit, in the terms of this project, and how its files are read."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from branchnorm_jax.data.tokenizer import TAG
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import UNK

T = TypeVar("T")


class Side(NamedTuple):
    """The vocabulary of one side."""

    model: bytes
    """Serialised SentencePiece model or `bpe.MosesBPE`, with our ids."""
    pieces: list[str]
    ids: list[int]
    """Our id -> id in the other toolkit; -1 for pieces that it does not have."""

    @property
    def rows(self) -> np.ndarray:
        """The rows of the other toolkit's table in our order. Pieces that it does not have get the row of UNK."""
        ids = np.array(self.ids)
        return np.where(ids < 0, ids[UNK], ids)

    @property
    def absent(self) -> list[int]:
        """Our ids of the pieces that the other toolkit does not have."""
        return [index for index, theirs in enumerate(self.ids) if theirs < 0]

    def ours(self, theirs: Sequence[int]) -> list[int]:
        """Returns our ids of pieces with some ids in the other toolkit."""
        return np.flatnonzero(np.isin(self.ids, list(theirs))).tolist()


class Imported(NamedTuple):
    """A model of another toolkit."""

    model: ModelConfig
    decode: DecodeConfig
    params: dict[str, Any]
    source: Side
    target: Side
    """The same ids as `source` if the sides share their vocabulary."""
    unused: list[int]
    """Our ids of target pieces with probability 0."""
    source_lang: str = ""
    """Empty if it is not known."""
    target_lang: str = ""
    """Empty if it is not known, or if the model has language tags."""
    tagged: str = "source"
    """`data.tags`; if it is "each", every language is a source and a target."""
    pairs: str = ""
    """`data.pairs`; empty if it is not known."""

    @property
    def tags(self) -> list[str]:
        """Languages that have a tag."""
        return [match[1] for match in map(TAG.fullmatch, self.source.pieces) if match]

    @property
    def shared(self) -> bool:
        """Whether both sides have the same pieces with the same ids."""
        return (self.source.pieces, self.source.ids) == (self.target.pieces, self.target.ids)


class Values:
    """Options in a file, with checks of their types. Every fault is one line with the path of the file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self.values = path, values

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Returns an option as `kind`, which is bool, str, int, float, list or dict.

        Raises:
          UserError: if it is missing without a default, or has another type.
        """
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise UserError(f"{self.path}: {name} is missing")
            return default
        if kind is float and isinstance(value, int):
            with contextlib.suppress(OverflowError):
                value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{self.path}: {name}={value!r} must be of the type {kind.__name__}")
        return value

    def check_fixed(self, fixed: Mapping[str, bool]) -> None:
        """Raises `UserError` if an option that may be missing has another value than the only one that is supported."""
        for name, expected in fixed.items():
            if self.get(name, bool, expected) != expected:
                raise UserError(f"{self.path}: {name}={not expected} is not supported, only {expected}")

    def same(self, *names: str) -> int:
        """Returns the positive whole number that all these options have. Raises `UserError` if they differ."""
        values = {self.get(name, int) for name in names}
        if len(values) > 1 or min(values) < 1:
            raise UserError(
                f"{self.path}: {' and '.join(names)} must be the same positive number, not {sorted(values)}"
            )
        return values.pop()


def beam_search(generation: Values, config: Values) -> dict[str, Any]:
    """Returns the options of beam search in generation_config.json, or in config.json, where old models have them."""

    def get(name: str, default: T) -> T:
        return (generation if name in generation else config).get(name, type(default), default)

    return {
        "beam_size": get("num_beams", 1),
        "length_penalty": get("length_penalty", 1.0),
        "no_repeat_ngram": get("no_repeat_ngram_size", 0),
        "min_length": max(1, get("min_new_tokens", 1)),
    }


def read_values(path: Path, required: bool = True) -> Values:
    """Reads a JSON file with options; without `required`, a missing file has none. Raises `UserError` otherwise."""
    return Values(path, read_json(path) if required or path.exists() else {})


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises `UserError` if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read ({reason})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected names with values, not a {type(content).__name__}")
    return content


def checked_ids(path: Path, ids: Mapping[str, Any]) -> dict[str, int]:
    """Returns piece -> id. Raises `UserError` unless the ids are different whole numbers from 0."""
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in ids.values()):
        raise UserError(f"{path}: an id is not a whole number from 0")
    if len(set(ids.values())) < len(ids):
        raise UserError(f"{path}: two pieces have the same id")
    return dict(ids)

"""A model of another toolkit, in the terms of this project."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DecodeConfig, ModelConfig
from branchnorm_jax.tokens import UNK


class Side(NamedTuple):
    """The vocabulary of one side."""

    spm: bytes
    """Serialised SentencePiece model with our ids."""
    pieces: list[str]
    ids: list[int]
    """Our id -> id in the other toolkit; -1 for pieces that it does not have."""

    @property
    def rows(self) -> np.ndarray:
        """The rows of the other toolkit's table in our order. Pieces that it does not have get the row of UNK."""
        ids = np.array(self.ids)
        return np.where(ids < 0, ids[UNK], ids)

    @property
    def unused(self) -> list[int]:
        """Our ids of the pieces that the other toolkit does not have."""
        return [index for index, theirs in enumerate(self.ids) if theirs < 0]


class Imported(NamedTuple):
    """A model of another toolkit."""

    model: ModelConfig
    decode: DecodeConfig
    source_lang: str
    """Empty if it is not known."""
    target_langs: tuple[str, ...]
    """More than one if the model has language tags; empty if it is not known."""
    params: dict[str, Any]
    source: Side
    target: Side
    """The same ids as `source` if the sides share their vocabulary."""


def read_json(path: Path, default: Any = None) -> Any:
    """Reads a JSON file. Raises `UserError` if it is damaged, or if it is missing and there is no default."""
    if default is not None and not path.exists():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{path}: cannot be read ({reason})") from error

"""meta.json of a token store: its key, its fingerprint, and the sizes of its files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def token_dtype(size: int) -> np.dtype[Any]:
    """Returns the type of the ids of a vocabulary."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


def write_meta(path: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Writes meta.json into the folder of a store whose other files are complete; returns it with their sizes."""
    complete = {**meta, "bytes": {file.name: file.stat().st_size for file in sorted(path.iterdir())}}
    (path / "meta.json").write_text(json.dumps(complete, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return complete


def read_meta(path: Path, key: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Reads meta.json; returns None if the store is incomplete or its key differs. None as key fits any store."""
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        other = key is not None and meta["key"] != key
        if other or any((path / name).stat().st_size != size for name, size in meta["bytes"].items()):
            return None
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, incomplete or not a token store
        return None

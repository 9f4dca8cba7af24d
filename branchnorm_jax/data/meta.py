"""meta.json of a token store: its key, its fingerprint, and the sizes and checksums of its files."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from branchnorm_jax.files import json_checksum, write_atomically

_BLOCK = 1 << 24


def token_dtype(size: int) -> np.dtype[Any]:
    """Returns the type of the ids of a vocabulary."""
    return np.dtype(np.uint16 if size <= 1 << 16 else np.uint32)


def write_meta(path: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Writes meta.json into the folder of a store whose other files are complete; returns its content."""
    files = sorted(path.iterdir())
    complete = {
        **meta,
        "bytes": {file.name: file.stat().st_size for file in files},
        "crc32": {file.name: _checksum(file) for file in files},
    }
    complete["meta_crc32"] = _own_checksum(complete)
    write_atomically(path / "meta.json", json.dumps(complete, indent=2, ensure_ascii=False) + "\n")
    return complete


def read_meta(path: Path, key: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Reads meta.json; returns None if the store is incomplete or damaged, or its key differs.

    None as key fits any store. Stores of earlier versions have no checksums.
    """
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        other = key is not None and meta["key"] != key
        if other or any((path / name).stat().st_size != size for name, size in meta["bytes"].items()):
            return None
        if meta.keys() & {"crc32", "meta_crc32"} and meta["meta_crc32"] != _own_checksum(meta):
            return None
        if any(_checksum(path / name) != value for name, value in meta.get("crc32", {}).items()):
            return None
        return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, incomplete or not a token store
        return None


def _own_checksum(meta: Mapping[str, Any]) -> int:
    """Returns the checksum of the content of meta.json."""
    content = {name: value for name, value in meta.items() if name != "meta_crc32"}
    return json_checksum(content)


def _checksum(file: Path) -> int:
    """Returns the checksum of a file, which takes about a second per GB."""
    found = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found

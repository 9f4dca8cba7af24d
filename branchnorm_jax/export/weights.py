"""The file model.safetensors of Hugging Face."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file


def save(arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Writes named arrays to model.safetensors, with the permissions of any new file.

    The library gives the file to its owner alone, so a shared export could not be read by others.

    Raises:
      OSError: if it cannot be written; the library has an exception of its own for that.
    """
    path = folder / "model.safetensors"
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    path.chmod(mode)

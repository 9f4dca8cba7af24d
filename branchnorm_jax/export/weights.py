"""The file model.safetensors of Hugging Face."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def save(arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Writes named arrays to model.safetensors, with the permissions of any new file.

    The library gives the file to its owner alone, so a shared export could not be read by others.
    """
    path = folder / "model.safetensors"
    path.touch()
    mode = path.stat().st_mode
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    path.chmod(mode)

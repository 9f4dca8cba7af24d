"""Weights of other toolkits as NumPy arrays, from safetensors or PyTorch files. No code of a file is run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from branchnorm_jax.errors import UserError
from branchnorm_jax.importing.imported import read_values

SAFE, TORCH = "model.safetensors", "pytorch_model.bin"


class Tensors:
    """The weights of a model by name. Each one is taken once; what is left over in the end was not understood."""

    def __init__(self, folder: Path, weights: Mapping[str, np.ndarray]) -> None:
        self._folder, self._left = folder, dict(weights)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> np.ndarray:
        """Returns a weight in float32. Raises `UserError` if it is missing or has another shape."""
        if name not in self._left:
            raise UserError(f"{self._folder}: the weights contain no {name!r}")
        try:
            array = np.asarray(self._left.pop(name), np.float32)
        except ValueError as error:
            raise UserError(f"{self._folder}: {name!r} does not consist of numbers") from error
        if array.shape != shape:
            raise UserError(f"{self._folder}: {name!r} has shape {list(array.shape)} instead of {list(shape)}")
        if not np.isfinite(array).all():
            raise UserError(f"{self._folder}: {name!r} has values that are not finite")
        return array

    def drop(self, *names: str) -> None:
        """Ignores weights that may be there but say nothing new."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Raises `UserError` if weights are left over."""
        if self._left:
            names = ", ".join(sorted(self._left)[:3])
            raise UserError(
                f"{self._folder}: {len(self._left)} weights that this import does not know, such as {names}"
            )


def read(folder: Path) -> Tensors:
    """Reads the weights of a Hugging Face folder, in one file or several.

    Raises:
      UserError: if there are none, if a file is damaged, or if it is a pickle that contains code.
    """
    for name, load in ((SAFE, _safetensors), (TORCH, _torch)):
        index = folder / f"{name}.index.json"
        listed = read_values(index).get("weight_map", dict).values() if index.exists() else [name]
        files = sorted(set(map(str, listed)))
        if index.exists() or (folder / name).exists():
            if outside := [file for file in files if Path(file).name != file]:
                raise UserError(f"{index}: {outside[0]!r} is not the name of a file in this folder")
            return Tensors(folder, {key: array for file in files for key, array in load(folder / file)})
    raise UserError(f"{folder}: no weights; expected {SAFE} or {TORCH}")


def _safetensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 # not a dictionary
    except (OSError, SafetensorError, AttributeError) as error:  # AttributeError: a type that NumPy does not have.
        raise UserError(f"{path}: cannot be read ({_pointer(path) or _first_line(error)})") from error


def load_torch(path: Path, types: Sequence[Any] = ()) -> Any:
    """Reads a file of PyTorch without running code of it. `types`: what it may contain beside weights.

    Raises:
      UserError: if PyTorch is not installed, or if the file is damaged or contains something else.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError(f"import: {error}; run `pip install torch`, or convert {path.name} to {SAFE}") from error
    try:
        with torch.serialization.safe_globals(list(types)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch reports damaged files and forbidden pickles by errors of many types, some of several lines.
        reason = _pointer(path) or type(error).__name__
        raise UserError(
            f"{path}: cannot be read as plain weights, because it is damaged or contains code ({reason})"
        ) from error


def arrays(path: Path, weights: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights of a file of PyTorch by name. Raises `UserError` if it contains something else."""
    try:
        yield from ((name, tensor.detach().float().numpy()) for name, tensor in weights.items())
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path}: does not contain weights by name") from error


def _torch(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    return arrays(path, load_torch(path))


def _pointer(path: Path) -> str:
    """Returns what to do if a file is only a pointer of Git LFS; "" if it is not."""
    try:
        with path.open("rb") as file:
            pointer = file.read(24) == b"version https://git-lfs."
    except OSError:
        return ""
    return "it is a pointer of Git LFS: run `git lfs pull` in the folder" if pointer else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]

"""CIFAR-10 (Krizhevsky, 2009) as arrays: reading, batches, augmentation."""

import hashlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.errors import UserError, needs_extra

CLASSES, SIDE, CHANNELS = 10, 32, 3
PADDING = 4
"""Pixels that `augment` adds on each side before it crops, as He et al. (2016) do."""


class Split(NamedTuple):
    """Images [N, 32, 32, 3] float32, and their classes [N] int32."""

    images: np.ndarray
    labels: np.ndarray


class Images(NamedTuple):
    """The two splits. The channels of the training images have mean 0 and variance 1; test images are scaled alike."""

    train: Split
    test: Split


def load(source: str) -> Images:
    """Reads the data set.

    Args:
      source: an npz file with x_train, y_train, x_test, y_test (images [N, 32, 32, 3] uint8, classes 0 to 9), or "tfds"
        for the whole data set, which TensorFlow Datasets downloads.

    Raises:
      UserError: if there is no such file, or if it has other arrays.
      MissingExtraError: if TensorFlow Datasets is not installed.
    """
    splits = {name: _tfds(name) if source == "tfds" else _npz(Path(source), name) for name in ("train", "test")}
    mean, deviation = (
        getattr(splits["train"][0], name)((0, 1, 2), dtype=np.float64).astype(np.float32) for name in ("mean", "std")
    )
    return Images(
        *(Split((images - mean) / deviation, labels.astype(np.int32).ravel()) for images, labels in splits.values())
    )


def digest(images: Images) -> str:
    """Returns a name that tells these images and labels from others: the beginning of their SHA-256."""
    found = hashlib.sha256()
    for split in images:
        for array in split:
            found.update(array.tobytes())
    return found.hexdigest()[:12]


def _npz(path: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path) as arrays:
            images, labels = arrays[f"x_{split}"], arrays[f"y_{split}"]
    except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"--data={path}: {error}; give an npz file with x_train, y_train, x_test, y_test") from error
    if images.shape[1:] != (SIDE, SIDE, CHANNELS) or images.dtype != np.uint8 or labels.size != len(images):
        raise UserError(
            f"--data={path}: x_{split} is {images.dtype} {images.shape} and y_{split} {labels.shape}; "
            f"uint8 (N, {SIDE}, {SIDE}, {CHANNELS}) and (N,) are needed"
        )
    if not labels.size:
        raise UserError(f"--data={path}: y_{split} is empty")
    if labels.min() < 0 or labels.max() >= CLASSES:
        raise UserError(f"--data={path}: y_{split} has classes outside 0 to {CLASSES - 1}")
    return images, labels


def _tfds(split: str) -> tuple[np.ndarray, np.ndarray]:
    with needs_extra("tfds", "--data=tfds"):
        import tensorflow_datasets as tfds

    # Array records can be read without TensorFlow.
    examples: Any = tfds.data_source("cifar10", split=split, builder_kwargs={"file_format": "array_record"})
    read = [(example["image"], example["label"]) for example in examples]
    return np.stack([image for image, _ in read]), np.array([label for _, label in read])


def batches(split: Split, size: int, rng: np.random.Generator) -> Iterator[Split]:
    """Yields one epoch of shuffled batches of equal size; up to size - 1 images are left out."""
    order = rng.permutation(len(split.labels))
    for start in range(0, len(order) - size + 1, size):
        chosen = order[start : start + size]
        yield Split(split.images[chosen], split.labels[chosen])


def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Flips each image [N, 32, 32, 3] with probability 1/2, pads it with zeros and crops it at a random place."""
    padded = np.pad(images, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:3], (1, 2))  # [N, 9, 9, 3, 32, 32]
    rows, columns = rng.integers(2 * PADDING + 1, size=(2, len(images)))
    cropped = windows[np.arange(len(images)), rows, columns].transpose(0, 2, 3, 1)
    flipped = rng.random(len(images)) < 0.5
    return np.where(flipped[:, None, None, None], cropped[:, :, ::-1], cropped)

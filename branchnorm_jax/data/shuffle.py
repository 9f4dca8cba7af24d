"""Reproducible shuffling, by a hash that does not depend on the version of any library."""

import numpy as np


def hashed(numbers: np.ndarray, *seeds: int) -> np.ndarray:
    """Returns uint64 hashes (splitmix64) of integers.

    They depend only on the integers and the seeds.
    """

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        keys = numbers.astype(np.uint64)
        for seed in seeds:
            keys = mix(keys * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed) + np.uint64(1))
    return keys


def shuffled(ids: np.ndarray, *seeds: int) -> np.ndarray:
    """Returns `ids` shuffled, by sorting them by their hashes."""
    return ids[np.argsort(hashed(ids, *seeds), kind="stable")]

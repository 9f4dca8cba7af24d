"""An order that is the same everywhere."""

import numpy as np


def shuffled(ids: np.ndarray, *seeds: int) -> np.ndarray:
    """`ids` in an order that depends on the ids and the seeds alone, not on the version of any library (splitmix64)."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        keys = ids.astype(np.uint64)
        for seed in seeds:
            keys = mix(keys * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed) + np.uint64(1))
    return ids[np.argsort(keys, kind="stable")]

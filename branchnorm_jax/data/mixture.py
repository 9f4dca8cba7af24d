"""Several corpora as one: whose sentences an epoch draws how often."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from branchnorm_jax.data.shuffle import shuffled
from branchnorm_jax.data.store import TokenStore


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The sentence pairs of several stores, numbered one store after the other.

    A pair of store i is drawn with a probability in proportion to n_i^(1/T - 1), n_i the size of its store and T the
    temperature, so that store i makes up n_i^(1/T) / sum_j n_j^(1/T) of an epoch (Aharoni et al., "Massively
    Multilingual Neural Machine Translation in the Wild"). An epoch is as long as it takes to see the largest store
    once: with T = 1 every pair once; with a larger T pairs of smaller stores come again, those of the same lengths all
    as often, but for a rest that goes round from epoch to epoch.

    Attributes:
      stores: the corpora.
      temperature: T, at least 1.
    """

    stores: Sequence[TokenStore]
    temperature: float = 1.0

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Number of the first pair of each store, and the number of all: int64 [stores + 1]."""
        return np.cumsum([0, *map(len, self.stores)])

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of source and target, EOS included, int32 [n, 2]."""
        return np.concatenate([store.lengths for store in self.stores])

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        """int32 [sum of lengths]: the tokens of these sentences, end to end, as `TokenStore.gather`."""
        store_of = np.searchsorted(self.starts, ids, side="right") - 1
        store_of_token = np.repeat(store_of, self.lengths[ids, ("source", "target").index(side)])
        tokens = np.empty(len(store_of_token), np.int32)
        for index in np.unique(store_of):
            tokens[store_of_token == index] = self.stores[index].gather(
                side, ids[store_of == index] - self.starts[index]
            )
        return tokens

    @functools.cached_property
    def draws(self) -> list[int]:
        """Pairs that an epoch draws from each store."""
        sizes = np.diff(self.starts)
        return np.rint(sizes * (sizes.max() / sizes) ** (1 - 1 / self.temperature)).astype(int).tolist()

    def drawn(self, epoch: int) -> np.ndarray:
        """The pairs that an epoch draws, int64 [draws]; the i-th is as long in every epoch."""
        if self.temperature == 1:
            return np.arange(self.starts[-1])
        first, size, count, order = self._groups
        rank = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        size, start = np.repeat(size, count), epoch * np.repeat(count, count)
        return order[np.repeat(first, count) + (start + rank) % size]

    @functools.cached_property
    def _groups(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of the pairs of one store that are equally long: the first's place, how many there are and are drawn; all."""
        store_of = np.repeat(np.arange(len(self.stores)), np.diff(self.starts))
        keys = np.column_stack([store_of, self.lengths])
        groups, group_of, size = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        ids = shuffled(np.arange(len(keys)), 0)
        order = ids[np.argsort(group_of.reshape(-1)[ids], kind="stable")]
        # Rounded along each store, so that its draws add up.
        ratio = (np.array(self.draws) / np.diff(self.starts))[groups[:, 0]]
        until = np.rint(np.cumsum(size * ratio) + 1e-6).astype(np.int64)
        return np.cumsum(size) - size, size, np.diff(until, prepend=0), order

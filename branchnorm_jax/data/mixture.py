"""Mixture of several corpora with temperature-based sampling."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from branchnorm_jax.data.shuffle import shuffled

Store = Any
"""A `store.TokenStore`; in a language model `texts.TextRows`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The sentence pairs of several stores, sampled with a temperature.

    Store i makes up n_i^(1/T) / sum_j n_j^(1/T) of an epoch, where n_i is the number of its pairs and T the
    temperature (Aharoni et al., "Massively Multilingual Neural Machine Translation in the Wild"). An epoch contains
    each pair of the largest store once. With T = 1 it contains every pair once. With a larger T it repeats pairs of
    smaller stores: within a store, pairs of the same lengths are repeated equally often, up to a remainder that rotates
    through them from epoch to epoch.

    Pairs are numbered consecutively, store by store.

    Attributes:
      stores: the corpora.
      temperature: T, at least 1.
    """

    stores: Sequence[Store]
    temperature: float = 1.0

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Index of the first pair of each store, then the total: int64 [stores + 1]."""
        return np.cumsum([0, *map(len, self.stores)])

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Source and target length of each pair in tokens, EOS included: int32 [n, 2]."""
        return np.concatenate([store.lengths for store in self.stores])

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        """Returns the concatenated tokens of the sentences `ids`.

        The result is int32 [sum of lengths], as in `TokenStore.gather`.
        """
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
        """Number of pairs that an epoch draws from each store."""
        sizes = np.diff(self.starts)
        return np.rint(sizes * (sizes.max() / sizes) ** (1 - 1 / self.temperature)).astype(int).tolist()

    def drawn(self, epoch: int) -> np.ndarray:
        """Returns the pairs of an epoch: int64 [draws].

        The lengths of the i-th pair are the same in every epoch.
        """
        if self.temperature == 1:
            return np.arange(self.starts[-1])
        first, size, count, order = self._groups
        rank = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        size, start = np.repeat(size, count), epoch * np.repeat(count, count)
        return order[np.repeat(first, count) + (start + rank) % size]

    @functools.cached_property
    def _groups(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Groups of pairs with the same store and the same lengths, as (first, size, count, order).

        `order` lists all pairs group by group. `first` is the position in it where each group begins, `size` the number
        of pairs in the group, and `count` the number of pairs an epoch draws from the group.
        """
        store_of = np.repeat(np.arange(len(self.stores)), np.diff(self.starts))
        keys = np.column_stack([store_of, self.lengths])
        groups, group_of, size = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        ids = shuffled(np.arange(len(keys)), 0)
        order = ids[np.argsort(group_of.reshape(-1)[ids], kind="stable")]
        # Rounding the cumulative sum instead of each group keeps the total of each store exact.
        ratio = (np.array(self.draws) / np.diff(self.starts))[groups[:, 0]]
        until = np.rint(np.cumsum(size * ratio) + 1e-6).astype(np.int64)
        return np.cumsum(size) - size, size, np.diff(until, prepend=0), order

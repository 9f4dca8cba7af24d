"""Mixture of several corpora: how often an epoch draws the pairs of each."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from branchnorm_jax.data.packing import distinct_rows
from branchnorm_jax.data.shuffle import shuffled

Store = Any
"""A `store.TokenStore`; in a language model `texts.TextRows`."""


def repeats(sizes: np.ndarray, weights: Sequence[float], temperature: float) -> np.ndarray:
    """Returns how often an epoch draws each pair of a corpus: float64 [directions, corpora], at least 1.

    Within a direction, pairs are drawn in proportion to the weight of their corpus; those of the corpus with the
    smallest weight are drawn once. If n_i is the number of pairs that this gives for direction i, and T the
    temperature, direction i makes up n_i^(1/T) / sum_j n_j^(1/T) of an epoch, because all its pairs are repeated
    (Aharoni et al., "Massively Multilingual Neural Machine Translation in the Wild"). The largest direction is not
    repeated.

    Args:
      sizes: number of pairs, int [directions, corpora].
      weights: weight of each corpus.
      temperature: T, at least 1.

    >>> repeats(np.array([[10, 80]]), (2, 1), 1.0)
    array([[2., 1.]])
    >>> repeats(np.array([[400], [100]]), (1,), 2.0)
    array([[1.],
           [2.]])
    """
    relative = np.array(weights) / min(weights)
    totals = (sizes * relative).sum(1, keepdims=True)
    return relative * (totals.max() / totals) ** (1 - 1 / temperature)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """The sentence pairs of several stores, some of which an epoch repeats.

    Within a store, pairs of the same lengths are repeated equally often, up to a remainder that rotates through them
    from epoch to epoch.

    Pairs are numbered consecutively, store by store.

    Attributes:
      stores: the corpora.
      repeats: how often an epoch draws each pair of each store, at least 1; empty: once.
    """

    stores: Sequence[Store]
    repeats: Sequence[float] = ()

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
        return np.rint(np.diff(self.starts) * np.array(self.repeats or 1.0)).astype(int).tolist()

    def drawn(self, epoch: int) -> np.ndarray:
        """Returns the pairs of an epoch: int64 [draws].

        The lengths of the i-th pair are the same in every epoch.
        """
        if all(times == 1 for times in self.repeats):
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
        groups, group_of, size = distinct_rows(np.column_stack([store_of, self.lengths]))
        ids = shuffled(np.arange(len(group_of)), 0)
        order = ids[np.argsort(group_of[ids], kind="stable")]
        # Rounding the cumulative sum instead of each group keeps the total of each store exact.
        ratio = (np.array(self.draws) / np.diff(self.starts))[groups[:, 0]]
        until = np.rint(np.cumsum(size * ratio) + 1e-6).astype(np.int64)
        return np.cumsum(size) - size, size, np.diff(until, prepend=0), order

"""Packing: which sentence pairs share a row, so that almost every position of a batch holds a real token.

Pairs are packed by their lengths alone. A corpus has few kinds of them (a kind is a source and a target length), so
rows are found kind by kind and repeated as often as there are pairs for them: the work does not grow with the corpus.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from branchnorm_jax.errors import UserError

SENTENCES = 4
"""A short row holds so many sentences of average length at least: more fill it no better and cost more attention."""

_BALANCE = 2.0
"""How much packing minds that one side of a row runs full before the other, against how full the row is."""


class Shape(NamedTuple):
    """A static batch shape: `rows` rows of `source` and `target` positions."""

    rows: int
    source: int
    target: int


class Kind(NamedTuple):
    """Lengths of a sentence pair, EOS included."""

    source: int
    target: int


class Packing(NamedTuple):
    """Rows for every pair of a corpus, in the order of their shapes.

    Attributes:
      shape: index of each row's shape, int32 [rows].
      starts: the places of row r are starts[r] to starts[r + 1], int64 [rows + 1].
      kinds: index of the kind of pair that each place is for, int32 [pairs].
      order: all pairs, sorted by the index of their kind, int64 [pairs].
    """

    shape: np.ndarray
    starts: np.ndarray
    kinds: np.ndarray
    order: np.ndarray


def row_lengths(mean: float, longest: float, batch_tokens: int, row_multiple: int) -> list[int]:
    """Positions of rows on the larger side: short ones first, then half as many each time, until `longest` tokens fit.

    Short rows are for sentences of `mean` tokens. Rows are as long as a batch has room for with so many of them, in
    steps of 8: their number is a multiple of `row_multiple`, which would else leave much of a small batch unused.
    """
    limit = batch_tokens // row_multiple
    multiples = max(1, limit // (-(-int(SENTENCES * mean) // 8) * 8))
    ladder: list[int] = []
    while multiples and (not ladder or ladder[-1] < longest):
        ladder.append(limit // multiples // 8 * 8)
        multiples //= 2
    return ladder if ladder[-1] >= longest else [*ladder[:-1], limit]


def choose_shapes(
    lengths: np.ndarray, longest: np.ndarray, batch_tokens: int, count: int, row_multiple: int
) -> list[Shape]:
    """At most `count` shapes, the last of which has room for the longest sentences.

    From one to the next rows are half as many and at least twice as long. Sides are as long as the sentences' are on
    average.

    Args:
      lengths: tokens of source and target of each pair, EOS included, int [n, 2].
      longest: the most tokens that a source and a target may have, int [2].
      batch_tokens: rows x the longer side is at most this.
      count: number of shapes.
      row_multiple: rows are a multiple of this.

    Raises:
      UserError: if the longest sentence does not fit.
    """
    limit = batch_tokens // row_multiple
    if longest.max() > limit:
        raise UserError(
            f"config: train.batch_tokens={batch_tokens} cannot hold data.row_multiple={row_multiple} sentences of "
            f"{longest.max()} tokens; raise it to {longest.max() * row_multiple} or lower data.max_length"
        )
    total = lengths.sum(0)
    ladder = row_lengths(
        float(lengths.mean(0).max()), float((longest * total.max() / total).max()), batch_tokens, row_multiple
    )
    sides = [np.ceil(length * total / total.max()).astype(int) for length in ladder[-count:]]
    # What fits into no row of these proportions widens the last shape alone.
    sides[-1] = np.maximum(sides[-1], longest)
    return [
        Shape(batch_tokens // max(source, target) // row_multiple * row_multiple, source, target)
        for source, target in (side.tolist() for side in sides)
    ]


def pack(lengths: np.ndarray, shapes: Sequence[Shape]) -> Packing:
    """Rows that hold every pair once.

    Best fit, decreasing: a row begins with the longest pair that is left, and takes what fills it best and evenly on
    both sides. Pairs that fit in no shorter row come first; then longer rows are opened until their last batch is full,
    as long as there are pairs.

    Args:
      lengths: tokens of source and target of each pair, EOS included, int [n, 2].
      shapes: from short to long; the last has room for every pair.
    """
    kinds, kind_of, left = np.unique(lengths, axis=0, return_inverse=True, return_counts=True)
    shape_of_row, sizes, places = [], [], []
    for index, shape in reversed(list(enumerate(shapes))):
        sides = np.array(shape[1:])
        size = (kinds / sides).max(1)
        too_long = (kinds > shapes[index - 1][1:]).any(1) if index else np.ones(len(kinds), bool)
        opened = 0
        while left.any():
            most = np.iinfo(np.int64).max
            firsts = np.flatnonzero((left > 0) & too_long)
            if not len(firsts):
                most = -opened % shape.rows
                firsts = np.flatnonzero((left > 0) & (size <= 1))
            if not most or not len(firsts):
                break
            first = firsts[size[firsts].argmax()]
            row = _fill(kinds, left, int(first), sides)
            uses = Counter(row)
            repeats = min(most, *(int(left[kind]) // number for kind, number in uses.items()))
            for kind, number in uses.items():
                left[kind] -= repeats * number
            opened += repeats
            shape_of_row.append(np.full(repeats, index, np.int32))
            sizes.append(np.full(repeats, len(row), np.int64))
            places.append(np.tile(np.array(row, np.int32), repeats))
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
    order = np.argsort(kind_of.reshape(-1), kind="stable")
    return Packing(np.concatenate(shape_of_row), starts, np.concatenate(places), order)


def _fill(kinds: np.ndarray, left: np.ndarray, first: int, sides: np.ndarray) -> list[int]:
    """Kinds of a row of `sides` positions that begins with the kind `first`, of which there are `left` each."""
    row, room, left = [first], sides - kinds[first], left.copy()
    left[first] -= 1
    while len(fitting := np.flatnonzero((left > 0) & (kinds <= room).all(1))):
        after = (room - kinds[fitting]) / sides
        best = int(fitting[(after.sum(1) + _BALANCE * np.abs(after[:, 0] - after[:, 1])).argmin()])
        row.append(best)
        room = room - kinds[best]
        left[best] -= 1
    return row

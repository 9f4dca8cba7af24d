"""Packing: placing several sentence pairs in one row, so that almost every position of a batch holds a real token.

Packing depends only on the lengths of the pairs. A corpus has few distinct kinds of pairs (a kind is a source length
and a target length), so rows are computed per kind and repeated while pairs of these kinds remain. Apart from sorting
the pairs by kind, the amount of work does not grow with the corpus.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from branchnorm_jax.errors import UnfitError

SENTENCES = 4
"""Minimum number of average-length sentences in a short row. Longer rows are no fuller, but cost more attention."""

_BALANCE = 2.0
"""Weight of the imbalance between the two sides of a row, relative to the row's unused space."""


class Shape(NamedTuple):
    """A static batch shape: number of rows, and row length on the source and the target side."""

    rows: int
    source: int
    target: int


class Packing(NamedTuple):
    """Rows that hold all pairs of a corpus, grouped by shape.

    Attributes:
      shape: shape index of each row, int32 [rows].
      starts: row r consists of the slots starts[r] to starts[r + 1], int64 [rows + 1].
      kinds: kind index of each slot, int32 [pairs].
      order: all pairs sorted by kind index, int64 [pairs].
    """

    shape: np.ndarray
    starts: np.ndarray
    kinds: np.ndarray
    order: np.ndarray


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the distinct rows of numbers of at least 0, sorted, the place of each row among them, and their counts.

    Equals `np.unique` with axis=0, which takes ten times as long.

    >>> distinct_rows(np.array([[3, 1], [0, 2], [3, 1]]))
    (array([[0, 2],
           [3, 1]]), array([1, 0, 1]), array([1, 2]))
    """
    sizes = tuple(rows.max(0, initial=0) + 1)
    numbers = np.ravel_multi_index(tuple(rows.T), sizes)
    found, place, count = np.unique(numbers, return_inverse=True, return_counts=True)
    return np.stack(np.unravel_index(found, sizes), axis=1), place, count


def row_lengths(
    mean: float, longest: float, batch_tokens: int, row_multiple: int, powers_of_two: bool = False
) -> list[int]:
    """Returns the candidate row lengths on the longer side, in ascending order.

    The last one fits `longest` tokens. The shortest rows hold at least `SENTENCES` sentences of `mean` tokens, if
    `batch_tokens` allows it. Each further length halves the number of rows. The number of rows is a multiple of
    `row_multiple`. Given this number, the rows are as long as `batch_tokens` allows, rounded down to a multiple of 8.
    Fixed lengths would leave much of a small batch unused. With `powers_of_two`, the lengths are powers of two instead.
    """
    limit = batch_tokens // row_multiple
    if powers_of_two:
        last, most = power_of_two(longest), 1 << limit.bit_length() - 1
        lengths = [min(power_of_two(SENTENCES * mean), max(last, most))]
        while lengths[-1] < last:
            lengths.append(2 * lengths[-1])
        return lengths
    multiples = max(1, limit // (-(-int(SENTENCES * mean) // 8) * 8))
    ladder: list[int] = []
    while multiples and (not ladder or ladder[-1] < longest):
        ladder.append(limit // multiples // 8 * 8)
        multiples //= 2
    return ladder if ladder[-1] >= longest else [*ladder[:-1], limit]


def power_of_two(length: float) -> int:
    """Returns the smallest power of two that is at least `length`."""
    return 1 << max(0, math.ceil(length) - 1).bit_length()


def choose_shapes(
    lengths: np.ndarray,
    longest: np.ndarray,
    batch_tokens: int,
    count: int,
    row_multiple: int,
    powers_of_two: bool = False,
) -> list[Shape]:
    """Chooses at most `count` batch shapes; the last one fits the longest sentences.

    Each shape has half as many rows as the one before, and they are at least twice as long. The ratio of source to
    target row length is that of the whole corpus; with `powers_of_two`, both sides have the same length.

    Args:
      lengths: source and target length of each pair in tokens, EOS included, int [n, 2].
      longest: maximum source and target length in tokens, int [2].
      batch_tokens: upper bound for rows x length of the longer side.
      count: maximum number of shapes.
      row_multiple: the number of rows is a multiple of this.
      powers_of_two: row lengths are powers of two.

    Raises:
      UnfitError: if the longest sentence does not fit.
    """
    needed = power_of_two(longest.max()) if powers_of_two else longest.max()
    if needed > batch_tokens // row_multiple:
        raise UnfitError(
            f"config: train.batch_tokens={batch_tokens} cannot hold data.row_multiple={row_multiple} rows of "
            f"{needed} tokens; raise it to {needed * row_multiple}, or lower data.max_length or data.row_multiple"
        )
    total = np.ones(2) if powers_of_two else lengths.sum(0)
    ladder = row_lengths(
        float(lengths.mean(0).max()),
        float((longest * total.max() / total).max()),
        batch_tokens,
        row_multiple,
        powers_of_two,
    )
    sides = [np.ceil(length * total / total.max()).astype(int) for length in ladder[-count:]]
    # Pairs with unusual proportions may exceed one side of every shape; only the last shape is widened for them.
    sides[-1] = np.maximum(sides[-1], longest)
    return [
        Shape(batch_tokens // max(source, target) // row_multiple * row_multiple, source, target)
        for source, target in (side.tolist() for side in sides)
    ]


def pack(lengths: np.ndarray, shapes: Sequence[Shape]) -> Packing:
    """Packs every pair into exactly one row, by best-fit decreasing.

    Shapes are filled from the longest to the shortest. A row starts with the longest remaining pair and is then filled
    with the pairs that leave the least and most evenly distributed space on both sides. Each shape first takes the
    pairs too long for any shorter shape, and then further pairs until its last batch is full.

    Args:
      lengths: source and target length of each pair in tokens, EOS included, int [n, 2].
      shapes: batch shapes from short to long; every pair fits the last one.
    """
    kinds, kind_of, remaining = distinct_rows(lengths)
    shape_of_row, sizes, slots = [], [], []
    for index, shape in reversed(list(enumerate(shapes))):
        sides = np.array(shape[1:])
        size = (kinds / sides).max(1)
        too_long = (kinds > shapes[index - 1][1:]).any(1) if index else np.ones(len(kinds), bool)
        opened = 0
        while remaining.any():
            most = np.iinfo(np.int64).max
            firsts = np.flatnonzero((remaining > 0) & too_long)
            if not len(firsts):
                most = -opened % shape.rows
                firsts = np.flatnonzero((remaining > 0) & (size <= 1))
            if not most or not len(firsts):
                break
            first = firsts[size[firsts].argmax()]
            row = _fill(kinds, remaining, int(first), sides)
            uses = Counter(row)
            repeats = min(most, *(int(remaining[kind]) // number for kind, number in uses.items()))
            for kind, number in uses.items():
                remaining[kind] -= repeats * number
            opened += repeats
            shape_of_row.append(np.full(repeats, index, np.int32))
            sizes.append(np.full(repeats, len(row), np.int64))
            slots.append(np.tile(np.array(row, np.int32), repeats))
    starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes]))
    order = np.argsort(kind_of, kind="stable")
    return Packing(np.concatenate(shape_of_row), starts, np.concatenate(slots), order)


def _fill(kinds: np.ndarray, remaining: np.ndarray, first: int, sides: np.ndarray) -> list[int]:
    """Returns the kinds of one row that starts with kind `first`.

    Args:
      kinds: source and target length of each kind, int [kinds, 2].
      remaining: number of remaining pairs of each kind.
      first: index of the first kind.
      sides: row length on the source and the target side.
    """
    row, room, remaining = [first], sides - kinds[first], remaining.copy()
    remaining[first] -= 1
    while len(fitting := np.flatnonzero((remaining > 0) & (kinds[:, 0] <= room[0]) & (kinds[:, 1] <= room[1]))):
        after = (room - kinds[fitting]) / sides
        best = int(fitting[(after.sum(1) + _BALANCE * np.abs(after[:, 0] - after[:, 1])).argmin()])
        row.append(best)
        room = room - kinds[best]
        remaining[best] -= 1
    return row

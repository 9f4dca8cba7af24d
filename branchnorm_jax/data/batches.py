"""Batches as a pure function of (corpus, settings, seed, step), in a few static shapes."""

import dataclasses
import functools
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from branchnorm_jax.data.packing import Packing, Shape, choose_shapes, pack
from branchnorm_jax.data.shuffle import shuffled
from branchnorm_jax.options import PAD, DataConfig

T = TypeVar("T")


class TextBatch(NamedTuple):
    """Token ids, int32 [rows, length] each: sentences one after the other, each ends in EOS, then padding.

    The n-th sentence of a target row is the translation of the n-th sentence of the source row.
    """

    source: np.ndarray
    target: np.ndarray

    @property
    def shape(self) -> Shape:
        """Rows, and positions of both sides."""
        rows, source = self.source.shape
        return Shape(rows, source, self.target.shape[1])

    def digest(self) -> str:
        """Eight hex digits that identify the batch in logs."""
        return f"{zlib.crc32(self.target.tobytes(), zlib.crc32(self.source.tobytes())):08x}"


class Sentences(Protocol):
    """What batches need of a token store."""

    @property
    def lengths(self) -> np.ndarray:
        """int [n, 2]: tokens of source and target, EOS included."""

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        """int32 [sum of lengths]: the tokens of these sentences, end to end."""

    def drawn(self, epoch: int) -> np.ndarray:
        """int64 [draws]: the sentences that an epoch draws; the i-th is as long in every epoch."""


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan:
    """Which sentences are in the batch of which step.

    Every sentence that an epoch draws is in exactly one of its batches. Batches differ from epoch to epoch, their
    number does not, so the batch of any step is found without reading those before: the rows are packed once, and each
    epoch deals the pairs of equal lengths out anew and puts the rows into another order.
    """

    sentences: Sentences
    packing: Packing
    shapes: Sequence[Shape]
    seed: int

    @functools.cached_property
    def rows(self) -> list[int]:
        """Rows of each shape that hold sentences, over one epoch."""
        return rows_of(self.packing, self.shapes)

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Updates of one epoch."""
        return sum(-(-rows // shape.rows) for rows, shape in zip(self.rows, self.shapes, strict=True))

    @functools.cached_property
    def fill(self) -> float:
        """Real tokens over computed positions, both sides, over one epoch."""
        positions = sum(
            -(-rows // shape.rows) * shape.rows * (shape.source + shape.target)
            for rows, shape in zip(self.rows, self.shapes, strict=True)
        )
        return float(self.sentences.lengths[self.sentences.drawn(0)].sum() / positions)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a plan lives as long as the run
    def _epoch(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """The pair in each place of the packing, and the rows of each batch."""
        packing = self.packing
        # Both orders go from kind to kind: the places as they are, the pairs anew.
        places = np.argsort(packing.kinds, kind="stable")
        draws = shuffled(np.arange(len(places)), self.seed, epoch)
        kind_of = np.empty(len(places), packing.kinds.dtype)
        kind_of[packing.order] = packing.kinds[places]
        pairs = np.empty(len(places), np.int64)
        pairs[places] = self.sentences.drawn(epoch)[draws[np.argsort(kind_of[draws], kind="stable")]]
        batches = []
        for index, shape in enumerate(self.shapes):
            rows = shuffled(np.flatnonzero(packing.shape == index), self.seed, epoch, 1)
            batches += [rows[start : start + shape.rows] for start in range(0, len(rows), shape.rows)]
        order = shuffled(np.arange(len(batches)), self.seed, epoch, 2)
        return pairs, [batches[index] for index in order]

    def ids_at(self, step: int) -> tuple[Shape, list[np.ndarray]]:
        """The shape of the batch of update `step` (the first is 0), and the ids of the sentences of each row."""
        epoch, index = divmod(step, self.batches_per_epoch)
        pairs, batches = self._epoch(epoch)
        rows, packing = batches[index], self.packing
        return self.shapes[packing.shape[rows[0]]], [pairs[packing.starts[r] : packing.starts[r + 1]] for r in rows]

    def batch_at(self, step: int) -> TextBatch:
        """The batch of update `step`; rows that the last batch of a shape leaves over are padding."""
        shape, rows = self.ids_at(step)
        return fill_rows(self.sentences, rows, shape)

    def in_order(self) -> Iterator[TextBatch]:
        """Each sentence once: for validation."""
        return (self.batch_at(step) for step in range(self.batches_per_epoch))

    def single(self, count: int) -> TextBatch:
        """The first `count` sentences of the corpus, one a row."""
        rows = [np.array([index]) for index in range(min(count, len(self.sentences.lengths)))]
        return fill_rows(self.sentences, rows, Shape(len(rows), *self.sentences.lengths[: len(rows)].max(0).tolist()))


def fill_rows(sentences: Sentences, rows: Sequence[np.ndarray], shape: Shape) -> TextBatch:
    """A batch of `shape` whose first rows hold the sentences of these ids."""
    ids = np.concatenate(rows)
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    filled = np.zeros((shape.rows, 2), np.int64)
    np.add.at(filled, row_of, sentences.lengths[ids])
    sides = []
    for column, side in enumerate(TextBatch._fields):
        out = np.full((shape.rows, shape[1 + column]), PAD, np.int32)
        out[np.arange(out.shape[1]) < filled[:, column, None]] = sentences.gather(side, ids)
        sides.append(out)
    return TextBatch(*sides)


def make_plans(
    data: DataConfig, train: Sentences, valid: Sequence[Sentences], batch_tokens: int, seed: int
) -> tuple[BatchPlan, list[BatchPlan]]:
    """The plan of training and those of validation, in the same shapes, so that validation compiles none of its own."""
    lengths = train.lengths[train.drawn(0)]
    longest = np.max([sentences.lengths.max(0) for sentences in (train, *valid)], axis=0)
    shapes = choose_shapes(lengths, longest, batch_tokens, data.batch_shapes, data.row_multiple)
    packing = pack(lengths, shapes)
    # A corpus of a few batches would leave much of the last one empty: all of them a little smaller waste less.
    rows = rows_of(packing, shapes)[0]
    if rows:
        even = -(-rows // -(-rows // shapes[0].rows))
        shapes = [shapes[0]._replace(rows=-(-even // data.row_multiple) * data.row_multiple), *shapes[1:]]
    plans = [BatchPlan(sentences, pack(sentences.lengths, shapes), shapes, seed) for sentences in valid]
    return BatchPlan(train, packing, shapes, seed), plans


def rows_of(packing: Packing, shapes: Sequence[Shape]) -> list[int]:
    """Rows of each shape in a packing."""
    return np.bincount(packing.shape, minlength=len(shapes)).tolist()


def prefetch(function: Callable[[int], T], start: int, stop: int, depth: int) -> Generator[T, None, None]:
    """function(start), ..., function(stop - 1), computed by a thread at most `depth` items ahead.

    An exception of the function is raised where its item would have come.
    """
    items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: tuple[T | None, BaseException | None]) -> None:
        while not stopped.is_set():
            try:
                return items.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        for index in range(start, stop):
            if stopped.is_set():
                return
            try:
                put((function(index), None))
            except BaseException as error:
                return put((None, error))

    thread = threading.Thread(target=work, daemon=True, name="batches")
    thread.start()
    try:
        for _ in range(start, stop):
            item, error = items.get()
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        thread.join()

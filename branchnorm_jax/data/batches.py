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
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import PAD

T = TypeVar("T")

NO_PAIRS = np.zeros(0, np.int64)


class TextBatch(NamedTuple):
    """A batch of packed sentence pairs: int32 token ids [rows, length] for each side.

    A row holds one or more sentences, each ending in EOS, followed by padding. The n-th sentence of a target row is the
    translation of the n-th sentence of the source row. For a language model, the source has the token before each token
    of the target; see `texts.TextRows`.
    """

    source: np.ndarray
    target: np.ndarray

    @property
    def shape(self) -> Shape:
        """Number of rows, and row length of each side."""
        rows, source = self.source.shape
        return Shape(rows, source, self.target.shape[1])


class Sentences(Protocol):
    """The part of a token store's interface that batching uses."""

    @property
    def lengths(self) -> np.ndarray:
        """Source and target length of each pair in tokens, EOS included: int [n, 2]."""

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        """Returns the concatenated tokens of the sentences `ids`: int32 [sum of lengths]."""

    def drawn(self, epoch: int) -> np.ndarray:
        """Returns the ids of the pairs in an epoch: int64 [draws].

        The lengths of the i-th pair are the same in every epoch.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan:
    """Assigns sentence pairs to the batch of each step.

    Each pair drawn for an epoch appears in exactly one batch of that epoch. Rows are packed once. Each epoch permutes
    pairs of equal lengths among their slots in the rows, and shuffles the rows. The number of batches per epoch is
    therefore constant, and the batch of any step can be computed without the steps before it.
    """

    sentences: Sentences
    packing: Packing
    shapes: Sequence[Shape]
    seed: int

    @functools.cached_property
    def rows(self) -> list[int]:
        """Number of non-empty rows of each shape in one epoch."""
        return rows_of(self.packing, self.shapes)

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Number of batches in one epoch."""
        return sum(-(-rows // shape.rows) for rows, shape in zip(self.rows, self.shapes, strict=True))

    @functools.cached_property
    def fill(self) -> float:
        """Fraction of positions that hold a real token, over both sides and one epoch."""
        positions = sum(
            -(-rows // shape.rows) * shape.rows * (shape.source + shape.target)
            for rows, shape in zip(self.rows, self.shapes, strict=True)
        )
        return float(self.sentences.lengths[self.sentences.drawn(0)].sum() / positions)

    @functools.cached_property
    def _epoch(self) -> Callable[[int], tuple[np.ndarray, list[np.ndarray]]]:
        """`_order`, with a cache of this plan: the plans of the validation texts are used in between."""
        return functools.lru_cache(maxsize=2)(self._order)

    def _order(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns the pair id in each slot of the packing, and the rows of each batch."""
        packing = self.packing
        # Slots and shuffled pairs are both sorted by kind, so each pair is assigned a slot of its own lengths.
        slots = np.argsort(packing.kinds, kind="stable")
        draws = shuffled(np.arange(len(slots)), self.seed, epoch)
        kind_of = np.empty(len(slots), packing.kinds.dtype)
        kind_of[packing.order] = packing.kinds[slots]
        pairs = np.empty(len(slots), np.int64)
        pairs[slots] = self.sentences.drawn(epoch)[draws[np.argsort(kind_of[draws], kind="stable")]]
        batches = []
        for index, shape in enumerate(self.shapes):
            rows = shuffled(np.flatnonzero(packing.shape == index), self.seed, epoch, 1)
            batches += [rows[start : start + shape.rows] for start in range(0, len(rows), shape.rows)]
        order = shuffled(np.arange(len(batches)), self.seed, epoch, 2)
        return pairs, [batches[index] for index in order]

    def ids_at(self, step: int) -> tuple[Shape, list[np.ndarray]]:
        """Returns the shape of the batch at `step` and the pair ids of each row.

        Steps count from 0.
        """
        epoch, index = divmod(step, self.batches_per_epoch)
        pairs, batches = self._epoch(epoch)
        rows, packing = batches[index], self.packing
        return self.shapes[packing.shape[rows[0]]], [pairs[packing.starts[r] : packing.starts[r + 1]] for r in rows]

    def digest_at(self, step: int) -> str:
        """Returns a CRC-32 of the pair ids of each row as eight hex digits, to identify the batch in logs."""
        _, rows = self.ids_at(step)
        sizes = np.array([len(row) for row in rows], np.int64)
        return f"{zlib.crc32(np.concatenate(rows).astype(np.int64).tobytes(), zlib.crc32(sizes.tobytes())):08x}"

    def batch_at(self, step: int, select_rows: Callable[[int], np.ndarray] = np.arange) -> TextBatch:
        """Returns the batch at `step`, or some of its rows.

        Unused rows in the last batch of a shape contain only padding.

        Args:
          step: the step, counted from 0.
          select_rows: maps the number of rows to the indices of the rows to return; rows beyond the last contain only
            padding.
        """
        shape, rows = self.ids_at(step)
        wanted = select_rows(shape.rows)
        return fill_rows(
            self.sentences,
            [rows[row] if row < len(rows) else NO_PAIRS for row in wanted],
            shape._replace(rows=len(wanted)),
        )

    def in_order(self, select_rows: Callable[[int], np.ndarray] = np.arange) -> Iterator[TextBatch]:
        """Yields batches that contain each pair once, for validation. `select_rows` is as in `batch_at`."""
        return (self.batch_at(step, select_rows) for step in range(self.batches_per_epoch))

    def single(self, count: int) -> TextBatch:
        """Returns a batch of the first `count` pairs of the corpus, one pair per row."""
        rows = [np.array([index]) for index in range(min(count, len(self.sentences.lengths)))]
        return fill_rows(self.sentences, rows, Shape(len(rows), *self.sentences.lengths[: len(rows)].max(0).tolist()))


def fill_rows(sentences: Sentences, rows: Sequence[np.ndarray], shape: Shape) -> TextBatch:
    """Builds a batch of the given shape from the pair ids of its first rows.

    Further rows contain only padding.
    """
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
    """Plans the batches of the training set and of each validation set.

    All plans share the same shapes, so validation does not compile additional programs.
    """
    lengths = train.lengths[train.drawn(0)]
    longest = np.max([sentences.lengths.max(0) for sentences in (train, *valid)], axis=0)
    if data.source == "documents":
        shapes = [rows_of_text(data, batch_tokens)]
    else:
        shapes = choose_shapes(
            lengths, longest, batch_tokens, data.batch_shapes, data.row_multiple, data.power_of_two_rows
        )
    packing = pack(lengths, shapes)
    # If the corpus fills only a few batches, the last one would be mostly empty. Slightly smaller batches waste less.
    rows = rows_of(packing, shapes)[0]
    if rows:
        even = -(-rows // -(-rows // shapes[0].rows))
        shapes = [shapes[0]._replace(rows=-(-even // data.row_multiple) * data.row_multiple), *shapes[1:]]
    plans = [BatchPlan(sentences, pack(sentences.lengths, shapes), shapes, seed) for sentences in valid]
    return BatchPlan(train, packing, shapes, seed), plans


def rows_of_text(data: DataConfig, batch_tokens: int) -> Shape:
    """Returns the shape of the batches of a language model: rows of `data.context` tokens."""
    rows = batch_tokens // data.context // data.row_multiple * data.row_multiple
    return Shape(rows, data.context, data.context)


def rows_of(packing: Packing, shapes: Sequence[Shape]) -> list[int]:
    """Returns the number of rows of each shape in a packing."""
    return np.bincount(packing.shape, minlength=len(shapes)).tolist()


def prefetch(function: Callable[[int], T], start: int, stop: int, ahead: int = 4) -> Generator[T, None, None]:
    """Yields function(start), ..., function(stop - 1), computed in a thread.

    The thread is at most `ahead` items ahead. If the function raises an exception, it is re-raised here in place of the
    corresponding item.
    """
    items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=ahead)
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

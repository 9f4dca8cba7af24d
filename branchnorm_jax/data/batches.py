"""Batches as a pure function of (corpus, settings, seed, step), in a few static shapes."""

import dataclasses
import functools
import queue
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig

T = TypeVar("T")


class TextBatch(NamedTuple):
    """Token ids, int32 [rows, length] each: sentences that end in EOS, then padding (id 0)."""

    source: np.ndarray
    target: np.ndarray

    def digest(self) -> str:
        """Eight hex digits that identify the batch in logs."""
        return f"{zlib.crc32(self.target.tobytes(), zlib.crc32(self.source.tobytes())):08x}"


class Shape(NamedTuple):
    """A static batch shape: `rows` sentences of at most `length` tokens on either side."""

    rows: int
    length: int


class Sentences(Protocol):
    """What batches need of a token store."""

    @property
    def lengths(self) -> np.ndarray:
        """int [n, 2]: tokens of source and target, EOS included."""

    def gather(self, side: str, ids: np.ndarray, length: int) -> np.ndarray:
        """int32 [len(ids), length]: the sentences, padded."""


def choose_shapes(lengths: np.ndarray, batch_tokens: int, count: int, row_multiple: int) -> list[Shape]:
    """At most `count` shapes that waste the fewest positions on sentences of these lengths.

    A sentence goes to the shortest shape that holds it; the boundaries minimise the total padded length exactly, by
    dynamic programming over the distinct lengths.

    Args:
      lengths: the longer side of each sentence pair, int [n].
      batch_tokens: rows x length is at most this.
      count: number of shapes.
      row_multiple: rows are a multiple of this.

    Raises:
      UserError: if the longest sentence does not fit.
    """
    values, frequency = np.unique(lengths, return_counts=True)
    longest = int(values[-1])
    if longest * row_multiple > batch_tokens:
        raise UserError(
            f"config: train.batch_tokens={batch_tokens} cannot hold data.row_multiple={row_multiple} sentences of "
            f"{longest} tokens; raise it to {longest * row_multiple} or lower data.max_length"
        )
    below = np.concatenate([[0], np.cumsum(frequency)])
    widths = np.concatenate([[0], values])
    # best[j]: least padded length of the sentences of the j shortest distinct lengths, with the shapes allowed so far.
    best = np.where(widths == 0, 0, np.inf)
    steps = []
    for _ in range(min(count, len(values))):
        cost = best[:, None] + (below[None, :] - below[:, None]) * widths[None, :]
        cost[np.tril_indices(len(cost), -1)] = np.inf
        steps.append(cost.argmin(0))
        best = cost.min(0)
    boundaries = []
    end = len(values)
    for previous in reversed(steps):
        if previous[end] != end:
            boundaries.append(int(widths[end]))
            end = previous[end]
    return [Shape(batch_tokens // b // row_multiple * row_multiple, b) for b in sorted(boundaries)]


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


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan:
    """Which sentences are in the batch of which step.

    Every sentence is in exactly one batch of each epoch. Batches differ from epoch to epoch, their number does not, so
    the batch of any step is found without reading those before.
    """

    sentences: Sentences
    shapes: Sequence[Shape]
    seed: int

    @functools.cached_property
    def _members(self) -> list[np.ndarray]:
        """Sentence ids by shape."""
        longer = self.sentences.lengths.max(1)
        which = np.searchsorted([shape.length for shape in self.shapes], longer)
        return [np.flatnonzero(which == index) for index in range(len(self.shapes))]

    @property
    def used(self) -> list[bool]:
        """Of each shape, whether any sentence needs it."""
        return [len(ids) > 0 for ids in self._members]

    @functools.cached_property
    def batches_per_epoch(self) -> int:
        """Updates of one epoch."""
        return sum(-(-len(ids) // shape.rows) for ids, shape in zip(self._members, self.shapes, strict=True))

    @functools.cached_property
    def fill(self) -> float:
        """Real tokens over computed positions, both sides, over one epoch."""
        positions = sum(
            -(-len(ids) // shape.rows) * shape.rows * shape.length * 2
            for ids, shape in zip(self._members, self.shapes, strict=True)
        )
        return float(self.sentences.lengths.sum() / positions)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a plan lives as long as the run
    def _epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        batches = []
        for index, (ids, shape) in enumerate(zip(self._members, self.shapes, strict=True)):
            ids = shuffled(ids, self.seed, epoch)
            batches += [(index, ids[start : start + shape.rows]) for start in range(0, len(ids), shape.rows)]
        order = shuffled(np.arange(len(batches)), self.seed, epoch, 1)
        return [batches[index] for index in order]

    def ids_at(self, step: int) -> tuple[Shape, np.ndarray]:
        """The shape of the batch of update `step` (the first is 0) and the ids of its sentences."""
        epoch, index = divmod(step, self.batches_per_epoch)
        shape, ids = self._epoch(epoch)[index]
        return self.shapes[shape], ids

    def batch_at(self, step: int) -> TextBatch:
        """The batch of update `step`; rows that the last batch of a shape leaves over are padding."""
        shape, ids = self.ids_at(step)
        return self._fill(shape, ids)

    def in_order(self) -> Iterator[TextBatch]:
        """Each sentence once, shape by shape: for validation."""
        for ids, shape in zip(self._members, self.shapes, strict=True):
            for start in range(0, len(ids), shape.rows):
                yield self._fill(shape, ids[start : start + shape.rows])

    def _fill(self, shape: Shape, ids: np.ndarray) -> TextBatch:
        sides = (np.zeros(shape, np.int32), np.zeros(shape, np.int32))
        for side, out in zip(("source", "target"), sides, strict=True):
            out[: len(ids)] = self.sentences.gather(side, ids, shape.length)
        return TextBatch(*sides)


def make_plans(
    data: DataConfig, train: Sentences, valid: Sentences, batch_tokens: int, seed: int
) -> tuple[BatchPlan, BatchPlan]:
    """The plans of training and validation, in the same shapes, so that validation compiles no shape of its own."""
    longer = train.lengths.max(1)
    longest = max(int(longer.max()), int(valid.lengths.max()))
    shapes = choose_shapes(np.append(longer, longest), batch_tokens, data.batch_shapes, data.row_multiple)
    return BatchPlan(train, shapes, seed), BatchPlan(valid, shapes, seed)


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

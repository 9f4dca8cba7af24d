"""The batch plan: optimal shapes, every sentence once per epoch, a pure function of the step."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.data.batches import BatchPlan, Shape, choose_shapes, make_plans, prefetch, shuffled
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig


class Text:
    """Sentences whose tokens tell which sentence and side they are from."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def sentence(self, side: str, index: int) -> np.ndarray:
        column = ("source", "target").index(side)
        return np.full(self.lengths[index, column], 2 * index + column + 3, np.int32)

    def gather(self, side: str, ids: np.ndarray, length: int) -> np.ndarray:
        out = np.zeros((len(ids), length), np.int32)
        for row, index in enumerate(ids):
            tokens = self.sentence(side, index)
            out[row, : len(tokens)] = tokens
        return out


def text(seed: int, count: int = 200, longest: int = 20) -> Text:
    return Text(np.random.default_rng(seed).integers(2, longest + 1, (count, 2)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 4))
def test_shapes_waste_least(lengths: list[int], count: int) -> None:
    """Against every choice of boundaries."""
    shapes = choose_shapes(np.array(lengths), 100, count, 2)
    assert len(shapes) <= count

    def padded(boundaries: list[int]) -> int:
        return sum(min(b for b in boundaries if b >= length) for length in lengths)

    distinct = sorted(set(lengths))
    best = min(
        padded([*chosen, distinct[-1]])
        for size in range(count)
        for chosen in itertools.combinations(distinct[:-1], min(size, len(distinct) - 1))
    )
    assert padded([shape.length for shape in shapes]) == best
    for rows, length in shapes:
        assert rows % 2 == 0
        assert rows * length <= 100 < (rows + 2) * length


def test_too_small_a_batch_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="raise it to 160"):
        choose_shapes(np.array([3, 20]), 100, 2, 8)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.integers(0, 5), st.integers(1, 5))
def test_every_sentence_exactly_once_per_epoch(seed: int, epoch: int, count: int) -> None:
    sentences = text(seed)
    plan = BatchPlan(sentences, choose_shapes(sentences.lengths.max(1), 64, count, 2), seed)
    steps = range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch)
    seen: list[int] = []
    for step in steps:
        shape, ids = plan.ids_at(step)
        batch = plan.batch_at(step)
        assert batch.source.shape == batch.target.shape == tuple(shape)
        for row, index in enumerate(ids):
            for side, tokens in zip(("source", "target"), batch, strict=True):
                expected = sentences.sentence(side, index)
                np.testing.assert_array_equal(tokens[row, : len(expected)], expected)
                assert not tokens[row, len(expected) :].any()
        assert not batch.source[len(ids) :].any()
        seen += list(ids)
    assert sorted(seen) == list(range(200))


def test_batch_is_a_function_of_the_step_alone() -> None:
    sentences = text(0)
    shapes = choose_shapes(sentences.lengths.max(1), 64, 3, 2)
    forwards, backwards = BatchPlan(sentences, shapes, 7), BatchPlan(sentences, shapes, 7)
    steps = range(3 * forwards.batches_per_epoch)
    first = [forwards.batch_at(step).digest() for step in steps]
    last = [backwards.batch_at(step).digest() for step in reversed(steps)]
    assert first == last[::-1]
    assert first != [BatchPlan(sentences, shapes, 8).batch_at(step).digest() for step in steps]
    per_epoch = forwards.batches_per_epoch
    assert sorted(first[:per_epoch]) != sorted(first[per_epoch : 2 * per_epoch])


def test_the_shuffle_is_splitmix64_and_so_the_same_everywhere() -> None:
    """Against integers of any size: an order that changed with a library would silently change resumed runs."""
    bits = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & bits
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & bits
        return x ^ (x >> 31)

    def key(x: int) -> int:
        for seed in (3, 1):
            x = mix((x * 0x9E3779B97F4A7C15 + seed + 1) & bits)
        return x

    assert shuffled(np.arange(50), 3, 1).tolist() == sorted(range(50), key=key)
    places = [shuffled(np.arange(100), seed).tolist().index(0) for seed in range(400)]
    assert 45 < np.mean(places) < 54


def test_fill_counts_real_tokens() -> None:
    sentences = Text(np.array([[2, 4], [3, 3], [10, 1]]))
    plan = BatchPlan(sentences, [Shape(2, 4), Shape(2, 10)], 0)
    assert plan.batches_per_epoch == 2
    assert plan.fill == 23 / (2 * 2 * 4 + 2 * 2 * 10)


def test_validation_uses_the_training_shapes_and_sees_each_sentence_once() -> None:
    train, valid = text(0), text(1, count=37, longest=25)
    plan, valid_plan = make_plans(DataConfig(batch_shapes=3, row_multiple=2), train, valid, 64, 0)
    assert plan.shapes is valid_plan.shapes
    sentinels = [row[0] for batch in valid_plan.in_order() for row in batch.source if row[0]]
    assert sorted(sentinels) == [2 * index + 3 for index in range(37)]


def test_prefetch_keeps_order_stops_early_and_passes_errors_on() -> None:
    assert list(prefetch(lambda i: i * i, 3, 9, 2)) == [9, 16, 25, 36, 49, 64]
    items = prefetch(lambda i: i, 0, 10**9, 2)
    assert next(items) == 0
    items.close()
    assert not any(thread.name == "batches" for thread in threading.enumerate())

    def fails(index: int) -> int:
        if index == 2:
            raise OSError("disk gone")
        return index

    items = prefetch(fails, 0, 5, 3)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(items)

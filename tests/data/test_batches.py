"""Batch plans: rows are full, every pair occurs once per epoch, and batches are a pure function of the step."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.data import batches
from branchnorm_jax.data.batches import BatchPlan, make_plans, prefetch
from branchnorm_jax.data.packing import Shape, choose_shapes, pack
from branchnorm_jax.data.shuffle import shuffled
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import EOS


class Text:
    """Sentences whose tokens encode the sentence and the side they belong to."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def sentence(self, side: str, index: int) -> list[int]:
        column = ("source", "target").index(side)
        return [2 * index + column + 3] * (self.lengths[index, column] - 1) + [EOS]

    def gather(self, side: str, ids: np.ndarray) -> np.ndarray:
        return np.array([token for index in ids for token in self.sentence(side, index)], np.int32)

    def drawn(self, epoch: int) -> np.ndarray:
        return np.arange(len(self.lengths))


def text(seed: int, count: int = 200, longest: int = 20) -> Text:
    return Text(np.random.default_rng(seed).integers(2, longest + 1, (count, 2)))


def plan_of(sentences: Text, tokens: int, shapes: int, seed: int) -> BatchPlan:
    chosen = choose_shapes(sentences.lengths, sentences.lengths.max(0), tokens, shapes, 2)
    return BatchPlan(sentences, pack(sentences.lengths, chosen), chosen, seed)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=60),
    st.integers(1, 4),
    st.sampled_from([64, 100, 400]),
)
def test_shapes_double_in_length_within_the_token_budget(
    lengths: list[tuple[int, int]], count: int, tokens: int
) -> None:
    kinds = np.array(lengths)
    shapes = choose_shapes(kinds, kinds.max(0), tokens, count, 2)
    assert 1 <= len(shapes) <= count
    assert (kinds <= shapes[-1][1:]).all()
    for shape in shapes:
        longer = max(shape.source, shape.target)
        assert shape.rows % 2 == 0
        assert shape.rows * longer <= tokens < (shape.rows + 2) * longer
        assert tokens < shape.rows * (longer + 8)
    for short, long in itertools.pairwise(shapes):
        assert 2 * max(short[1:]) <= max(long[1:]) < 4 * max(short[1:])
        assert 2 * long.rows <= short.rows


def test_shape_sides_follow_the_sentence_lengths() -> None:
    kinds = np.array([[10, 20]] * 50)
    (shape,) = choose_shapes(kinds, kinds.max(0), 4096, 4, 8)
    assert shape == Shape(48, 40, 80)


def test_rows_are_widened_to_the_budget() -> None:
    """Four sentences of 22 tokens need 88 positions. 16 rows of 88 use two thirds of the budget; 16 of 128 use all."""
    kinds = np.array([[20, 22]] * 50)
    (shape,) = choose_shapes(kinds, kinds.max(0), 2048, 4, 8)
    assert shape == Shape(16, 117, 128)


def test_rows_are_powers_of_two_on_request() -> None:
    kinds = np.array([[10, 20]] * 50 + [[130, 40]])
    shapes = choose_shapes(kinds, kinds.max(0), 4096, 4, 8, powers_of_two=True)
    assert shapes == [Shape(32, 128, 128), Shape(16, 256, 256)]
    with pytest.raises(UserError, match="8 rows of 256 tokens; raise it to 2048"):
        choose_shapes(kinds, kinds.max(0), 2047, 4, 8, powers_of_two=True)


@given(
    st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=60),
    st.integers(1, 4),
    st.sampled_from([64, 100, 400]),
)
def test_powers_of_two_double_within_the_token_budget(lengths: list[tuple[int, int]], count: int, tokens: int) -> None:
    kinds = np.array(lengths)
    shapes = choose_shapes(kinds, kinds.max(0), tokens, count, 2, powers_of_two=True)
    assert (kinds <= shapes[-1][1:]).all()
    assert len(shapes) <= count
    for shape in shapes:
        assert shape.source == shape.target == 1 << shape.source.bit_length() - 1
        assert 0 < shape.rows * shape.source <= tokens
    assert all(2 * short.source == long.source for short, long in itertools.pairwise(shapes))


def test_too_small_token_budgets_are_rejected() -> None:
    with pytest.raises(UserError, match="raise it to 160"):
        choose_shapes(np.array([[3, 3], [20, 4]]), np.array([20, 4]), 100, 2, 8)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 120), st.integers(1, 4))
def test_packing_places_every_pair_once(seed: int, count: int, shapes: int) -> None:
    lengths = text(seed, count).lengths
    chosen = choose_shapes(lengths, lengths.max(0), 64, shapes, 2)
    packing = pack(lengths, chosen)
    kinds = np.unique(lengths, axis=0)
    assert sorted(packing.order.tolist()) == list(range(count))
    np.testing.assert_array_equal(kinds[np.sort(packing.kinds)], lengths[packing.order])
    for row, shape in enumerate(packing.shape):
        inside = kinds[packing.kinds[packing.starts[row] : packing.starts[row + 1]]]
        assert len(inside)
        assert (inside.sum(0) <= chosen[shape][1:]).all()

    # Batches of long rows are complete as long as pairs remain.
    for index, shape in enumerate(chosen[1:], start=1):
        opened = (packing.shape == index).sum()
        assert opened % shape.rows == 0 or (packing.shape >= index).all()


@pytest.mark.parametrize("count", [5000, 50_000])
def test_at_least_96_percent_of_the_positions_are_filled(count: int) -> None:
    """Uses realistic (log-normal, correlated) lengths."""
    random = np.random.default_rng(0)
    source = np.exp(random.normal(2.7, 0.5, count))
    lengths = np.clip(np.stack([source, source * np.exp(random.normal(0.1, 0.2, count))], 1), 2, 100).astype(int)
    plan, (valid,) = make_plans(DataConfig(), Text(lengths), [Text(lengths[:50])], 2048, 0)
    assert plan.fill > 0.96
    assert plan.shapes is valid.shapes
    assert len(plan.shapes) <= DataConfig().batch_shapes


@settings(max_examples=20)
@given(st.integers(0, 50), st.integers(0, 5), st.integers(1, 5))
def test_every_sentence_occurs_once_per_epoch(seed: int, epoch: int, shapes: int) -> None:
    sentences = text(seed)
    plan = plan_of(sentences, 64, shapes, seed)
    seen: list[int] = []
    for step in range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch):
        shape, rows = plan.ids_at(step)
        batch = plan.batch_at(step)
        assert batch.shape == shape
        for row, ids in enumerate(rows):
            for side, tokens in zip(("source", "target"), batch, strict=True):
                expected = [token for index in ids for token in sentences.sentence(side, index)]
                assert tokens[row, : len(expected)].tolist() == expected
                assert not tokens[row, len(expected) :].any()
            seen += ids.tolist()
        assert not batch.source[len(rows) :].any()
    assert sorted(seen) == list(range(200))


def test_batches_depend_only_on_step_and_seed() -> None:
    sentences = text(0)
    forwards, backwards = plan_of(sentences, 64, 3, 7), plan_of(sentences, 64, 3, 7)
    steps = range(3 * forwards.batches_per_epoch)
    first = [forwards.digest_at(step) for step in steps]
    last = [backwards.digest_at(step) for step in reversed(steps)]
    assert first == last[::-1]
    assert first != [plan_of(sentences, 64, 3, 8).digest_at(step) for step in steps]
    for step in steps:
        for ours, theirs in zip(forwards.batch_at(step), backwards.batch_at(step), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    per_epoch = forwards.batches_per_epoch
    assert sorted(first[:per_epoch]) != sorted(first[per_epoch : 2 * per_epoch])


def test_reading_other_plans_in_between_shuffles_no_epoch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, *others = (plan_of(text(seed), 64, 3, 7) for seed in range(4))
    for each in (plan, *others):
        each.batch_at(0)
    epochs: list[int] = []

    def counted(items: np.ndarray, seed: int, epoch: int, *more: int) -> np.ndarray:
        epochs.append(epoch)
        return shuffled(items, seed, epoch, *more)

    monkeypatch.setattr(batches, "shuffled", counted)
    plan.batch_at(1)
    assert not epochs
    plan.batch_at(plan.batches_per_epoch)
    assert set(epochs) == {1}


def test_epochs_combine_different_sentences_in_a_row() -> None:
    plan = plan_of(Text(np.full((60, 2), 5)), 60, 1, 0)
    rows = [
        {frozenset(row.tolist()) for step in range(plan.batches_per_epoch) for row in plan.ids_at(first + step)[1]}
        for first in (0, plan.batches_per_epoch)
    ]
    assert len(rows[0]) == len(rows[1]) == 15
    assert not rows[0] & rows[1]


def test_shuffle_equals_splitmix64() -> None:
    """Compared with Python integers, because a change of the order would silently change resumed runs."""
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
    """Two rows of three pairs: a batch of 4 rows holds 15 + 15 tokens of 4 x (8 + 8)."""
    sentences = Text(np.array([[3, 2], [2, 3], [3, 3], [3, 3], [2, 2], [2, 2]]))
    shapes = [Shape(4, 8, 8)]
    plan = BatchPlan(sentences, pack(sentences.lengths, shapes), shapes, 0)
    assert plan.rows == [2]
    assert plan.batches_per_epoch == 1
    assert plan.fill == 30 / 64


def test_few_batches_have_equal_sizes() -> None:
    """10 rows in batches of up to 8 give two batches of 6 (a multiple of 2) instead of batches of 8 and 2."""
    sentences = Text(np.array([(10, 10)] * 40))
    plan, _ = make_plans(DataConfig(row_multiple=2), sentences, [sentences], 8 * 40, 0)
    assert plan.rows == [10]
    assert plan.shapes == [Shape(6, 40, 40)]


def test_validation_sees_each_sentence_once() -> None:
    train, valid = text(0), text(1, count=37, longest=25)
    plan, (valid_plan,) = make_plans(DataConfig(batch_shapes=3, row_multiple=2), train, [valid], 64, 0)
    assert plan.shapes is valid_plan.shapes
    words = [row[row > EOS] for batch in valid_plan.in_order() for row in batch.source]
    seen = sorted({int(word) for row in words for word in row})
    assert seen == [2 * index + 3 for index in range(37)]
    assert sum(map(len, words)) == (valid.lengths[:, 0] - 1).sum()


def test_single_puts_one_sentence_in_each_row() -> None:
    sentences = text(0)
    batch = BatchPlan(sentences, pack(sentences.lengths, [Shape(2, 20, 20)]), [Shape(2, 20, 20)], 0).single(3)
    assert batch.shape == (3, *sentences.lengths[:3].max(0))
    for index in range(3):
        assert [t for t in batch.source[index] if t] == sentences.sentence("source", index)
        assert [t for t in batch.target[index] if t] == sentences.sentence("target", index)


def test_prefetch_keeps_the_order_stops_early_and_raises_errors() -> None:
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

"""Packing several sentences into a row does not change their results."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchnorm_jax.data.batches import fill_rows
from branchnorm_jax.data.packing import Shape
from branchnorm_jax.model.segments import decoder_inputs, source_segments, target_segments
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.tokens import EOS
from branchnorm_jax.training.state import Batch
from branchnorm_jax.training.step import loss_sums
from tests.cases import quick_and_slow
from tests.data.test_batches import Text

SMALL = ModelConfig(encoder_layers=2, decoder_layers=2, width=16, ffn_width=32, heads=2, dropout=0.0)
LENGTHS = np.array([[3, 4], [6, 2], [2, 5], [4, 4], [2, 2], [5, 6]])
ALONE = [np.array([index]) for index in range(len(LENGTHS))]
TOGETHER = [np.array(row) for row in ([1, 0, 4], [3, 2], [5])]


def batch(rows: list[np.ndarray], shape: Shape) -> Batch:
    return Batch(*map(jnp.asarray, fill_rows(Text(LENGTHS), rows, shape)))


LEARNED: dict[str, Any] = dict(method="pre_ln", positions="learned", max_positions=6, embedding_norm=True)
"""There are as many positions as the longest sentence needs. Packed rows are longer."""

RELATIVE: dict[str, Any] = dict(method="pre_ln", positions="relative", relative_buckets=6, relative_distance=5)


@pytest.mark.parametrize(
    "options",
    quick_and_slow([dict(method="branchnorm"), LEARNED, RELATIVE, dict(method="dlcl_post")], [RELATIVE]),
)
def test_packing_does_not_change_loss_and_gradient(options: dict[str, Any]) -> None:
    model = Transformer(dataclasses.replace(SMALL, **options), 20, 20)
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape),
        model.init(jax.random.key(0)),
    )

    @jax.jit
    def loss(params: Any, batch: Batch) -> Any:
        return jax.value_and_grad(lambda p: loss_sums(model, p, batch, jnp.float32(0.7), 0.1)[0].loss)(params)

    alone, by_alone = loss(params, batch(ALONE, Shape(6, 8, 7)))
    together, by_together = loss(params, batch(TOGETHER, Shape(4, 12, 12)))
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(by_alone))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), by_together, by_alone)


def test_packing_does_not_change_the_logits() -> None:
    model = Transformer(SMALL, 20, 20)
    params = model.init(jax.random.key(0))
    packed, single = batch(TOGETHER, Shape(3, 12, 12)), batch(ALONE, Shape(6, 6, 6))

    @jax.jit
    def logits(batch: Batch) -> jax.Array:
        return model(params, batch.source, decoder_inputs(batch.target), jnp.float32(1.0))

    together, alone = np.asarray(logits(packed)), np.asarray(logits(single))
    for row, ids in enumerate(TOGETHER):
        start = 0
        for index in ids:
            length = LENGTHS[index, 1]
            np.testing.assert_allclose(together[row, start : start + length], alone[index, :length], atol=1e-5)
            start += length


@settings(max_examples=20)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_segment_ids_and_position_ids(lengths: list[int], left: int, right: int) -> None:
    """Compares segment ids and position ids with word-by-word counts; padding on either side does not count."""
    tokens = [token for length in lengths for token in [7] * (length - 1) + [EOS]]
    sentence = [n for n, length in enumerate(lengths, start=1) for _ in range(length)]
    position = [place for length in lengths for place in range(length)]
    source = source_segments(jnp.array([[0] * left + tokens + [0] * right]))
    inputs = target_segments(decoder_inputs(jnp.array([tokens + [0] * right])))
    for segments, begin in ((source, left), (inputs, 0)):
        real = slice(begin, begin + len(tokens))
        assert segments.ids[0, real].tolist() == sentence
        assert segments.positions[0, real].tolist() == position
    assert source.real[0].tolist() == [False] * left + [True] * len(tokens) + [False] * right

"""Sliding windows over a text, and the loss of every token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchnorm_jax.data.texts import TextStore
from branchnorm_jax.decoding.text import token_nll, windows
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DataConfig, ModelConfig
from branchnorm_jax.tokens import EOS

SIZES = dict[str, Any](encoder_layers=0, decoder_layers=2, width=8, ffn_width=12, heads=2, dropout=0.0)
MODEL = Transformer(ModelConfig(family="decoder", method="pre_ln", **SIZES), 12, 12)


def text(sizes: list[int]) -> TextStore:
    """Returns documents of random tokens, of one line each."""
    rng = np.random.default_rng(0)
    tokens = [EOS, *(token for size in sizes for token in [*rng.integers(3, 12, size - 1).tolist(), EOS])]
    ends = np.cumsum(sizes)
    ids, starts, line_bytes = np.array(tokens, np.uint16), np.array([0, *ends]), np.array(sizes) - 1
    return TextStore(ids, starts, ends, line_bytes, np.arange(len(sizes)), "", False)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 12), st.integers(1, 12))
def test_every_token_is_predicted_once_with_enough_context(sizes: list[int], context: int, stride: int) -> None:
    stride = min(stride, context)
    starts = np.cumsum([0, *sizes])
    chosen = windows(starts, context, stride)
    predicted = [place for first, end in zip(chosen.first, chosen.end, strict=True) for place in range(first, end)]
    assert predicted == list(range(starts[-1]))
    for begin, first, end in zip(*chosen, strict=True):
        start = starts[np.searchsorted(starts, begin, side="right") - 1]
        assert start <= begin <= first < end <= starts[np.searchsorted(starts, begin, side="right")]
        assert end - begin <= context
        assert begin == start or first - begin >= context - stride


@jax.jit
def log_softmax(params: Any, inputs: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(MODEL(params, inputs, inputs, jnp.float32(1))[0])


@pytest.mark.parametrize("rows", ["stream", "packed"])
@pytest.mark.parametrize(("context", "stride"), [(4, 4), (5, 2), (40, 7)])
def test_nll_is_that_of_each_window_alone(context: int, stride: int, rows: str) -> None:
    store, params = text([3, 21, 1, 9]), MODEL.init(jax.random.key(1))
    data = DataConfig(context=context, rows=rows)
    chosen = windows(store.starts, context, stride)
    found = token_nll(MODEL, params, jnp.float32(1), store.tokens, chosen, data, batch_tokens=64)
    expected = np.zeros(len(store.tokens) - 1)
    for begin, first, end in zip(*chosen, strict=True):
        row = np.pad(store.tokens[begin:end], (0, 40 - (end - begin))).astype(np.int32)
        row[0] = EOS if rows == "packed" else row[0]
        log_probs = np.asarray(log_softmax(params, jnp.asarray(row[None])))
        for place in range(first, end):
            expected[place] = -log_probs[place - begin, int(store.tokens[place + 1])]
    np.testing.assert_allclose(found, expected, atol=1e-5)

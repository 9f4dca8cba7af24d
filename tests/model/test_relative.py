"""Relative positions, and the other options of T5, in training and in decoding step by step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from branchnorm_jax.errors import UserError
from branchnorm_jax.model import relative
from branchnorm_jax.model.incremental import unstack_decoder
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.training.state import Batch
from branchnorm_jax.training.step import loss_sums
from tests.decoding.cached import cached_logits

T5 = ModelConfig(
    method="pre_ln",
    norm="rms_norm",
    encoder_layers=2,
    decoder_layers=3,
    width=16,
    ffn_width=24,
    heads=4,
    head_width=6,
    activation="geglu_tanh",
    biases=False,
    shared_embeddings="inputs",
    positions="relative",
    relative_buckets=8,
    relative_distance=12,
    decoder_start="pad",
)
BATCH = Batch(*jax.random.randint(jax.random.key(1), (2, 4, 16), 3, 30).at[:, :, -1].set(1).at[:, 1, 7].set(1))


def parameters(model: Transformer) -> Any:
    """Returns parameters for which relative positions matter."""
    draw = lambda leaf: leaf + 0.2 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)  # noqa: E731
    return jax.tree.map(draw, model.init(jax.random.key(0)))


@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (8, 20), (4, 3), (32, 17), (64, 1000)])
@pytest.mark.parametrize("both_sides", [True, False])
def test_buckets_are_those_of_transformers(count: int, farthest: int, both_sides: bool) -> None:
    offsets = np.arange(-1100, 1100)
    expected = T5Attention._relative_position_bucket(torch.tensor(offsets), both_sides, count, farthest)
    np.testing.assert_array_equal(relative.buckets(offsets, count, farthest, both_sides), expected)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_bias_depends_on_stack_head_and_distance(length: int) -> None:
    table = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)))
    offsets = np.arange(length) - np.arange(length)[:, None]
    for stack in ("encoder", "decoder"):
        index = relative.buckets(offsets, 8, 12, both_sides=stack == "encoder")
        expected = np.moveaxis(np.asarray(table)[index], -1, 0)[None]
        np.testing.assert_array_equal(relative.bias(T5, table, stack, length), expected)


def test_decoding_step_by_step_equals_teacher_forcing() -> None:
    model = Transformer(T5, 30, 30)
    params, now = parameters(model), jnp.float32(1)
    source, inputs = BATCH.source[2:], decoder_inputs(BATCH.target)[2:]  # one sentence in each row
    expected = jax.jit(model)(params, source, inputs, now)
    for given in (params, unstack_decoder(model, params)):
        cached = cached_logits(model, given, source, inputs, now, 2)
        np.testing.assert_allclose(cached, jnp.stack([expected] * 2, 1), atol=2e-5)


@pytest.mark.slow
def test_scan_equals_loop() -> None:
    """Loss and gradient with dropout; the gradient of a table is the sum over all layers."""
    config = dataclasses.replace(T5, attention_dropout=0.1, activation_dropout=0.1)
    params = parameters(Transformer(config, 30, 30))

    def results(unroll: int) -> Any:
        model = Transformer(dataclasses.replace(config, unroll=unroll), 30, 30)

        def loss(params: Any) -> jax.Array:
            return loss_sums(model, params, BATCH, jnp.float32(1), 0.1, key=jax.random.key(3))[0].loss

        return jax.jit(jax.value_and_grad(loss))(params)

    (scanned, by_scan), (looped, by_loop) = results(1), results(3)
    np.testing.assert_allclose(looped, scanned, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), by_loop, by_scan)
    for stack in ("encoder", "decoder"):
        assert np.abs(by_scan[relative.table_name(stack)]).max() > 1e-3


@pytest.mark.parametrize("positions", ["relative", "rotary"])
def test_the_first_input_of_the_decoder_has_a_gradient_while_alpha_is_0(positions: str) -> None:
    """It is the embedding of PAD alone; if that is 0, each norm multiplies its gradient by eps^-1/2, about 316."""

    def gradient_norm(start: str) -> float:
        config = ModelConfig(
            method="branchnorm",
            encoder_layers=1,
            decoder_layers=8,
            width=8,
            ffn_width=8,
            heads=2,
            positions=positions,
            decoder_start=start,
        )
        model = Transformer(config, 30, 30)
        loss = lambda params: loss_sums(model, params, BATCH, jnp.float32(0), 0.1)[0].loss  # noqa: E731
        return float(optax.tree.norm(jax.jit(jax.grad(loss))(model.init(jax.random.key(0)))))

    assert gradient_norm("pad") == pytest.approx(gradient_norm("eos"), rel=0.5)


def test_factors_after_the_heads_need_a_share_of_the_width_for_each_head() -> None:
    model = Transformer(dataclasses.replace(T5, method="normformer_fairseq", heads=3), 30, 30)
    with pytest.raises(UserError, match=r"needs model\.heads that divide model\.width=16"):
        model.abstract_params()


def test_kernels_are_used_only_without_a_bias() -> None:
    """The kernels add no bias, so only cross-attention uses them."""
    config = dataclasses.replace(T5, head_width=16)
    plain, fused = (Transformer(dataclasses.replace(config, kernels=name), 30, 30) for name in ("plain", "interpret"))
    params, inputs = parameters(plain), decoder_inputs(BATCH.target)
    expected, actual = (jax.jit(model)(params, BATCH.source, inputs, jnp.float32(1)) for model in (plain, fused))
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    text = str(jax.make_jaxpr(fused)(params, BATCH.source, inputs, jnp.float32(1)))
    assert text.count("pallas_call") == 1

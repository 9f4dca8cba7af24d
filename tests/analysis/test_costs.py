"""Compares traced costs with closed forms and with XLA's own analysis of the same programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from branchnorm_jax.analysis import costs
from branchnorm_jax.analysis.estimate import compiled_update_bytes, update_costs
from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.options import Config, DataConfig, ModelConfig, TrainConfig

N, D, L = 64, 32, 7
x = jax.ShapeDtypeStruct((N, D), jnp.float32)
w = jax.ShapeDtypeStruct((D, D), jnp.float32)
many = jax.ShapeDtypeStruct((L, D, D), jnp.float32)
X, W = 4 * N * D, 4 * D * D


def test_flops_of_matrix_products() -> None:
    assert costs.trace(lambda x, w: x @ w, x, w).flops == 2 * N * D * D
    batched = jax.ShapeDtypeStruct((3, N, D), jnp.float32)
    assert costs.trace(lambda a: jnp.einsum("bnd,bmd->bnm", a, a), batched).flops == 2 * 3 * N * N * D


def test_flops_of_a_pallas_kernel_are_those_of_all_its_programs() -> None:
    def kernel(x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jax.lax.fori_loop(0, 3, lambda _, y: y @ w_ref[...], x_ref[...])

    rows = pl.BlockSpec((16, D), lambda i: (i, 0))
    whole = pl.BlockSpec((D, D), lambda i: (0, 0))
    call = pl.pallas_call(kernel, x, grid=(N // 16,), in_specs=[rows, whole], out_specs=rows)
    found = costs.trace(call, x, w)
    assert found.flops == 3 * 2 * N * D * D
    assert found.traffic == 2 * X + W


def test_loop_costs_its_body_times_the_iterations() -> None:
    def stack(x: jax.Array, many: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, many)[0]

    once = costs.trace(lambda x, w: jax.nn.relu(x @ w), x, w)
    looped = costs.trace(stack, x, many)
    assert looped.flops == L * once.flops
    assert looped.traffic == L * once.traffic
    # Three products per layer: forward, gradient of x, and gradient of w.
    gradient = costs.trace(jax.grad(lambda m, x: stack(x, m).sum()), many, x)
    assert gradient.flops == 3 * looped.flops


def test_flops_equal_the_compilers_count() -> None:
    def products(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x @ w) @ (w @ w)

    counted: Any = jax.jit(products).lower(x, w).compile().cost_analysis()
    assert costs.trace(products, x, w).flops == counted["flops"]


def test_memory_of_elementwise_operations() -> None:
    # One fused kernel computes the result from x; intermediate values need no memory.
    assert costs.trace(lambda x: jnp.exp(jnp.tanh(2 * x) + 1), x).peak == X
    assert costs.trace(lambda x: jnp.exp(jnp.tanh(2 * x) + 1), x).traffic == 2 * X
    # The result overwrites a donated input.
    assert costs.trace(lambda x, y: x - y, x, x, donated=[0]).peak == X
    assert costs.trace(lambda x, y: x - y, x, x).peak == X
    # A matrix product reads its operand from memory and writes to another buffer.
    assert costs.trace(lambda x, w: jnp.tanh(x) @ w, x, w).peak == 2 * X


def test_unused_results_need_no_memory() -> None:
    def unread(x: jax.Array, many: jax.Array) -> jax.Array:
        def layer(carry: tuple[jax.Array, jax.Array], w: jax.Array) -> Any:
            x, other = carry
            return (x @ w, other @ w @ w), other @ w

        return jax.lax.scan(layer, (x, x), many)[0][0]

    def read(x: jax.Array, many: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, many)[0]

    assert costs.trace(unread, x, many).peak == costs.trace(read, x, many).peak


@pytest.mark.parametrize("wrap", [lambda layer: layer, jax.checkpoint], ids=["all", "full"])
def test_memory_of_a_scan_gradient_equals_the_compilers(wrap: Any) -> None:
    """For the gradient of 700 layers, the traced memory equals the memory that the compiler allocates."""
    deep = jax.ShapeDtypeStruct((700, D, D), jnp.float32)

    def loss(many: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(wrap(lambda x, w: (jnp.tanh(x @ w), None)), x, many)[0].sum()

    memory: Any = jax.jit(jax.grad(loss)).lower(deep, x).compile().memory_analysis()
    compiled = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert costs.trace(jax.grad(loss), deep, x).peak == pytest.approx(compiled, rel=1e-3)


@pytest.mark.parametrize(
    "remat", [pytest.param(remat, marks=[] if remat == "none" else pytest.mark.slow) for remat in REMAT]
)
def test_peak_memory_of_an_update_is_near_the_compilers(remat: str) -> None:
    """At 30L-30L, the peak memory is within 10% of the compiler's. benchmarks/plan.py compares more models."""
    model = ModelConfig(
        encoder_layers=30, decoder_layers=30, width=32, ffn_width=128, heads=2, dropout=0.1, remat=remat
    )
    config = Config(model=model, data=dataclasses.replace(DataConfig(), vocab_size=200), train=TrainConfig())
    assert update_costs(config, 32, 32).peak == pytest.approx(compiled_update_bytes(config, 32, 32), rel=0.1)

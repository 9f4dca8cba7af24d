"""Ways to run a stack: equality with a plain loop, memory stored for the backward pass, and group size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from branchnorm_jax.model.stack import REMAT, best_group, run_stack
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig, fields


def layer(x: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """A small residual layer [B, D] with a scalar output beside the stream."""
    matrix, gain = given
    hidden = checkpoint_name(jnp.tanh(x @ matrix), "branch")
    return x + gain * jnp.sin(hidden), gain * hidden.sum()


def stacked(depth: int, width: int = 4) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(depth)
    return jnp.asarray(rng.normal(size=(depth, width, width))), jnp.linspace(0.1, 1.0, depth)


def results(depth: int, **options: Any) -> tuple[Any, Any, Any]:
    """Returns the output, the outputs by layer, and the gradient of a scalar function of both."""

    def scalar(x: jax.Array, layers: Any) -> tuple[jax.Array, Any]:
        out, by_layer = run_stack(layer, x, layers, **options)
        return jnp.sin(out).sum() + (by_layer * jnp.arange(depth)).sum(), (out, by_layer)

    (_, outputs), gradient = jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True)(jnp.ones((3, 4)), stacked(depth))
    return *outputs, gradient


WAYS = [dict(depth=7, group=3, unroll=unroll, remat=remat) for unroll in (1, 7) for remat in REMAT]
WAYS += [dict(depth=6, group=2, unroll=2, remat=remat) for remat in REMAT]
WAYS += [dict(depth=depth, group=group, remat="nested") for depth, group in ((6, 0), (7, 50), (1, 0))]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_all_ways_equal_a_loop(way: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        x, outputs, layers = jnp.ones((3, 4)), [], stacked(way["depth"])
        for index in range(way["depth"]):
            x, output = layer(x, jax.tree.map(lambda leaf, index=index: leaf[index], layers))
            outputs.append(output)
        result, by_layer, gradient = results(**way)
        with jax.disable_jit():  # a scan is a Python loop there
            expected = results(way["depth"])[2]
    np.testing.assert_allclose(result, x, rtol=1e-12)
    np.testing.assert_allclose(by_layer, outputs, rtol=1e-12)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def stored_numbers(remat: str, depth: int = 64, group: int = 0) -> int:
    """Counts the numbers that the forward pass stores for the backward pass, without parameters."""
    x, layers = jnp.ones((3, 4)), stacked(depth)
    saved = jax.vjp(lambda x: run_stack(layer, x, layers, remat=remat, group=group)[0], x)[1]
    known = [id(leaf) for leaf in jax.tree.leaves(layers)]
    return sum(leaf.size for leaf in jax.tree.leaves(saved) if id(leaf) not in known and leaf.shape[-2:] == (3, 4))


def test_memory_stored_for_the_backward_pass() -> None:
    carry = 12
    assert stored_numbers("full") == 64 * carry
    assert stored_numbers("save_branches") == 2 * 64 * carry
    assert stored_numbers("none") >= 2 * 64 * carry
    assert stored_numbers("full", group=8) == 8 * carry
    assert stored_numbers("nested", group=8) == 8 * carry
    assert stored_numbers("nested", depth=67, group=8) == 9 * carry


DEPTH, CARRY = 16, 3 * 7 * 16


def stored_carries(method: str, remat: str) -> float:
    """Returns the memory that an encoder of 16 layers stores for its backward pass, in units of one carry.

    Parameters and masks are not included.
    """
    config = ModelConfig(
        method=method, encoder_layers=DEPTH, decoder_layers=1, width=16, ffn_width=32, heads=2, remat=remat,
        group=4 if remat == "nested" else 0,
    )  # fmt: skip
    model, source = Transformer(config, 30, 30), jnp.ones((3, 7), int)

    def residuals(params: Any) -> Any:
        return jax.vjp(lambda params: model.encode(params, source, jnp.ones(())), params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, model.abstract_params()))
    # The size of no parameter is a multiple of 3 x 7.
    return sum(leaf.size for leaf in leaves if leaf.dtype == jnp.float32 and leaf.size % CARRY == 0) / CARRY


@pytest.mark.parametrize("method", ["post_ln", "branchnorm", "residual_dual", "b2t", "dlcl", "dlcl_post"])
def test_memory_stored_by_transformer_layers(method: str) -> None:
    """The second carry of a dual stream is linear and not stored. DLCL stores what its norms need, but not all sums."""
    stored = {remat: stored_carries(method, remat) / DEPTH for remat in REMAT}
    assert 1 <= stored["full"] < (5.5 if method.startswith("dlcl") else 1.2)
    # Also stores q, k, v, the context and two branches.
    assert stored["full"] + 5 <= stored["save_branches"] <= stored["full"] + 6
    # Also stores the scores, the hidden layer (2 carries here) and the factors in each norm, but not the branches.
    assert stored["save_branches"] + 4 <= stored["none"] <= stored["save_branches"] + 5.5
    assert stored["nested"] == pytest.approx(stored["full"]) if method.startswith("dlcl") else stored["nested"] < 0.5


@given(depth=st.integers(1, 600), carry=st.floats(1, 1e9), layer=st.floats(1, 1e9))
def test_best_group_is_near_the_minimum_of_memory(depth: int, carry: float, layer: float) -> None:
    def needed(g: int) -> float:
        return depth / g * carry + g * (carry + 2 * layer)

    g = best_group(depth, carry, layer)
    assert 1 <= g <= depth
    # At 1.5 times its minimiser, x + 1/x is (1.5 + 1 / 1.5) / 2 times its minimum; rounding adds a little.
    assert needed(g) <= 1.1 * min(needed(other) for other in range(1, depth + 1))


def test_remat_option_lists_every_choice_and_typos_are_rejected() -> None:
    assert {*REMAT, "auto"} == set(dict(fields())["model.remat"].metadata["choices"])
    with pytest.raises(KeyError):
        results(2, remat="save_branch")


def test_best_group_divides_the_depth_if_possible() -> None:
    assert best_group(500, 1.0, 0.0) == 20
    assert best_group(36, 1.0, 0.0) == 6
    # A prime has no divisor near its square root.
    assert best_group(499, 1.0, 0.0) == 22

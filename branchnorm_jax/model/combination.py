"""Dynamic linear combination of layers (DLCL, Wang et al., 2019), with memory linear in depth.

    x_l = sum over k <= l of W[l,k] u_k,  u_0 = y_0 the embedding, u_k = LN_k(y_k) the output of layer k        (pre)
    x_l = LN_l(sum over k <= l of W[l,k] y_k),  x_0 without a norm                                            (post)

Layer l + 1 reads x_l, and the stack returns x_L. If every layer combined all earlier u_k, the backward pass would store
L^2 activations. Instead, each new output is added to a running sum A[m] for every later layer m that reads it. The sums
are linear in the outputs, so the backward pass does not store them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.model.declared import Declared, map_declared
from branchnorm_jax.model.linear import scaled
from branchnorm_jax.model.norms import apply_norm, declare_norm
from branchnorm_jax.model.streams import Stream


def declare_combination(layers: int, width: int, norm: str) -> dict[str, Any]:
    """Declares W [L+1, L+1] and L norms. Row l of W initially averages the l + 1 outputs so far."""

    def repeated(leaf: Declared) -> Declared:
        return leaf.replace_boxed(jnp.stack([leaf.value] * layers)).add_axis(0, {})

    rows = jnp.tri(layers + 1) / jnp.arange(1, layers + 2)[:, None]
    return {
        "weight": Declared(rows, ("layers", "layers")),
        "norm": map_declared(repeated, declare_norm(norm, width)),
    }


def combined(
    layer: Callable[[Stream, Any], tuple[Stream, Any]],
    params: dict[str, Any],
    start: Stream,
    per_layer: Any,
    *,
    norm: str,
    post: bool,
) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any, Any]:
    """Returns (layer, carry, per_layer) for `run_stack`, with layers that read combinations.

    The last carry of `run_stack` is a tuple that starts with the stream of x_L.

    Args:
      layer: (plain stream with x_l, per_layer_l) -> (plain stream with y_(l+1), output).
      params: the parameters that `declare_combination` declares.
      start: the carry of the first layer, with y_0 [B, T, D].
      per_layer: tree of [L, ...] leaves for `layer`.
      norm: kind of the norms.
      post: normalise after combining instead of before.
    """
    # Row l is read when columns 0 .. l have been added, so entries above the diagonal are never used.
    weight = params["weight"][..., None, None, None]

    def combine(carry: Any, inputs: Any) -> tuple[Any, Any]:
        stream, sums = carry
        index, column, norm_params, layer_inputs = inputs
        after, output = layer(stream, layer_inputs)
        y = after.x
        pushed = y if post else apply_norm(norm, norm_params, y).astype(y.dtype)
        sums = sums + scaled(pushed, column)
        x = jax.lax.dynamic_index_in_dim(sums, index, keepdims=False)
        return (after._replace(x=apply_norm(norm, norm_params, x).astype(x.dtype) if post else x), sums), output

    sums = scaled(start.x, weight[:, 0])
    layers = weight.shape[0] - 1
    inputs = (jnp.arange(1, layers + 1), weight[:, 1:].swapaxes(0, 1), params["norm"], per_layer)
    return combine, (start._replace(x=sums[0]), sums), inputs

"""Position-wise feed-forward sub-layer."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.model.declared import declared
from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.linear import Linear, linear, spread
from branchnorm_jax.model.norms import Norm
from branchnorm_jax.model.recipe import Recipe
from branchnorm_jax.model.taps import watched_rows
from branchnorm_jax.options import ModelConfig

GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""Gated activations -> the function of the gate."""


class FeedForward(nn.Module):
    """fc2(Dropout(act(fc1 x))); with a gated activation, fc2(Dropout(act(gate x) * fc1 x)) (Shazeer, 2020).

    Options of the recipe: a norm before fc2 (`Recipe.inner_norm`: Sub-LN, NormFormer), and learned scalars that are
    subtracted before and after the activation (`Recipe.shifts`: Fixup).
    """

    config: ModelConfig
    recipe: Recipe

    @nn.compact
    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        c = self.config

        def matrix(name: str) -> Linear:
            return linear(c, self.recipe, "ffn", name)

        def shifted(h: jax.Array, name: str) -> jax.Array:
            if not self.recipe.shifts:
                return h
            return h - spread(self.param(name, declared(nn.initializers.zeros), ()), h.shape, h.dtype)

        h_BTF = shifted(matrix("fc1")(x_BTD), "shift_in")
        if c.gated:
            h_BTF = h_BTF * GATES[c.activation](matrix("gate")(x_BTD))
        elif c.activation == "swish":
            h_BTF = jax.nn.silu(h_BTF)
        elif c.activation == "gelu":
            h_BTF = jax.nn.gelu(h_BTF, approximate=False)
        else:
            h_BTF = jax.nn.relu(h_BTF)
        if self.is_mutable_collection("watch"):
            self.sow("watch", "sparsity", (watched_rows(h_BTF) == 0).mean((1, 2), jnp.float32))
        h_BTF = dropout(h_BTF, c.activation_dropout, key)
        if "ffn" in self.recipe.inner_norm:
            h_BTF = Norm(c.norm, "ffn", name="inner_norm")(h_BTF)
        return matrix("fc2")(shifted(h_BTF, "shift_out"))

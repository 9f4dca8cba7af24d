"""Position-wise feed-forward sub-layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.linear import Linear
from branchnorm_jax.model.norms import Norm


class FeedForward(nn.Module):
    """fc2(Dropout(act(fc1 x))); with activation "swiglu", fc2(Dropout(silu(gate x) * fc1 x)) (Shazeer, 2020).

    Hooks of some methods: `inner_norm`, the kind of a norm before fc2 (Sub-LN, NormFormer); `shifts`, learned scalars
    subtracted before and after the activation (Fixup).
    """

    width: int
    ffn_width: int
    activation: str
    dropout: float
    init_base: str
    dtype: jnp.dtype
    biases: bool = True
    inner_norm: str = ""
    shifts: bool = False

    @nn.compact
    def __call__(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""

        def linear(features: int, role: str) -> Linear:
            return Linear(features, role, self.init_base, self.dtype, self.biases, name=role)

        def shifted(h: jax.Array, name: str) -> jax.Array:
            return h - self.param(name, nn.initializers.zeros, ()).astype(h.dtype) if self.shifts else h

        h_BTF = shifted(linear(self.ffn_width, "fc1")(x_BTD), "shift_in")
        if self.activation == "swiglu":
            h_BTF = h_BTF * jax.nn.silu(linear(self.ffn_width, "gate")(x_BTD))
        elif self.activation == "gelu":
            h_BTF = jax.nn.gelu(h_BTF, approximate=False)
        else:
            h_BTF = jax.nn.relu(h_BTF)
        if self.is_mutable_collection("watch"):
            self.sow("watch", "sparsity", (h_BTF == 0).mean((1, 2), jnp.float32))
        h_BTF = dropout(h_BTF, self.dropout, key)
        if self.inner_norm:
            h_BTF = Norm(self.inner_norm, name="inner_norm")(h_BTF)
        return linear(self.width, "fc2")(shifted(h_BTF, "shift_out"))

"""Normalisation layers. Statistics are float32 whatever the input's type."""

import flax.linen as nn
import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """LN(x) = (x - mean) / sqrt(var + epsilon) * scale + bias over the last axis, in float32 (Ba et al., 2016).

    The variance is the biased one, computed from the centred values: the one-pass form E[x^2] - E[x]^2 loses digits
    that a thousand layers would add up.
    """
    x = x.astype(jnp.float32)
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon) * scale + bias


class LayerNorm(nn.Module):
    """`layer_norm` with learned scale (1 at first) and bias (0 at first)."""

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D] float32."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return layer_norm(x, scale, bias, self.epsilon)

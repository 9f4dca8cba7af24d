"""Matrix products with float32 parameters, computed in the compute type."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.model.initializers import get_base


class Linear(nn.Module):
    """y = x W + b with W [d_in, d_out] and b [d_out], if `biases`, in float32, multiplied in `dtype`.

    `role` (q, k, v, o, fc1, ...) chooses the initialisers from the base named `init`.
    """

    features: int
    role: str
    init_base: str
    dtype: jnp.dtype
    biases: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., d_in] -> [..., d_out] in `dtype`."""
        d_in, d_out = x.shape[-1], self.features
        base = get_base(self.init_base)
        kernel = self.param("kernel", lambda key: base.kernel[self.role](key, (d_in, d_out), d_in, d_out))
        y = x.astype(self.dtype) @ kernel.astype(self.dtype)
        if not self.biases:
            return y
        bias = self.param("bias", lambda key: base.bias[self.role](key, (d_out,), d_in, d_out))
        return y + bias.astype(self.dtype)

"""Matrix products with float32 parameters, computed in the compute type."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.model.declared import declared
from branchnorm_jax.model.initializers import MATRICES, Initializer, get_base
from branchnorm_jax.model.recipe import Recipe, Rule
from branchnorm_jax.options import ModelConfig


@functools.partial(jax.checkpoint, prevent_cse=False)
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x W, [..., d_in] times [d_in, d_out], as a product of two matrices.

    If x kept its leading axes, XLA would transpose copies of x for the gradient of W on CPUs, a fifth of the update of
    a deep, narrow model. The backward pass stores x itself. Without `jax.checkpoint` each product would store a copy
    of x with another shape.
    """
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nn.Module):
    """y = x W + b with W [d_in, d_out] and b [d_out] in float32, multiplied in `dtype`.

    Attributes:
      features: d_out.
      axes: logical names of the axes of W.
      dtype: compute type.
      kernel_init: initialiser of W.
      bias_init: initialiser of b; None: there is no b.
      gain: rule that multiplies the initial W and b.
    """

    features: int
    axes: tuple[str, str]
    dtype: jnp.dtype
    kernel_init: Initializer
    bias_init: Initializer | None = None
    gain: Rule | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., d_in] -> [..., d_out] in `dtype`."""
        shape = x.shape[-1], self.features
        kernel = self.param("kernel", declared(self.kernel_init, *self.axes, gain=self.gain), shape, *shape)
        y = product(x.astype(self.dtype), kernel.astype(self.dtype))
        if self.bias_init is None:
            return y
        bias = self.param("bias", declared(self.bias_init, self.axes[1], gain=self.gain), shape[1:], *shape)
        return y + bias.astype(self.dtype)


def linear(config: ModelConfig, recipe: Recipe, sublayer: str, matrix: str) -> Linear:
    """The matrix of this name (see `MATRICES`) in a sub-layer, initialised as config and recipe say."""
    base = get_base(config.init or recipe.init)
    axes = MATRICES[matrix]
    return Linear(
        config.ffn_width if axes[1] == "ffn" else config.width,
        axes,
        jnp.dtype(config.dtype),
        base.kernel[matrix],
        base.bias[matrix] if recipe.biases else None,
        recipe.gain_of(sublayer, matrix),
        name=matrix,
    )

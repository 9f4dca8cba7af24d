"""Matrix products with float32 parameters, computed in the compute type."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.axes import gather, platform
from branchnorm_jax.model.declared import declared
from branchnorm_jax.model.initializers import MATRICES, Initializer, get_base
from branchnorm_jax.model.recipe import Recipe, Rule
from branchnorm_jax.options import ModelConfig


@functools.partial(jax.checkpoint, prevent_cse=False)
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes x W, [..., d_in] times [d_in, d_out], as a product of two matrices.

    With the leading axes of x, XLA on CPUs would transpose copies of x for the gradient of W, which takes a fifth of
    the update of a deep, narrow model. `jax.checkpoint` makes the backward pass store x itself. Without it, each
    product would store a reshaped copy of x.
    """
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nn.Module):
    """y = x W + b with W [d_in, d_out] and b [d_out] in float32, multiplied in `dtype`.

    Attributes:
      features: d_out.
      axes: logical names of the axes of W.
      dtype: compute type.
      kernel_init: initialiser of W.
      bias_init: initialiser of b; None means no bias.
      gain: rule for a factor on the initial W and b.
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
        y = product(x.astype(self.dtype), gather(kernel.astype(self.dtype), *self.axes))
        if self.bias_init is None:
            return y
        bias = self.param("bias", declared(self.bias_init, self.axes[1], gain=self.gain), shape[1:], *shape)
        bias = bias.astype(self.dtype)
        # On GPUs, XLA adds a bias in the kernel of the product, unless this kernel would also have to convert it.
        return y + (jax.lax.optimization_barrier(bias) if platform() == "gpu" else bias)


def linear(config: ModelConfig, recipe: Recipe, sublayer: str, matrix: str) -> Linear:
    """Creates a matrix of a sub-layer (see `MATRICES`), initialised according to config and recipe."""
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

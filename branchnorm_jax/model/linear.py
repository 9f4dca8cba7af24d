"""Matrix products with float32 parameters, computed in the compute type."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import linear_call

from branchnorm_jax.model.declared import declared
from branchnorm_jax.model.initializers import MATRICES, Initializer, get_base
from branchnorm_jax.model.recipe import Recipe, Rule
from branchnorm_jax.options import ModelConfig


@jax.custom_jvp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x W, [..., d_in] times [d_in, d_out].

    The gradient of W is given explicitly, as a product of two matrices [tokens, d_in]^T and [tokens, d_out]. JAX's own
    keeps the leading axes of x apart, and XLA then transposes copies on CPUs, a tenth of a deep model's update. A
    reshape in the forward pass would do the same, but each product would store a copy of x.
    """
    return x @ kernel


@product.defjvp
def _(primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x, kernel), (x_change, kernel_change) = primals, tangents

    def gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1]).T @ cotangent.reshape(-1, cotangent.shape[-1])

    return product(x, kernel), x_change @ kernel + linear_call(jnp.matmul, gradient, x, kernel_change)


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

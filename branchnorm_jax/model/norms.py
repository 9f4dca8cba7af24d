"""Normalisation layers. Statistics are computed in float32 for every input type, except that float64 stays float64."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.model.declared import Declared


def exact(x: jax.Array) -> jax.Array:
    """Returns x in float32; float64 stays float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """LN(x) = (x - mean) / sqrt(var + epsilon) * scale + bias over the last axis, in float32 (Ba et al., 2016).

    The variance is biased and computed from the centred values. The one-pass form E[x^2] - E[x]^2 is less precise, and
    its errors would add up over a thousand layers.

    >>> layer_norm(jnp.array([1.0, 7.0]), jnp.ones(2), jnp.zeros(2)).round(3).tolist()  # mean 4, standard deviation 3
    [-1.0, 1.0]
    """
    return standardise(exact(x), epsilon) * scale + bias


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def standardise(x: jax.Array, epsilon: float) -> jax.Array:
    """n = r (x - mean) with r = 1 / sqrt(var + epsilon), over the last axis.

    The derivative is n' = r (x' - mean(x') - n mean(n x')). It is given explicitly so that the backward pass stores n
    and r instead of three arrays of the size of x.
    """
    return _standardise(x, epsilon)[0]


@standardise.defjvp
def _(epsilon: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    n, r = _standardise(*primals, epsilon)
    (change,) = tangents
    centred = change - change.mean(-1, keepdims=True)
    return n, r * (centred - n * (n * change).mean(-1, keepdims=True))


def _standardise(x: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    centred = x - x.mean(-1, keepdims=True)
    r = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return centred * r, r


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis (Zhang and Sennrich, 2019).

    >>> rms_norm(jnp.array([4.0, 0.0, 0.0, 0.0]), jnp.ones(4)).round(3).tolist()  # sqrt(mean(x^2)) = 2
    [2.0, 0.0, 0.0, 0.0]
    """
    return rescale(exact(x), epsilon, 0.0) * scale


def scale_norm(x: jax.Array, scale: jax.Array | float | None = None, epsilon: float = 1e-5) -> jax.Array:
    """g x / max(|x|, epsilon), one scalar g per norm, sqrt(D) if not given (Nguyen and Salazar, 2019).

    >>> scale_norm(jnp.array([3.0, 4.0]), 10.0).tolist()  # |x| = 5
    [6.0, 8.0]
    """
    width = x.shape[-1]
    normalised = rescale(exact(x), 0.0, epsilon**2 / width)
    return normalised if scale is None else normalised * (scale * width**-0.5)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def rescale(x: jax.Array, epsilon: float, least: float) -> jax.Array:
    """n = r x with r = 1 / sqrt(max(mean(x^2) + epsilon, least)), over the last axis.

    The derivative is n' = r (x' - n mean(n x')), and r x' where r is limited by `least`. It is given explicitly because
    XLA for CPUs compiles the derivative of the formula badly: at width 64, an update then takes 1.5 times as long.
    """
    return _rescale(x, epsilon, least)[0]


@rescale.defjvp
def _(
    epsilon: float, least: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    n, r, free = _rescale(*primals, epsilon, least)
    (change,) = tangents
    return n, r * (change - n * jnp.where(free, (n * change).mean(-1, keepdims=True), 0.0))


def _rescale(x: jax.Array, epsilon: float, least: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    squares = jnp.square(x).mean(-1, keepdims=True) + epsilon
    r = jax.lax.rsqrt(jnp.maximum(squares, least))
    return x * r, r, squares > least


def dynamic_tanh(x: jax.Array, alpha: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float = 0.0) -> jax.Array:
    """tanh(alpha x) * scale + bias, without statistics (Zhu et al., 2025)."""
    return jnp.tanh(alpha * exact(x)) * scale + bias


def dynamic_erf(
    x: jax.Array, alpha: jax.Array, shift: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float = 0.0
) -> jax.Array:
    """erf(alpha x + shift) * scale + bias, without statistics: Derf (Chen et al., 2025, arXiv 2512.10938)."""
    return jax.lax.erf(alpha * exact(x) + shift) * scale + bias


def identity(x: jax.Array, epsilon: float = 0.0) -> jax.Array:
    """Returns x in float32."""
    return exact(x)


class Kind(NamedTuple):
    """A norm: its function, and its learned parameters as name -> (initial value, whether it is a vector [D]).

    An initial value of None means sqrt(D).
    """

    function: Callable[..., jax.Array]
    params: Mapping[str, tuple[float | None, bool]] = {}


_SCALE, _BIAS = (1.0, True), (0.0, True)
NORMS: dict[str, Kind] = {
    "layer_norm": Kind(layer_norm, {"scale": _SCALE, "bias": _BIAS}),
    "rms_norm": Kind(rms_norm, {"scale": _SCALE}),
    "scale_norm": Kind(scale_norm, {"scale": (None, False)}),
    "scale_norm_fixed": Kind(scale_norm),
    "dyt": Kind(dynamic_tanh, {"alpha": (0.5, False), "scale": _SCALE, "bias": _BIAS}),
    "derf": Kind(dynamic_erf, {"alpha": (0.5, False), "shift": (0.0, False), "scale": _SCALE, "bias": _BIAS}),
    "none": Kind(identity),
}


def final_kind(kind: str, stack: str) -> str:
    """Returns the kind of the norm after the last layer of `stack`.

    `scale_norm_fixed` learns a single g, in the norm after the decoder, where it is the g of FixNorm's logits (Nguyen
    and Salazar, 2019, equation 6, section 4.2 and Table 7). Methods without this norm, such as Post-LN, learn no g. The
    paper fixes g only in its Pre-LN experiments.
    """
    return "scale_norm" if (kind, stack) == ("scale_norm_fixed", "decoder") else kind


def declare_norm(kind: str, width: int, axis: str = "embed") -> dict[str, Declared]:
    """Declares the parameters of a norm over `width` features. `axis` is their logical axis name."""

    def declare(start: float | None, vector: bool) -> Declared:
        value = width**0.5 if start is None else start
        return Declared(jnp.full((width,) * vector, value, jnp.float32), (axis,) * vector)

    return {name: declare(*param) for name, param in NORMS[kind].params.items()}


def apply_norm(kind: str, params: Mapping[str, jax.Array], x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Applies a norm: [..., D] -> [..., D] float32."""
    return NORMS[kind].function(x, **params, epsilon=epsilon)


class Norm(nn.Module):
    """The norm of this `kind`, as a module; `axis` is the logical name of the features' axis."""

    kind: str
    axis: str = "embed"

    @nn.compact
    def parameters(self, width: int) -> dict[str, jax.Array]:
        """Returns the learned parameters of a norm over `width` features."""
        start: dict[str, Any] = declare_norm(self.kind, width, self.axis)
        return {name: self.param(name, lambda key, name=name: start[name]) for name in start}

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D] float32."""
        return apply_norm(self.kind, self.parameters(x.shape[-1]), x)

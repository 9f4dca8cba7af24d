"""Coefficients: the values of a, b, c and P in each layer, from a recipe, a depth and alpha.

    x' = P(a x + b G(F(c Q(x))))

Model and export both use these functions: the model in its own precision, the export in float64.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.model.recipe import ONE, STACKS, Depth, Recipe, Rule, Weight

Alpha = Mapping[str, jax.Array]
"""alpha_t by stack and layer: float32 [L] each."""

Array = TypeVar("Array", jax.Array, np.ndarray)


class Coefficients(NamedTuple):
    """The coefficients of a layer. For a whole stack, each has a leading axis L."""

    skip: jax.Array
    """a, unless it is learned: float32 []."""
    branch: jax.Array
    """b, unless it is learned: float32 []."""
    pre_scale: jax.Array
    """c: float32 []."""
    post: jax.Array
    """Whether the layer (`Recipe.post_layers`) or its first sub-layer (`post_first`) has P: bool []."""


def by_layer(rule: Rule, depth: Depth, stack: str) -> np.ndarray:
    """Evaluates a rule for the layers of a stack, float64 [L]."""
    return np.broadcast_to(np.asarray(getattr(rule(depth), stack), np.float64), (getattr(depth, stack),))


def uniform(value: float | jax.Array, depth: Depth) -> Alpha:
    """Returns the same alpha for all layers."""
    return {s: jnp.full(layers, value, jnp.float32) for s, layers in zip(STACKS, depth, strict=True) if layers}


def layer_alpha(alpha: Alpha | jax.Array, depth: Depth, stack: str) -> jax.Array:
    """Returns alpha of a stack's layers, [L]. The argument may also be one number for all layers."""
    own = alpha[stack] if isinstance(alpha, Mapping) else alpha
    return jnp.broadcast_to(jnp.asarray(own), (getattr(depth, stack),))


def resolve(
    recipe: Recipe, depth: Depth, stack: str, alpha: Alpha | jax.Array, dtype: Any = jnp.float32
) -> Coefficients:
    """Returns the coefficients of a stack's layers, [L] each in `dtype`.

    >>> from branchnorm_jax.model.methods import get_recipe
    >>> encoder = resolve(get_recipe("branchnorm"), Depth(3, 3), "encoder", alpha=jnp.array([0.0, 0.5, 1.0]))
    >>> encoder.skip.tolist(), encoder.branch.tolist()
    ([1.0, 1.0, 1.0], [0.0, 0.5, 1.0])
    """

    def numbers(rule: Rule) -> jax.Array:
        return jnp.asarray(by_layer(rule, depth, stack), dtype)

    alpha_L = layer_alpha(alpha, depth, stack)
    return Coefficients(
        skip=scheduled(recipe.skip, alpha_L, numbers),
        branch=scheduled(recipe.branch, alpha_L, numbers),
        pre_scale=numbers(recipe.pre_scale or ONE),
        post=numbers(recipe.post_layers or recipe.post_first or ONE) > 0,
    )


def scheduled(weight: Weight, alpha_L: Array, numbers: Callable[[Rule], Array]) -> Array:
    """Returns start + (end - start) alpha, [L]. `numbers` evaluates a rule for the layers."""
    start = numbers(weight.start)
    return start if weight.end is None else start + (numbers(weight.end) - start) * alpha_L


def learned_name(weight: Weight, which: str, sublayer: str) -> str:
    """Returns the name of the parameter of a ("skip") or b ("branch"); "" if it is not learned."""
    if not weight.learned or sublayer not in weight.on:
        return ""
    return which if weight.learned == "layer" else f"{sublayer}_{which}"


def sublayer_factors(
    recipe: Recipe, depth: Depth, stack: str, alpha: Any, params: Mapping[str, Any]
) -> Callable[[str], tuple[np.ndarray, np.ndarray]]:
    """Returns a function from a sub-layer to its a and b in every layer, float64 [L, 1] or [L, D] each.

    The values include learned ones.
    """
    layers = getattr(depth, stack)
    alpha_L = np.asarray(layer_alpha(alpha, depth, stack), np.float64)

    def factor(weight: Weight, which: str, sublayer: str) -> np.ndarray:
        if name := learned_name(weight, which, sublayer):
            return params[name].reshape(layers, -1)
        if sublayer not in weight.on:
            return np.ones((layers, 1))
        return scheduled(weight, alpha_L, lambda rule: by_layer(rule, depth, stack)).reshape(layers, 1)

    return lambda sublayer: (factor(recipe.skip, "skip", sublayer), factor(recipe.branch, "branch", sublayer))

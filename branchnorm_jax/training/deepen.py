"""Deepening: the layers of a trained model, and new layers between them that do nothing at first.

Old layer j of m becomes layer floor(j L / m) of L, counted from 0, and new layers follow it. Their branches begin with
alpha = 0:

    Pre-LN    x' = x + alpha F(LN(x)) = x
    Post-LN   x' = LN(x + alpha F(x)) = LN(x)

LN(x) is x only if x has mean 0, variance 1, and the norm has gain 1 and bias 0. So with Post-LN, gain and bias of an
old layer's last norm move to the last norm of the new layers that follow it. All norms in between have gain 1 and bias
0, and apply to values that are normalised already: they change them only by their epsilon, about 1e-5. This is not so
for the norms of `SATURATING`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.growth import old_layers
from branchnorm_jax.model.initializers import LAST_MATRIX
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.options import ModelConfig

METHODS = {
    "branchnorm": ("post_ln", "branchnorm", "prores_post_ln"),
    "prores_post_ln": ("post_ln", "branchnorm", "prores_post_ln"),
    "prores_pre_ln": ("pre_ln", "prores_pre_ln"),
}
"""Method of a deepened model -> methods of the models that it can be made of."""

SATURATING = ("dyt", "derf")
"""Norms that change values that they have normalised: tanh(tanh(x)) is not tanh(x)."""

LAST_NORM = "ffn_post_norm"
"""The norm that ends a Post-LN layer."""


def deepened(old: Params, alpha: Alpha, fresh: Params, config: ModelConfig) -> Params:
    """Returns the parameters of a deepened model, which computes the function of the old one while new alphas are 0.

    Args:
      old: parameters of the shallower model.
      alpha: its alpha, 1 in methods without one. Its branches are multiplied by it, because old layers have alpha = 1
        in the new model.
      fresh: initial parameters of the deeper model, for the new layers.
      config: options of the deeper model; `grown_from` is the depth of the old one.
    """
    params = dict(old)
    for stack in config.stacks:
        places = np.flatnonzero(old_layers(config, stack))
        scaled = _scaled(old[stack], jnp.asarray(alpha[stack]))
        params[stack] = jax.tree.map(lambda new, own, places=places: new.at[places].set(own), fresh[stack], scaled)
        if LAST_NORM in fresh[stack]:
            params[stack][LAST_NORM] = _moved(params[stack][LAST_NORM], fresh[stack][LAST_NORM], places)
    return params


def _scaled(layers: Any, alpha_L: jax.Array) -> Any:
    """Multiplies the branches by alpha."""
    scaled = dict(layers)
    for branch, last in LAST_MATRIX.items():
        if branch in layers:
            times = jax.tree.map(lambda leaf: leaf * alpha_L.reshape(-1, *(1,) * (leaf.ndim - 1)), layers[branch][last])
            scaled[branch] = layers[branch] | {last: times}
    return scaled


def _moved(norms: Any, neutral: Any, places: np.ndarray) -> Any:
    """Moves the norms at `places` to the last layer before the next place; `neutral` ones take their place."""
    (layers,) = {len(leaf) for leaf in jax.tree.leaves(norms)}
    ends = np.append(places[1:], layers) - 1
    return jax.tree.map(lambda leaf, none: none.at[ends].set(leaf[places]), norms, neutral)

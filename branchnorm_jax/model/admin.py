"""Admin's profiling pass: initial skip weights from the variances of an untrained network on one batch.

Understanding the Difficulty of Training Transformers (Liu et al., 2020). In each stack, with r_0 = 1, for sub-layer
k = 1, 2, ...:

    w_k = r_(k-1),  f = Dropout(F(x)),  r_k = sqrt(Var(w_k x) + Var(f)),  x <- LN(w_k x + f)

Var is the variance over all elements of the batch, padding included. Since Var(LN(...)) = 1,
w_k = sqrt(Var(x_0) + sum over j < k of Var(f_j)) for k > 1. The pass is one scan that carries x and r.
"""

import jax
import jax.numpy as jnp

from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.taps import Taps
from branchnorm_jax.model.transformer import Transformer


def profile(model: Transformer, params: Params, source_BS: jax.Array, target_BT: jax.Array, key: jax.Array) -> Params:
    """Sets the skip weights [L, D] of all stacks by a pass over one batch in training mode.

    Returns the changed parameters.

    Args:
      model: a model with learned skip weights.
      params: fresh parameters.
      source_BS: int [B, S].
      target_BT: int [B, T].
      key: random key of the dropout masks.
    """
    taps = Taps(record="profile")
    _, spreads = model.teacher_forced(params, source_BS, target_BT, jnp.ones(()), key, taps)

    def fill(weights: Params, found: dict[str, tuple[jax.Array, ...]]) -> Params:
        return weights | {
            name: jnp.broadcast_to(spread_L[:, None], weights[name].shape) for name, (spread_L,) in found.items()
        }

    return params | {stack: fill(params[stack], found) for stack, found in spreads.items()}

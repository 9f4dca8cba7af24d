"""The last layer: from the decoder's output to the logits of the vocabulary."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

UNUSED_NLL = 50.0
"""The nll of a token with probability 0, in nats. It is finite, so that mean losses stay finite."""


class Output(NamedTuple):
    """logits = x W^T + b in float32, -inf for unused tokens."""

    table_VD: jax.Array
    """W in float32; products are computed in the type of x."""
    bias_V: jax.Array | None
    """b in float32, if there is one."""
    used_V: jax.Array
    """False at unused tokens, bool [V]."""

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] float32."""
        logits = product("...d,vd->...v", x, self.table_VD.astype(x.dtype))
        logits = logits if self.bias_V is None else logits + self.bias_V
        return jnp.where(self.used_V, logits, -jnp.inf)

    def nll(self, logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (-log p(target), logsumexp(logits)) in nats, [...], for logits [..., V] and targets [...]."""
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.where(self.used_V[targets], normaliser - target, UNUSED_NLL), normaliser


def product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes an einsum with accumulation and result in at least float32."""
    return jnp.einsum(letters, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))

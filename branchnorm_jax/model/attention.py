"""Multi-head attention (Vaswani et al., 2017), for whole sequences and for one decoding step."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.linear import Linear

# Finite, so that a row whose keys are all padding gives a mean and not NaN.
MASKED = -1e9


def attend(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask_BTS: jax.Array,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Dropout(softmax(q k^T / sqrt(K))) v, scores and softmax in float32.

    Args:
      q_BTHK: queries; k_BSHK, v_BSHK: keys and values.
      mask_BTS: True where query t may see key s; axes of size 1 broadcast.
      rate: dropout of the probabilities.
      key: random key; None switches dropout off.

    Returns:
      [B, T, H, K] in the values' dtype.
    """
    q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=jnp.float32)
    scores_BHTS = jnp.where(mask_BTS[:, None], scores_BHTS, MASKED)
    probabilities_BHTS = dropout(jax.nn.softmax(scores_BHTS), rate, key).astype(v_BSHK.dtype)
    return jnp.einsum("bhts,bshk->bthk", probabilities_BHTS, v_BSHK)


class Attention(nn.Module):
    """Projections q, k, v, o [D, D] with biases around `attend`."""

    width: int
    heads: int
    dropout: float
    init_base: str
    dtype: jnp.dtype

    def setup(self) -> None:
        """Declares the four projections."""

        def linear(role: str) -> Linear:
            return Linear(self.width, role, self.init_base, self.dtype)

        self.q, self.k, self.v, self.o = linear("q"), linear("k"), linear("v"), linear("o")

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], self.heads, self.width // self.heads)

    def keys_values(self, memory_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a memory, [B, S, H, K] each: computed once per sentence when decoding."""
        return self._heads(self.k(memory_BSD)), self._heads(self.v(memory_BSD))

    def __call__(
        self,
        x_BTD: jax.Array,
        keys_values: tuple[jax.Array, jax.Array],
        mask_BTS: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Attends from x to given keys and values: [B, T, D] -> [B, T, D]."""
        out_BTHK = attend(self._heads(self.q(x_BTD)), *keys_values, mask_BTS, self.dropout, key)
        return self.o(out_BTHK.reshape(*x_BTD.shape))

"""Multi-head attention (*Attention Is All You Need*, Vaswani et al., 2017): whole sequences, and one decoding step."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from branchnorm_jax.axes import kernels
from branchnorm_jax.errors import UserError
from branchnorm_jax.model import fused_attention, fused_attention_tpu
from branchnorm_jax.model.declared import declared
from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.linear import Linear, joined, linear, scaled
from branchnorm_jax.model.norms import Norm
from branchnorm_jax.model.recipe import Recipe
from branchnorm_jax.model.relative import NO_RELATIVE, Relative, rotated
from branchnorm_jax.model.segments import MASKED
from branchnorm_jax.options import ModelConfig

KeysValues = tuple[jax.Array, jax.Array]
"""Keys and values, [B, S, H, K] each."""

Mix = Callable[[jax.Array], jax.Array]
"""A function of the values, [B, S, H, K] -> [B, S, H, K]."""


def attend(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask_BTS: jax.Array,
    rate: float = 0.0,
    key: jax.Array | None = None,
    bias_BHTS: jax.Array | None = None,
) -> jax.Array:
    """Dropout(softmax(q k^T / sqrt(K) + bias)) v, scores and softmax in float32.

    Args:
      q_BTHK: queries; k_BSHK, v_BSHK: keys and values.
      mask_BTS: True where query t attends to key s; axes of size 1 broadcast.
      rate: dropout rate of the attention weights.
      key: random key; None switches dropout off.
      bias_BHTS: float32, axes of size 1 broadcast; None means 0.

    Returns:
      [B, T, H, K] in the values' dtype.
    """
    return _weighted_sum(probabilities(q_BTHK, k_BSHK, mask_BTS, bias_BHTS), v_BSHK, key, rate)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(3,))
def _weighted_sum(probabilities_BHTS: jax.Array, v_BSHK: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    # `jax.checkpoint` makes the backward pass store the float32 weights alone, which that of the softmax needs as well.
    weights_BHTS = dropout(probabilities_BHTS, rate, key).astype(v_BSHK.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)


def probabilities(
    q_BTHK: jax.Array, k_BSHK: jax.Array, mask_BTS: jax.Array, bias_BHTS: jax.Array | None = None
) -> jax.Array:
    """Returns the attention weights of `attend` before dropout, float32 [B, H, T, S]."""
    q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    exact = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    scores_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK, preferred_element_type=exact)
    scores_BHTS = scores_BHTS if bias_BHTS is None else scores_BHTS + bias_BHTS
    return softmax(jnp.where(mask_BTS[:, None], scores_BHTS, MASKED))


@jax.custom_jvp
def softmax(scores: jax.Array) -> jax.Array:
    """Computes p = e^s / sum(e^s) over the last axis.

    The derivative is p' = p s' - p sum(p s'). It is given explicitly so that the backward pass stores only p. The
    derivative of `jax.nn.softmax` also stores e^s, unless `jax_softmax_custom_jvp` is set for the whole process.
    """
    return jax.nn.softmax(scores)


@softmax.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    p = softmax(*primals)
    change = p * tangents[0]
    return p, change - p * change.sum(-1, keepdims=True)


BITS = jnp.dtype(jnp.uint16)
"""The type of caches that hold bfloat16 numbers in a model with float32 products. XLA's compiler for CPUs would convert
a whole bfloat16 cache to float32 and back whenever a token is written; it copies integers as they are."""


def stored(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Converts numbers to the type of a cache."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), BITS) if dtype == BITS else x.astype(dtype)


def loaded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the numbers of a cache; `dtype` is their type if they are stored as `BITS`."""
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(dtype) if x.dtype == BITS else x


class KVCache(NamedTuple):
    """Keys and values in the layout of decoding: both matrix products of a step read them row by row."""

    k_BHKS: jax.Array
    v_BHSK: jax.Array


def attend_cached(
    q_BQHK: jax.Array,
    cached: KVCache,
    mask_BQS: jax.Array,
    own: tuple[jax.Array, jax.Array] | None = None,
    bias_BHQS: jax.Array | None = None,
) -> jax.Array:
    """Computes the attention of the Q hypotheses of a sentence to their shared keys and values.

    Args:
      q_BQHK: queries.
      cached: keys and values.
      mask_BQS: True where a hypothesis attends; axes of size 1 broadcast.
      own: the key and the value of each hypothesis's current token, [B, Q, H, K] each. No other hypothesis attends to
        them.
      bias_BHQS: added to the scores; float32, axes of size 1 broadcast. With `own`, it has one more column than there
        are slots, the last one, for the current tokens.

    Returns:
      [B, Q, H, K] in the values' dtype.
    """
    k_BHKS, v_BHSK = (loaded(each, q_BQHK.dtype) for each in cached)
    q_BQHK = q_BQHK * q_BQHK.shape[-1] ** -0.5
    exact = jnp.promote_types(q_BQHK.dtype, jnp.float32)
    scores_BHQS = jnp.einsum("bqhk,bhks->bhqs", q_BQHK, k_BHKS, preferred_element_type=exact)
    scores_BHQS = jnp.where(mask_BQS[:, None], scores_BHQS, MASKED)
    if own is not None:
        own_BHQ1 = jnp.einsum("bqhk,bqhk->bhq", q_BQHK, own[0], preferred_element_type=exact)[..., None]
        scores_BHQS = jnp.concatenate([scores_BHQS, own_BHQ1], axis=-1)
    if bias_BHQS is not None:
        scores_BHQS += bias_BHQS
    probabilities_BHQS = jax.nn.softmax(scores_BHQS).astype(v_BHSK.dtype)
    # For an output [B, Q, H, K], `einsum` would swap the operands, and XLA's product is then far slower on CPUs.
    out_BHQK = jnp.einsum("bhqs,bhsk->bhqk", probabilities_BHQS[..., : mask_BQS.shape[-1]], v_BHSK)
    out_BQHK = out_BHQK.swapaxes(1, 2)
    if own is not None:
        out_BQHK += probabilities_BHQS[..., -1].swapaxes(1, 2)[..., None] * own[1]
    return out_BQHK


class Attention(nn.Module):
    """Projections q, k, v [D, H K] and o [H K, D] around `attend`. The module's name is the sub-layer, self or cross.

    Options of the recipe: a norm before o (`Recipe.inner_norm`: Sub-LN), and a learned factor per head, which
    multiplies the head before o, or the head's share of the features after o (`Recipe.head_scale`: NormFormer).
    """

    config: ModelConfig
    recipe: Recipe

    def setup(self) -> None:
        """Declares the four projections and the parameters of the options."""
        config, recipe, sublayer = self.config, self.recipe, str(self.name)
        self.q, self.k, self.v, self.o = (linear(config, recipe, sublayer, matrix) for matrix in "qkvo")
        if sublayer in recipe.inner_norm:
            self.inner_norm = Norm(config.norm, "heads")
        if sublayer in recipe.head_scale:
            if recipe.head_scale_last and config.width % config.heads:
                raise UserError(
                    f"config: model.method={config.method} needs model.heads that divide model.width={config.width}"
                )
            self.head_scale = self.param("head_scale", declared(nn.initializers.ones, "heads"), (config.heads,))

    def _heads(self, x: jax.Array) -> jax.Array:
        """[..., H K] -> [..., H, K]."""
        return x.reshape(*x.shape[:-1], self.config.heads, -1)

    def keys_values(
        self, memory_BSD: jax.Array, rotation: jax.Array | None = None, mix: Mix | None = None
    ) -> KeysValues:
        """Returns keys and values of the encoder's output or, in self-attention, of x: [B, S, H, K] each.

        `rotation` is that of `Relative`, `mix` changes the values.
        """
        k, v = (checkpoint_name(linear(memory_BSD), "projection") for linear in (self.k, self.v))
        v_BSHK = self._heads(v)
        return rotated(self._heads(k), rotation), v_BSHK if mix is None else mix(v_BSHK)

    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array,
        mask_BTS: jax.Array,
        key: jax.Array | None = None,
        relative: Relative = NO_RELATIVE,
        mix: Mix | None = None,
    ) -> jax.Array:
        """Computes attention from x to the memory, which is x itself in self-attention: [B, T, D] -> [B, T, D].

        The fused kernels know nothing of relative positions and of `mix`, so with those they are not used.
        """
        rate, platform = self.config.attention_dropout, kernels(self.config.kernels)
        platform = platform if all(part is None for part in (*relative, mix)) else ""
        shapes = self._shapes(x_BTD, memory_BSD)
        if platform in ("gpu", "cpu") and fused_attention.supported(*shapes):
            q_k_v = self._joined(x_BTD, memory_BSD)
            return self._out(fused_attention.fused_attend(q_k_v, mask_BTS, rate, key, interpret=platform == "cpu"))
        q_BTHK = rotated(self._heads(checkpoint_name(self.q(x_BTD), "projection")), relative.rotation)
        keys_values = self.keys_values(memory_BSD, relative.rotation, mix)
        if platform == "tpu" and fused_attention_tpu.supported(*shapes):
            return self._out(fused_attention_tpu.fused_attend(q_BTHK, *keys_values, mask_BTS, rate, key))
        return self._out(attend(q_BTHK, *keys_values, mask_BTS, rate, key, relative.bias))

    def _shapes(self, x_BTD: jax.Array, memory_BSD: jax.Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns the shapes of the queries and of the keys."""
        c = self.config

        def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*x.shape[:2], c.heads, c.key_width), jnp.dtype(c.dtype))

        return shape(x_BTD), shape(memory_BSD)

    def _joined(self, x_BTD: jax.Array, memory_BSD: jax.Array) -> tuple[jax.Array, ...]:
        """Returns q, k and v of x in one array [B, T, 3, H, K]; if the memory is not x, k and v in a second one."""
        q_k_v = (self.q, self.k, self.v)
        parts = [(x_BTD, q_k_v)] if memory_BSD is x_BTD else [(x_BTD, q_k_v[:1]), (memory_BSD, q_k_v[1:])]

        def project(x: jax.Array, matrices: tuple[Linear, ...]) -> jax.Array:
            y = checkpoint_name(joined(x, matrices), "projection")
            return self._heads(y.reshape(*y.shape[:-1], len(matrices), -1))

        return tuple(project(*part) for part in parts)

    def probabilities(self, x_BTD: jax.Array, k_BSHK: jax.Array, mask_BTS: jax.Array) -> jax.Array:
        """Returns the attention weights, averaged over heads, float32 [B, T, S]."""
        return probabilities(self._heads(self.q(x_BTD)), k_BSHK, mask_BTS).mean(1)

    def decode(
        self,
        x_BQD: jax.Array,
        cached: KVCache,
        mask_BQS: jax.Array,
        own: tuple[jax.Array, jax.Array] | None = None,
        relative: Relative = NO_RELATIVE,
    ) -> jax.Array:
        """Runs one decoding step of Q hypotheses, see `attend_cached`: [B, Q, D] -> [B, Q, D]."""
        q_BQHK = rotated(self._heads(self.q(x_BQD)), relative.rotation)
        return self._out(attend_cached(q_BQHK, cached, mask_BQS, own, relative.bias))

    def _out(self, out_BTHK: jax.Array) -> jax.Array:
        """Applies the output projection: [B, T, H, K] -> [B, T, D]."""
        recipe = self.recipe
        has_scale = self.name in recipe.head_scale
        out_BTHK = checkpoint_name(out_BTHK, "context")
        if has_scale and not recipe.head_scale_last:
            out_BTHK = scaled(out_BTHK, self.head_scale[:, None])
        out_BTD = out_BTHK.reshape(*out_BTHK.shape[:-2], -1)
        out_BTD = self.o(self.inner_norm(out_BTD) if self.name in recipe.inner_norm else out_BTD)
        if has_scale and recipe.head_scale_last:
            out_BTD = scaled(self._heads(out_BTD), self.head_scale[:, None]).reshape(out_BTD.shape)
        return out_BTD

"""Encoder and decoder layers. One residual function serves all methods: it reads the recipe, never a name."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.config import ModelConfig
from branchnorm_jax.model.attention import Attention
from branchnorm_jax.model.dropout import Site, dropout, site_key
from branchnorm_jax.model.feedforward import FeedForward
from branchnorm_jax.model.methods import Recipe
from branchnorm_jax.model.norms import LayerNorm

KeysValues = tuple[jax.Array, jax.Array]
"""Keys and values, [B, S, H, K] each."""


class LayerInput(NamedTuple):
    """What differs between the layers of one stack; the stack scans over the leading axis L."""

    skip: jax.Array
    """a: float32 [] (in the stack [L])."""
    branch: jax.Array
    """b: float32 [] (in the stack [L])."""
    key: jax.Array | None
    """Dropout key [] (in the stack [L]); None switches dropout off."""


def make_attention(config: ModelConfig, init_base: str, name: str | None = None) -> Attention:
    """The attention sub-layer that a config asks for."""
    dtype = jnp.dtype(config.dtype)
    return Attention(config.width, config.heads, config.attention_dropout, init_base, dtype, name=name)


def make_feed_forward(config: ModelConfig, init_base: str) -> FeedForward:
    """The feed-forward sub-layer that a config asks for."""
    return FeedForward(
        config.width,
        config.ffn_width,
        config.activation,
        config.activation_dropout,
        init_base,
        jnp.dtype(config.dtype),
        name="ffn",
    )


class Block(nn.Module):
    """What encoder and decoder layers share: the residual algebra."""

    config: ModelConfig
    recipe: Recipe
    init_base: str

    def _residual(
        self, name: str, x: jax.Array, branch: Callable[[jax.Array], jax.Array], layer: LayerInput, site: Site
    ) -> jax.Array:
        """x' = P(a x + b Dropout(F(Q(x)))), summed in float32, returned in the type of the residual stream."""
        z = LayerNorm(name=f"{name}_pre_norm")(x) if self.recipe.pre else x
        h = dropout(branch(z), self.config.dropout, site_key(layer.key, site))
        y = layer.skip * x.astype(jnp.float32) + layer.branch * h.astype(jnp.float32)
        y = LayerNorm(name=f"{name}_post_norm")(y) if self.recipe.post else y
        return y.astype(self.config.carry_dtype)


class EncoderBlock(Block):
    """Self-attention, then feed-forward."""

    @nn.compact
    def __call__(self, x_BSD: jax.Array, layer: LayerInput, mask_BTS: jax.Array) -> jax.Array:
        """[B, S, D] -> [B, S, D]; mask_BTS [B, 1, S] is True at real tokens."""
        attention = make_attention(self.config, self.init_base, "self")
        feed_forward = make_feed_forward(self.config, self.init_base)

        def self_attention(z: jax.Array) -> jax.Array:
            key = site_key(layer.key, Site.SELF_PROBABILITIES)
            return attention(z, attention.keys_values(z), mask_BTS, key)

        x_BSD = self._residual("self", x_BSD, self_attention, layer, Site.SELF_BRANCH)
        ffn_key = site_key(layer.key, Site.FFN_ACTIVATION)
        return self._residual("ffn", x_BSD, lambda z: feed_forward(z, ffn_key), layer, Site.FFN_BRANCH)


class Cache(NamedTuple):
    """Keys and values of one decoder layer, read while decoding (in the stack with a leading axis L)."""

    self: KeysValues
    """Of the tokens so far, [B, T, H, K] each: T is the capacity, rows from the current position on are ignored."""
    cross: KeysValues
    """Of the source, [B', S, H, K] each, computed once per sentence: B is a multiple of B'."""


class DecoderBlock(Block):
    """Masked self-attention, cross-attention, feed-forward."""

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        layer: LayerInput,
        memory_BSD: jax.Array | None,
        self_mask: jax.Array,
        cross_mask: jax.Array,
        cache: Cache | None = None,
        position: jax.Array | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Whole targets (cache None) or one step.

        Args:
          x_BTD: targets so far, or [B, 1, D] of the current position.
          layer: this layer's coefficients and dropout key.
          memory_BSD: the encoder's output; None with a cache.
          self_mask: [B or 1, T or 1, T], True where a query may look.
          cross_mask: [B, 1, S], True at real source tokens.
          cache: this layer's `Cache`.
          position: index [] of the current token, with a cache.

        Returns:
          The layer's output, and the self-attention's keys and values of x for the caller's cache.
        """
        self_attention = make_attention(self.config, self.init_base, "self")
        cross_attention = make_attention(self.config, self.init_base, "cross")
        feed_forward = make_feed_forward(self.config, self.init_base)
        new: list[KeysValues] = []

        def attend_self(z: jax.Array) -> jax.Array:
            keys_values = self_attention.keys_values(z)
            new.append(keys_values)
            if cache is not None:
                assert position is not None
                keys_values = write_cache(cache.self, keys_values, position)
            return self_attention(z, keys_values, self_mask, site_key(layer.key, Site.SELF_PROBABILITIES))

        def attend_cross(z: jax.Array) -> jax.Array:
            if cache is not None:
                keys_values = cache.cross
            else:
                assert memory_BSD is not None
                keys_values = cross_attention.keys_values(memory_BSD)
            # Hypotheses of one sentence share its keys: to cross-attention they are queries of one row.
            queries = z.reshape(keys_values[0].shape[0], -1, z.shape[-1])
            key = site_key(layer.key, Site.CROSS_PROBABILITIES)
            return cross_attention(queries, keys_values, cross_mask, key).reshape(z.shape)

        x_BTD = self._residual("self", x_BTD, attend_self, layer, Site.SELF_BRANCH)
        x_BTD = self._residual("cross", x_BTD, attend_cross, layer, Site.CROSS_BRANCH)
        ffn_key = site_key(layer.key, Site.FFN_ACTIVATION)
        x_BTD = self._residual("ffn", x_BTD, lambda z: feed_forward(z, ffn_key), layer, Site.FFN_BRANCH)
        return x_BTD, new[0]


def write_cache(cached: KeysValues, new: KeysValues, position: jax.Array) -> KeysValues:
    """Writes the keys and values of one position, [..., 1, H, K], into caches [..., T, H, K]."""

    def write(cache: jax.Array, entry: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(cache, entry.astype(cache.dtype), position, axis=cache.ndim - 3)

    return write(cached[0], new[0]), write(cached[1], new[1])

"""What decoding keeps of the source and of the tokens so far."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from branchnorm_jax.model.attention import KeysValues, KVCache
from branchnorm_jax.options import ModelConfig


class Cache(NamedTuple):
    """Keys and values of one decoder layer, read while decoding (in the stack with a leading axis L)."""

    self: KVCache
    """Of the tokens so far, in as many slots as there is room for; masks say which of them are seen."""
    cross: KVCache
    """Of the source, computed once per sentence."""


Caches = Cache | list[Cache]
"""Of a decoder's stack, or of each of its layers where they are apart."""


def empty(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """Room for so many tokens of each sentence in each layer of the decoder's stack."""
    shape, size = (config.decoder_layers, rows, config.heads), config.width // config.heads
    return KVCache(jnp.zeros((*shape, size, slots), config.dtype), jnp.zeros((*shape, slots, size), config.dtype))


def to_cache(k_BSHK: jax.Array, v_BSHK: jax.Array) -> KVCache:
    """Keys and values of the source, as decoding reads them."""
    return KVCache(jnp.einsum("bshk->bhks", k_BSHK), jnp.einsum("bshk->bhsk", v_BSHK))


def write_tokens(caches: Caches, new: Any, slot: jax.Array) -> Caches:
    """Writes keys and values of Q tokens, [..., Q, H, K] each, into Q slots from `slot` on."""

    def write(cache: Cache, new: KeysValues) -> Cache:
        k, v = (jnp.moveaxis(entry, -3, -2).astype(cache.self.v_BHSK.dtype) for entry in new)
        k_BHKS = jax.lax.dynamic_update_slice_in_dim(cache.self.k_BHKS, k.swapaxes(-1, -2), slot, axis=k.ndim - 1)
        v_BHSK = jax.lax.dynamic_update_slice_in_dim(cache.self.v_BHSK, v, slot, axis=v.ndim - 2)
        return cache._replace(self=KVCache(k_BHKS, v_BHSK))

    return jax.tree.map(write, caches, new, is_leaf=lambda node: isinstance(node, Cache))


def write_sources(caches: Caches, new: Caches, rows: jax.Array) -> Caches:
    """Keys and values of the sources of `new` take these rows; a row number beyond the last is none."""

    def write(cache: Cache, new: Cache) -> Cache:
        put = functools.partial(jax.tree.map, lambda old, new: old.at[..., rows, :, :, :].set(new, mode="drop"))
        return cache._replace(cross=put(cache.cross, new.cross))

    return jax.tree.map(write, caches, new, is_leaf=lambda node: isinstance(node, Cache))


def take_slots(caches: Caches, slots: jax.Array) -> Caches:
    """The same tokens in other slots: slot i is the old slot slots[i]."""

    def take(cache: Cache) -> Cache:
        k_BHKS, v_BHSK = cache.self
        return cache._replace(self=KVCache(jnp.take(k_BHKS, slots, axis=-1), jnp.take(v_BHSK, slots, axis=-2)))

    return jax.tree.map(take, caches, is_leaf=lambda node: isinstance(node, Cache))

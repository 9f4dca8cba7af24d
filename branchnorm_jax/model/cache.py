"""The cache of incremental decoding: keys and values of the source and of the tokens so far."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from branchnorm_jax.axes import RULES
from branchnorm_jax.model.attention import KeysValues, KVCache, stored
from branchnorm_jax.options import ModelConfig


class Cache(NamedTuple):
    """The cached keys and values of a decoder layer. For the whole stack they have a leading axis L."""

    self: KVCache
    """Keys and values of the target tokens so far. Masks select the slots that a hypothesis attends to."""
    cross: KVCache | None
    """Keys and values of the source, computed once per sentence; None in a decoder-only model."""


Caches = Cache | list[Cache]
"""The stacked cache of a decoder, or a list with one cache per layer (see `incremental.unstack_decoder`)."""


def empty(config: ModelConfig, dtype: jnp.dtype, rows: int, slots: int) -> KVCache:
    """Returns an empty cache for all decoder layers, with `slots` slots for each of `rows` sentences."""
    shape, size = (config.decoder_layers, rows, config.heads), config.key_width
    return KVCache(jnp.zeros((*shape, size, slots), dtype), jnp.zeros((*shape, slots, size), dtype))


def to_cache(keys_values: KeysValues, dtype: jnp.dtype) -> KVCache:
    """Converts keys and values of the source to the layout of decoding."""
    k_BSHK, v_BSHK = keys_values
    return KVCache(stored(jnp.einsum("bshk->bhks", k_BSHK), dtype), stored(jnp.einsum("bshk->bhsk", v_BSHK), dtype))


def split_heads(mesh: Mesh | AbstractMesh, leaf: jax.Array) -> NamedSharding:
    """Returns the sharding of an array of a cache, [..., H, K, S] or [..., H, S, K].

    The devices divide the heads among them, as they divide those of the parameters, if they can.
    """
    axis = RULES["heads"]
    count = mesh.shape.get(axis, 1)
    split = count > 1 and leaf.shape[-3] % count == 0
    return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 3), axis) if split else PartitionSpec())


def write_tokens(caches: Caches, new: Any, slot: jax.Array) -> Caches:
    """Writes keys and values of Q tokens, [..., Q, H, K] each, into the Q slots that begin at `slot`."""

    def write(cache: Cache, new: KeysValues) -> Cache:
        k, v = (stored(jnp.moveaxis(entry, -3, -2), cache.self.v_BHSK.dtype) for entry in new)
        k_BHKS = jax.lax.dynamic_update_slice_in_dim(cache.self.k_BHKS, k.swapaxes(-1, -2), slot, axis=k.ndim - 1)
        v_BHSK = jax.lax.dynamic_update_slice_in_dim(cache.self.v_BHSK, v, slot, axis=v.ndim - 2)
        return cache._replace(self=KVCache(k_BHKS, v_BHSK))

    return jax.tree.map(write, caches, new, is_leaf=lambda node: isinstance(node, Cache))


def write_prompts(caches: Caches, new: Any, hypotheses: int) -> Caches:
    """Writes keys and values of P tokens, [..., P, H, K] each, into slots of the first hypothesis.

    These are the slots of the last P steps of the ring. The next step writes to the first slots. Each step has a slot
    for every one of the `hypotheses`.
    """

    def write(cache: Cache, new: KeysValues) -> Cache:
        k_BHKS, v_BHSK = cache.self
        k, v = (stored(jnp.moveaxis(entry, -3, -2), v_BHSK.dtype) for entry in new)
        slots = slice(v_BHSK.shape[-2] - hypotheses * v.shape[-2], None, hypotheses)
        k_BHKS = k_BHKS.at[..., slots].set(k.swapaxes(-1, -2))
        return cache._replace(self=KVCache(k_BHKS, v_BHSK.at[..., slots, :].set(v)))

    return jax.tree.map(write, caches, new, is_leaf=lambda node: isinstance(node, Cache))


def write_sources(caches: Caches, new: Caches, rows: jax.Array) -> Caches:
    """Writes the source keys and values of `new` into the given rows. Row numbers beyond the last are ignored."""

    def write(cache: Cache, new: Cache) -> Cache:
        put = functools.partial(jax.tree.map, lambda old, new: old.at[..., rows, :, :, :].set(new, mode="drop"))
        return cache._replace(cross=put(cache.cross, new.cross))

    return jax.tree.map(write, caches, new, is_leaf=lambda node: isinstance(node, Cache))


def take_slots(caches: Caches, slots: jax.Array) -> Caches:
    """Moves tokens to other slots: slot i gets the content of the old slot slots[i]."""

    def take(cache: Cache) -> Cache:
        k_BHKS, v_BHSK = cache.self
        return cache._replace(self=KVCache(jnp.take(k_BHKS, slots, axis=-1), jnp.take(v_BHSK, slots, axis=-2)))

    return jax.tree.map(take, caches, is_leaf=lambda node: isinstance(node, Cache))

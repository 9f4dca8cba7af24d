"""Positions inside self-attention: biases of the scores as in T5, and rotations of queries and keys.

Relative positions as in T5: self-attention adds a learned number for each head and distance to its scores.

    score_hts = q_t k_s / sqrt(K) + table[bucket(s - t), h]

All layers of a stack share the table [buckets, H] (*Exploring the Limits of Transfer Learning with a Unified
Text-to-Text Transformer*, Raffel et al., 2020). The distance of two tokens of a sentence is that of their places in the
row, so packed sentences need no biases of their own.

Rotary positions: pairs of features of q and k are rotated by angles that are proportional to the position p, so q_t k_s
depends on t - s (*RoFormer: Enhanced Transformer with Rotary Position Embedding*, Su et al., 2021). Feature j < K/2
makes a pair with feature j + K/2, as in GPT-NeoX and LLaMA, and its angle is p 10000^(-2j/K).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.axes import gather
from branchnorm_jax.model.declared import Declared
from branchnorm_jax.model.norms import exact
from branchnorm_jax.options import ModelConfig

AXES = ("embed", "heads")
"""Logical names of the axes of a table. The mesh splits the buckets like the model width."""


class Relative(NamedTuple):
    """What self-attention needs to know about positions; nothing if they are part of the embeddings."""

    bias: jax.Array | None = None
    """Added to the scores: float32 [1, H, T, S]."""
    rotation: jax.Array | None = None
    """Rows of `rotations` for q and k: float32 [B, T, K]; an axis of size 1 broadcasts."""


NO_RELATIVE = Relative()


def rotations(length: int, size: int) -> np.ndarray:
    """Returns the table of rotary positions, concat[cos(p f_j), sin(p f_j)] over j < size/2: float32 [length, size]."""
    frequencies = 10000 ** (-2 * np.arange(size // 2, dtype=np.float64) / size)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotated(x_BTHK: jax.Array, rotation_BTK: jax.Array | None) -> jax.Array:
    """Rotates the heads of queries or keys, computed in float32; None means no rotation.

    >>> quarter = jnp.array([[[0.0, 1.0]]])  # cos and sin of 90 degrees
    >>> rotated(jnp.array([[[[1.0, 0.0]]]]), quarter).round(6).tolist()
    [[[[-0.0, 1.0]]]]
    """
    if rotation_BTK is None:
        return x_BTHK
    cos, sin = jnp.split(rotation_BTK[:, :, None], 2, axis=-1)
    first, second = jnp.split(exact(x_BTHK), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTHK.dtype)


def table_name(stack: str) -> str:
    """Returns the name of the table of a stack in the parameter tree."""
    return f"{stack}_relative"


def declare_table(config: ModelConfig, key: jax.Array) -> Declared:
    """Declares a table, N(0, std = width^-1/2) as in T5's code."""
    table = config.width**-0.5 * jax.random.normal(key, (config.relative_buckets, config.heads), jnp.float32)
    return Declared(table, AXES)


def buckets(offsets: np.ndarray, count: int, farthest: int, both_sides: bool) -> np.ndarray:
    """Returns the bucket of each offset, int32.

    The first half of the buckets have one distance each. The others have ranges of distances, which grow
    exponentially up to `farthest`. The last one also has all larger distances.

    Args:
      offsets: place of the key minus place of the query, int32.
      count: number of buckets.
      farthest: the distance from which on all are in the same bucket.
      both_sides: in the encoder, keys after the query have the second half of the buckets, and all other keys the first
        half. In the decoder, keys after the query are masked, and their distance counts as 0.

    >>> buckets(np.array([-200, -5, -1, 0, 1, 5, 200]), 32, 128, both_sides=True).tolist()
    [15, 5, 1, 0, 17, 21, 31]
    """
    first = np.zeros_like(offsets)
    if both_sides:
        count //= 2
        first = np.where(offsets > 0, count, 0)
    distance = np.abs(offsets) if both_sides else np.maximum(-offsets, 0)
    exact = count // 2
    ratio = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact)) / np.log(farthest / exact)
    far = exact + (ratio * (count - exact)).astype(np.int32)
    return (first + np.where(distance < exact, distance, np.minimum(far, count - 1))).astype(np.int32)


def bias(config: ModelConfig, table: jax.Array, stack: str, length: int) -> jax.Array:
    """Returns what is added to the scores of whole sentences, float32 [1, H, T, T]."""
    values_HR = _values(config, table, stack, np.arange(1 - length, length)).T
    # Row t is the row before it, shifted by one: repeat R + 1 numbers, and cut the result into rows of R. The gradient
    # of a gather would instead be a sum over T^2 indices, one after another.
    periods = jnp.tile(jnp.pad(values_HR, ((0, 0), (0, 1))), (1, length))
    rows = periods[:, : length * values_HR.shape[1]].reshape(len(values_HR), length, -1)
    return rows[None, :, :, length - 1 :]


def cached_bias(config: ModelConfig, table: jax.Array, slots: int, written: int, slot: jax.Array) -> jax.Array:
    """Returns what is added to the scores of a decoding step, float32 [1, H, 1, N + 1]; the last is the own token's.

    Args:
      config: options.
      table: the decoder's table.
      slots: N. The slots are a ring.
      written: slots that each step writes, a divisor of N.
      slot: the first slot that this step writes.
    """
    steps = slots // written
    values_RH = _values(config, table, "decoder", -np.arange(steps))
    distances_N = (slot // written - jnp.arange(slots) // written) % steps
    return jnp.concatenate([values_RH[distances_N], values_RH[:1]]).T[None, :, None]


def _values(config: ModelConfig, table: jax.Array, stack: str, offsets: np.ndarray) -> jax.Array:
    """Returns the entries of the table for the offsets, [offsets, H]."""
    index = buckets(offsets, config.relative_buckets, config.relative_distance, stack == "encoder")
    return gather(table, *AXES)[index]

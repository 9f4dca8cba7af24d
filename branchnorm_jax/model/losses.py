"""Training losses, as sums over tokens, without storing the logits of a whole batch."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.axes import platform
from branchnorm_jax.model.output import Output, product


class LossSums(NamedTuple):
    """Sums over real target tokens, float32 []. `loss` and `nll` divided by `tokens` are means in nats."""

    loss: jax.Array
    nll: jax.Array
    tokens: jax.Array


class Blocks(NamedTuple):
    """How the logits of a batch are divided into blocks."""

    block_bytes: int = 2**27
    """Maximum size of the logits that a device holds at once, but at least one position."""
    shards: int = 1
    """Number of devices that share the rows."""


def smoothed_cross_entropy(
    x_BTD: jax.Array,
    output: Output,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    smoothing: float,
    blocks: Blocks = Blocks(),
) -> LossSums:
    """Label-smoothed cross-entropy in fairseq's form (since 2021).

    The cross-entropy against q(target) = 1 - eps and q(any other word) = s = eps / (V - 1), with logits z:

        loss = logsumexp(z) - (1 - eps - s) z_target - s sum_v z_v

    The last sum is one product, x (sum_v W_v). The other terms need logits, which each device computes for its own
    rows, in blocks of positions. The gradient with respect to z is softmax(z) - q. It is known as soon as the logits of
    the block are, so the forward pass already multiplies it by W and by x. Logits are computed once and never stored.

    Args:
      x_BTD: the decoder's output, in the compute type.
      output: the last layer, from x to logits.
      targets_BT: int [B, T], the tokens to predict.
      weights_BT: [B, T], 1 at real tokens and 0 at padding.
      smoothing: eps.
      blocks: size of the blocks.

    Returns:
      The sums. Only `loss` has a gradient, with respect to x and `output`.
    """
    weights_BT = jax.lax.stop_gradient(weights_BT.astype(jnp.promote_types(x_BTD.dtype, jnp.float32)))
    loss, nll = _sums(smoothing, blocks, x_BTD, output, targets_BT, weights_BT)
    return LossSums(loss, jax.lax.stop_gradient(nll), weights_BT.sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(
    smoothing: float, blocks: Blocks, x: jax.Array, output: Output, targets: jax.Array, weights: jax.Array
) -> Any:
    split, _ = _cut(blocks, output, x)
    all_words = _all_words(output)

    def shard(parts: tuple[jax.Array, ...]) -> jax.Array:
        return jax.lax.map(lambda part: _terms(smoothing, output, all_words, *part)[0], parts).sum(0)

    return tuple(_each_shard(blocks, shard, tuple(map(split, (x, targets, weights)))).sum(0))


def _forward(
    smoothing: float, blocks: Blocks, x: jax.Array, output: Output, targets: jax.Array, weights: jax.Array
) -> Any:
    split, join = _cut(blocks, output, x)
    parts = tuple(map(split, (x, targets, weights)))
    all_words = _all_words(output)
    slice_width = _slice_width(blocks, output, number=parts[0].shape[1])

    def block(gradient: tuple[jax.Array, jax.Array | None], part: tuple[jax.Array, ...]) -> Any:
        by_table, by_bias = gradient
        x = part[0]
        sums, by_logits = _terms(smoothing, output, all_words, *part)
        rough = by_logits.astype(x.dtype)

        def add(index: jax.Array, by_table: jax.Array) -> jax.Array:
            at = index * slice_width
            more = product("nv,nd->vd", rough, jax.lax.dynamic_slice_in_dim(x, at, slice_width, 1))
            so_far = jax.lax.dynamic_slice_in_dim(by_table, at, slice_width, 1)
            return jax.lax.dynamic_update_slice_in_dim(by_table, so_far + more, at, 1)

        by_table = jax.lax.fori_loop(0, x.shape[-1] // slice_width, add, by_table)
        by_bias = None if by_bias is None else by_bias + by_logits.sum(0)
        by_x = product("nv,vd->nd", rough, output.table_VD.astype(x.dtype)).astype(x.dtype)
        return (by_table, by_bias), (sums, by_x)

    def shard(parts: tuple[jax.Array, ...]) -> Any:
        start = jax.tree.map(jnp.zeros_like, (output.table_VD, output.bias_V))
        by_output, (sums, by_x) = jax.lax.scan(block, start, parts)
        return by_output, sums.sum(0), by_x

    by_output, sums, by_x = _each_shard(blocks, shard, parts)
    # Each shard has added up its own blocks, so devices communicate only once, here.
    by_output, sums = jax.tree.map(lambda total: total.sum(0), (by_output, sums))
    return tuple(sums), (join(by_x), *by_output, output.used_V, targets, weights)


def _backward(smoothing: float, blocks: Blocks, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    by_x, by_table, by_bias, used, targets, weights = kept
    by_x, by_table, by_bias = jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), (by_x, by_table, by_bias))
    no_used, no_targets = (np.zeros(array.shape, jax.dtypes.float0) for array in (used, targets))
    return by_x, Output(by_table, by_bias, cast(Any, no_used)), no_targets, jnp.zeros_like(weights)


_sums.defvjp(_forward, _backward)


def _terms(
    smoothing: float,
    output: Output,
    all_words: tuple[jax.Array, jax.Array, jax.Array],
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums [loss, nll] of n positions, [2], and the loss gradient of their logits, [n, V]."""
    table_D, bias, words = all_words
    share = smoothing / jnp.maximum(words - 1, 1)
    certain = 1 - smoothing - share
    # Rounded, so that memory holds the narrow type; all further arithmetic is float32.
    logits = output.logits(x).astype(_logits_dtype(x)).astype(weights.dtype)
    nll, normaliser = output.nll(logits, targets)
    sum_of_logits = x.astype(table_D.dtype) @ table_D + bias
    loss = normaliser - certain * (normaliser - nll) - share * sum_of_logits
    # Where the target token is unused, z_target is the normaliser minus a constant.
    mass = jnp.where(output.used_V[targets], 1.0, 1 - certain)[..., None]
    smoothed = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], certain, 0.0) + share
    by_logits = mass * jnp.exp(logits - normaliser[..., None]) - jnp.where(output.used_V, smoothed, 0.0)
    return jnp.stack([(weights * loss).sum(), (weights * nll).sum()]), weights[..., None] * by_logits


def _all_words(output: Output) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the sum of W, [D], and of b, [], over all used tokens, and the number of these tokens, []."""
    used = output.used_V.astype(output.table_VD.dtype)
    bias = jnp.zeros(()) if output.bias_V is None else used @ output.bias_V
    return used @ output.table_VD, bias, used.sum()


def _slice_width(blocks: Blocks, output: Output, number: int) -> int:
    """Returns the number of columns of W for which the gradient is computed at once.

    These are all columns if there is one block, and otherwise as many as need a quarter of a block's memory.
    """
    words, width = output.table_VD.shape
    fits = max(1, blocks.block_bytes // (16 * words)) if number > 1 else width
    return max(n for n in range(1, width + 1) if width % n == 0 and n <= fits)


def _each_shard(blocks: Blocks, function: Callable[[Any], Any], parts: Any) -> Any:
    """Applies `function` to each shard's part of arrays [shards, ...] and stacks the results.

    With a single shard the axis is removed first, so that XLA accumulates its gradient in place.
    """
    if blocks.shards > 1:
        return jax.vmap(function)(parts)
    return jax.tree.map(lambda array: array[None], function(jax.tree.map(lambda array: array[0], parts)))


def _cut(
    blocks: Blocks, output: Output, x: jax.Array
) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Returns two functions: [B, T, ...] -> [shards, blocks, n, ...], padded with zeros, and its inverse.

    A block holds n consecutive positions of a shard's rows.
    """
    rows, length = x.shape[:2]
    shards = blocks.shards
    positions = rows // shards * length
    at_once = max(1, blocks.block_bytes // (_logits_dtype(x).itemsize * output.table_VD.shape[0]))
    count = math.ceil(positions / at_once)
    size = math.ceil(positions / count)

    def split(array: jax.Array) -> jax.Array:
        flat = array.reshape(shards, positions, *array.shape[2:])
        filled = jnp.pad(flat, ((0, 0), (0, count * size - positions), *((0, 0),) * (array.ndim - 2)))
        return filled.reshape(shards, count, size, *array.shape[2:])

    def join(parts: jax.Array) -> jax.Array:
        flat = parts.reshape(shards, count * size, *parts.shape[3:])[:, :positions]
        return flat.reshape(rows, length, *parts.shape[3:])

    return split, join


def _logits_dtype(x: jax.Array) -> jnp.dtype:
    """Returns the type in which the logits of training are in memory.

    For products in bfloat16 it is float16, which has three bits more. Its rounding changes a logit of 10 by 0.002 (root
    mean square); the rounding of the products' operands, of width 512, changes it by 0.003. Logits beyond 65,504 become
    infinite.
    TPUs convert float16 by many integer operations, so there it is float32.
    """
    if x.dtype.itemsize > 2 or platform() == "tpu":
        return jnp.promote_types(x.dtype, jnp.float32)
    return jnp.dtype(jnp.float16)

"""Training losses, as sums that add up across batches and hosts, never holding the logits of a whole batch."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

UNUSED_NLL = 50.0
"""What a word costs that gets no probability, nats: dear, but finite."""


class LossSums(NamedTuple):
    """Sums over real target tokens, float32 []: divide by `tokens` for means in nats."""

    loss: jax.Array
    nll: jax.Array
    tokens: jax.Array


class Output(NamedTuple):
    """The last layer: logits = x W^T + b in float32, -inf for words that are not used."""

    table_VD: jax.Array
    """W in float32, multiplied in the type of x."""
    bias_V: jax.Array | None
    """b in float32, if there is one."""
    used_V: jax.Array
    """bool."""

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] float32."""
        logits = _product("...d,vd->...v", x, self.table_VD.astype(x.dtype))
        logits = logits if self.bias_V is None else logits + self.bias_V
        return jnp.where(self.used_V, logits, -jnp.inf)


def smoothed_cross_entropy(
    x_BTD: jax.Array,
    output: Output,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    smoothing: float,
    block_bytes: int = 2**25,
) -> LossSums:
    """Label-smoothed cross-entropy in fairseq's form (since 2021), of which `loss` alone has a gradient.

    The cross-entropy against q(target) = 1 - eps and q(any other word) = s = eps / (V - 1), with logits z:

        loss = logsumexp(z) - (1 - eps - s) z_target - s sum_v z_v

    The last sum is one product, x (sum_v W_v). For the rest, logits are made in blocks, along T since no mesh splits
    that axis. The gradient by z, softmax(z) - q, is known as soon as a block is: so the forward pass of a gradient
    multiplies it by W and by x at once, and no logits are kept or made twice.

    Args:
      x_BTD: the decoder's output, in the type of the matrix products.
      output: from x to logits.
      targets_BT: int [B, T], the words to predict.
      weights_BT: [B, T], 1 at real tokens and 0 at padding.
      smoothing: eps.
      block_bytes: of the float32 logits that are held at once; at least those of one position of every row are.
    """
    weights_BT = weights_BT.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    loss, nll = _sums(smoothing, block_bytes, x_BTD, output, targets_BT, weights_BT)
    return LossSums(loss, nll, weights_BT.sum())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(
    smoothing: float, block_bytes: int, x: jax.Array, output: Output, targets: jax.Array, weights: jax.Array
) -> Any:
    split, _ = _blocks(block_bytes, output, x)
    all_words = _all_words(output)

    def block(part: tuple[jax.Array, ...]) -> jax.Array:
        return _terms(smoothing, output, all_words, *_flatten(part))[0]

    loss, nll = jax.lax.map(block, tuple(map(split, (x, targets, weights)))).sum(0)
    return loss, nll


def _forward(
    smoothing: float, block_bytes: int, x: jax.Array, output: Output, targets: jax.Array, weights: jax.Array
) -> Any:
    split, join = _blocks(block_bytes, output, x)
    parts = tuple(map(split, (x, targets, weights)))
    all_words = _all_words(output)
    # Slices of W's gradient: its sum over several blocks then needs no second array of its size.
    slices = math.gcd(x.shape[-1], 8) if len(parts[0]) > 1 else 1
    slice_width = x.shape[-1] // slices

    def block(gradient: tuple[jax.Array, jax.Array | None], part: tuple[jax.Array, ...]) -> Any:
        by_table, by_bias = gradient
        x, *labels = _flatten(part)
        sums, by_logits = _terms(smoothing, output, all_words, x, *labels)
        rough = by_logits.astype(x.dtype)

        def add(index: jax.Array, by_table: jax.Array) -> jax.Array:
            at = index * slice_width
            more = _product("nv,nd->vd", rough, jax.lax.dynamic_slice_in_dim(x, at, slice_width, 1))
            so_far = jax.lax.dynamic_slice_in_dim(by_table, at, slice_width, 1)
            return jax.lax.dynamic_update_slice_in_dim(by_table, so_far + more, at, 1)

        by_table = jax.lax.fori_loop(0, slices, add, by_table)
        by_x = _product("nv,vd->nd", rough, output.table_VD.astype(x.dtype)).astype(x.dtype)
        by_bias = jax.tree.map(lambda total: total + by_logits.sum(0), by_bias)
        return (by_table, by_bias), (sums, by_x.reshape(part[0].shape))

    start = jax.tree.map(jnp.zeros_like, (output.table_VD, output.bias_V))
    by_output, (sums, by_x) = jax.lax.scan(block, start, parts)
    return tuple(sums.sum(0)), (join(by_x), *by_output, output.used_V, targets, weights)


def _backward(smoothing: float, block_bytes: int, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    by_x, by_table, by_bias, used, targets, weights = kept
    by_x, by_table, by_bias = jax.tree.map(lambda g: (cotangents[0] * g).astype(g.dtype), (by_x, by_table, by_bias))
    no_used, no_targets = (np.zeros(array.shape, jax.dtypes.float0) for array in (used, targets))
    return by_x, Output(by_table, by_bias, cast(Any, no_used)), no_targets, jnp.zeros_like(weights)


_sums.defvjp(_forward, _backward)


def _terms(
    smoothing: float,
    output: Output,
    all_words: tuple[jax.Array, ...],
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Of one block of n positions: the sums [loss, nll] [2], and the gradient of the loss by the logits [n, V]."""
    table_D, bias, words = all_words
    share = smoothing / jnp.maximum(words - 1, 1)
    certain = 1 - smoothing - share
    logits = output.logits(x)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = jnp.where(output.used_V[targets], normaliser - target, UNUSED_NLL)
    every = x.astype(table_D.dtype) @ table_D + bias
    loss = normaliser - certain * (normaliser - nll) - share * every
    wanted = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], certain, 0.0) + share
    by_logits = jnp.exp(logits - normaliser[..., None]) - jnp.where(output.used_V, wanted, 0.0)
    return jnp.stack([(weights * loss).sum(), (weights * nll).sum()]), weights[..., None] * by_logits


def _all_words(output: Output) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over the used words: of W [D] and of b [], and how many they are []."""
    used = output.used_V.astype(output.table_VD.dtype)
    bias = jnp.zeros(()) if output.bias_V is None else used @ output.bias_V
    return used @ output.table_VD, bias, used.sum()


def _flatten(part: tuple[jax.Array, ...]) -> list[jax.Array]:
    """[B, t, ...] -> [n, ...]: two dimensions are what the compilers multiply without copies."""
    return [array.reshape(-1, *array.shape[2:]) for array in part]


def _product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product summed, and returned, in float32 at least."""
    return jnp.einsum(letters, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _blocks(
    block_bytes: int, output: Output, x: jax.Array
) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Two functions: [B, T, ...] -> [blocks, B, t, ...], filled up with zeros, and back."""
    rows, length = x.shape[:2]
    at_once = max(1, block_bytes // (4 * rows * output.table_VD.shape[0]))
    count = math.ceil(length / at_once)
    size = math.ceil(length / count)

    def split(array: jax.Array) -> jax.Array:
        filled = jnp.pad(array, ((0, 0), (0, count * size - length), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(filled.reshape(rows, count, size, *array.shape[2:]), 1, 0)

    def join(parts: jax.Array) -> jax.Array:
        return jnp.moveaxis(parts, 0, 1).reshape(rows, count * size, *parts.shape[3:])[:, :length]

    return split, join

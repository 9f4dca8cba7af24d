"""The residual addition with its dropout and its LayerNorm in one kernel: y = LN(a x + b Dropout(h)).

XLA needs about three kernels for it in each direction, which pass float32 arrays of the size of the stream on to each
other. This kernel reads x and h and writes y. Its gradient reads x, h and dy and writes dx and dh:

    s = a x + b Dropout(h)     n = r (s - mean(s)),  r = 1 / sqrt(var(s) + eps)     y = scale n + bias
    g = scale dy               ds = r (g - mean(g) - n mean(n g))
    dx = a ds                  dh = b Dropout(ds)

and the sums over rows for scale, bias, a and b. Both are written in Pallas and compiled by Triton. Dropout hashes the
indices that `dropout.random_bits` hashes, so the mask is the one of `dropout.dropout`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from branchnorm_jax.model.dropout import dropped_at, seed_of

ELEMENTS = 2048
"""Elements that a program has in registers at once."""

ROWS = 128
"""Rows of a program of the gradient, which adds up the gradients of its rows."""

EPSILON = 1e-5
"""Added to the variance, as in `norms.layer_norm`."""

SUMS = 4
"""Sums over rows that the gradient returns: of the norm's scale and bias, and of a and b."""


Ref = Any
"""A reference to a block in the device's memory: `pallas` has no public name for its type."""


class Weights(NamedTuple):
    """Coefficients and norm parameters of the addition, float32."""

    skip: jax.Array
    """a, []."""
    branch: jax.Array
    """b, []."""
    scale: jax.Array
    """[D]."""
    bias: jax.Array
    """[D]."""


def supported(platform: str, x: jax.Array, weights: Weights) -> bool:
    """Returns whether there is a kernel for these shapes: x [..., D] with D a power of two, and scalar a and b.

    There is none for TPUs, where it takes longer than XLA's kernels, because attention changes the layout around it.
    """
    rows, width = math.prod(x.shape[:-1]), x.shape[-1]
    scalars = jnp.shape(weights.skip) == jnp.shape(weights.branch) == ()
    fits = width.bit_count() == 1 and 128 <= width <= 8192 and rows % ROWS == 0
    return platform in ("gpu", "cpu") and scalars and fits and x.dtype.itemsize <= 4


def fused_residual(
    platform: str, x: jax.Array, h: jax.Array, weights: Weights, rate: float = 0.0, key: jax.Array | None = None
) -> jax.Array:
    """Computes LN(a x + b Dropout(h)) in float32; returns it in the type of x.

    Args:
      platform: "gpu", or "cpu", where the kernel is interpreted.
      x: the residual stream, [..., D].
      h: the branch, [..., D].
      weights: see `Weights`.
      rate: dropout rate.
      key: random key; None switches dropout off. The mask is that of `dropout.dropout`.
    """
    return _residual(Options(0.0 if key is None else rate, platform), x, h, weights, seed_of(key, x.size))


class Options(NamedTuple):
    """Static arguments."""

    rate: float
    platform: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual(options: Options, x: jax.Array, h: jax.Array, weights: Weights, seed: jax.Array) -> jax.Array:
    """Runs the kernel. `seed`: see `dropout.seed_of`."""
    width = x.shape[-1]
    rows, step = x.size // width, _step(width)
    call = pl.pallas_call(
        functools.partial(_add, options.rate),
        jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(rows // step,),
        in_specs=[(_rows(step, width),) * 2, *_whole(width)],
        out_specs=_rows(step, width),
        name="residual",
        **_compiler(options.platform),
    )
    return call((x.reshape(rows, width), h.reshape(rows, width)), *_flat(weights, seed)).reshape(x.shape)


def _forward(options: Options, x: jax.Array, h: jax.Array, weights: Weights, seed: jax.Array) -> tuple[jax.Array, Any]:
    return _residual(options, x, h, weights, seed), (x, h, weights, seed)


def _backward(options: Options, kept: Any, by_y: jax.Array) -> Any:
    x, h, weights, seed = kept
    width = x.shape[-1]
    rows = x.size // width
    *arrays, by_y = (array.reshape(rows, width) for array in (x, h, by_y))
    sums = jax.ShapeDtypeStruct((rows // ROWS, SUMS, width), jnp.float32)
    call = pl.pallas_call(
        functools.partial(_add_gradient, options.rate, _step(width)),
        [(*(jax.ShapeDtypeStruct((rows, width), array.dtype) for array in arrays), sums)],
        grid=(rows // ROWS,),
        in_specs=[(_rows(ROWS, width),) * 2, _rows(ROWS, width), *_whole(width)],
        out_specs=[(*(_rows(ROWS, width),) * 2, pl.BlockSpec((1, SUMS, width), lambda i: (i, 0, 0)))],
        name="residual_backward",
        **_compiler(options.platform),
    )
    ((by_x, by_h, parts),) = call(tuple(arrays), by_y, *_flat(weights, seed))
    by_scale, by_bias, by_skip, by_branch = parts.sum(0)
    by_weights = Weights(by_skip.sum(), by_branch.sum(), by_scale, by_bias)
    return by_x.reshape(x.shape), by_h.reshape(h.shape), by_weights, None


_residual.defvjp(_forward, _backward)


def _step(width: int) -> int:
    """Returns the number of rows that a program has in registers at once."""
    return max(1, ELEMENTS // width)


def _rows(number: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((number, width), lambda i: (i, 0))


def _whole(width: int) -> list[pl.BlockSpec]:
    return [pl.BlockSpec(shape, lambda i: (0, 0)) for shape in ((1, 2), (2, width), (1, 3))]


def _flat(weights: Weights, seed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    scalars = jnp.stack([weights.skip, weights.branch]).astype(jnp.float32)[None]
    return scalars, jnp.stack([weights.scale, weights.bias]), seed[None]


def _compiler(platform: str) -> dict[str, Any]:
    return {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=1), "interpret": platform == "cpu"}


def _read(
    arrays: tuple[Ref, Ref], seed_ref: Ref, rate: float, at: Any, first: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | float]:
    """Returns x, Dropout(h) and the factors of the dropout, float32 [n, D].

    These are the rows `at` of a block; the first of them is row `first` of the whole array.
    """
    x, h = (ref[at, :].astype(jnp.float32) for ref in arrays)
    if not rate:
        return x, h, 1.0
    width = x.shape[1]
    index = (first + jax.lax.broadcasted_iota(jnp.uint32, x.shape, 0)) * np.uint32(width)
    index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, 1)
    seed = seed_ref[0, 0], seed_ref[0, 1], seed_ref[0, 2]
    kept = jnp.where(dropped_at(index, seed, rate), 0.0, 1 / (1 - rate))
    return x, h * kept, kept


def _mean(x: jax.Array) -> jax.Array:
    return x.sum(-1, keepdims=True) / x.shape[-1]


def _standardise(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    centred = s - _mean(s)
    r = jax.lax.rsqrt(_mean(centred * centred) + EPSILON)
    return centred * r, r


def _add(rate: float, arrays: tuple[Ref, Ref], scalars_ref: Ref, norm_ref: Ref, seed_ref: Ref, y_ref: Ref) -> None:
    """Computes y, see the top of this module."""
    first = (pl.program_id(0) * y_ref.shape[0]).astype(jnp.uint32)
    x, h, _ = _read(arrays, seed_ref, rate, slice(None), first)
    n, _ = _standardise(scalars_ref[0, 0] * x + scalars_ref[0, 1] * h)
    y_ref[...] = (n * norm_ref[0, :][None] + norm_ref[1, :][None]).astype(y_ref.dtype)


def _add_gradient(
    rate: float,
    step: int,
    arrays: tuple[Ref, Ref],
    by_y_ref: Ref,
    scalars_ref: Ref,
    norm_ref: Ref,
    seed_ref: Ref,
    results: tuple[Ref, Ref, Ref],
) -> None:
    """Computes dx, dh and the sums, see the top of this module, with `step` rows at a time."""
    by_x_ref, by_h_ref, sums_ref = results
    rows, width = by_y_ref.shape
    a, b, scale = scalars_ref[0, 0], scalars_ref[0, 1], norm_ref[0, :][None]
    block = pl.program_id(0) * rows

    def part(number: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = pl.ds(number * step, step)
        x, h, kept = _read(arrays, seed_ref, rate, at, (block + number * step).astype(jnp.uint32))
        n, r = _standardise(a * x + b * h)
        by_y = by_y_ref[at, :].astype(jnp.float32)
        g = by_y * scale
        by_s = r * (g - _mean(g) - n * _mean(n * g))
        by_x_ref[at, :] = (a * by_s).astype(by_x_ref.dtype)
        by_h_ref[at, :] = (b * by_s * kept).astype(by_h_ref.dtype)
        return tuple(
            so_far + each.sum(0) for so_far, each in zip(sums, (by_y * n, by_y, by_s * x, by_s * h), strict=True)
        )

    sums = (jnp.zeros(width, jnp.float32),) * SUMS
    sums = jax.lax.fori_loop(0, rows // step, part, sums)
    for index, each in enumerate(sums):
        sums_ref[0, index, :] = each

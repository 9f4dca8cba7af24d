"""Attention as one GPU kernel for each direction: the function `attention.attend`, but no array [T, S] is stored.

The kernels are written in Pallas and compiled by Triton. A program of the grid (blocks of queries, heads, rows)
computes one head of one row: forward for a block of queries, backward for all queries in a loop over blocks, because
it sums dk and dv over them. All keys of a row fit into one block, so the softmax is computed in one piece. The
backward pass reads q, k, v and the mask, and computes the rest again:

    s = q k^T / sqrt(K)     p = softmax(s)     y = Dropout(p) v
    dp = Dropout(dy v^T)    ds = p (dp - sum(p dp))
    dv = Dropout(p)^T dy    dq = ds k / sqrt(K)    dk = ds^T q / sqrt(K)

The backward pass holds s, p and ds as [S, T]. They are then the left operand of the products for dk and dv, which
Hopper's tensor cores take from registers; as [T, S], the compiler would spill registers.

Dropout hashes the indices that `dropout.random_bits` hashes, so the mask is the one of `attend`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from branchnorm_jax.model.dropout import dropped_at, seed_of
from branchnorm_jax.model.segments import MASKED

SMALLEST = 16
"""Smallest side of Triton's matrix products."""

KEYS, KEY_BYTES = 256, 2**15
"""Most keys of a row, and most bytes of a head's keys. More would not fit into a processor of an H100 or A100: the sums
dk and dv have to fit into its registers, and k, v and blocks of q and dy into its shared memory.
"""

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

Ref = Any
"""A reference to an array in the GPU's memory: `pallas` has no public name for its type."""


Arrays = tuple[jax.Array, jax.Array, jax.Array]
"""q, k and v, or their gradients."""

Kept = tuple[Arrays, jax.Array, jax.Array]
"""What the backward pass needs: q, k, v, the mask and the seed."""


class Options(NamedTuple):
    """Static arguments."""

    rate: float
    """Dropout rate of the attention weights."""
    interpret: bool
    """Runs the kernels as ordinary JAX operations."""


def supported(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array) -> bool:
    """Returns whether `fused_attend` takes these arrays. Triton requires that T, S and K are powers of two."""
    (_, length, _, width), keys = q_BTHK.shape, k_BSHK.shape[1]
    sizes = all(size >= SMALLEST and size.bit_count() == 1 for size in (length, keys, width))
    alike = k_BSHK.shape == v_BSHK.shape and q_BTHK.dtype == k_BSHK.dtype == v_BSHK.dtype
    fits = keys <= KEYS and keys * width * k_BSHK.dtype.itemsize <= KEY_BYTES
    return sizes and alike and fits and q_BTHK.dtype in DTYPES


def fused_attend(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    mask_BTS: jax.Array,
    rate: float = 0.0,
    key: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `attention.attend`, with the same dropout mask, for arrays that are `supported`.

    As there, GPUs multiply float32 matrices in TF32 unless `jax_default_matmul_precision` says otherwise. `interpret`
    runs the kernels as ordinary JAX operations, for tests on CPUs.
    """
    rows, length, heads, _ = q_BTHK.shape
    seed = seed_of(key, rows * heads * length * k_BSHK.shape[1])
    return _attend(Options(0.0 if key is None else rate, interpret), (q_BTHK, k_BSHK, v_BSHK), mask_BTS, seed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, qkv: Arrays, mask: jax.Array, seed: jax.Array) -> jax.Array:
    """Runs the forward kernel. `seed`: see `dropout.seed_of`."""
    q, k, v = qkv
    (rows, length, heads, _), keys = q.shape, k.shape[1]
    block = min(length, 64, 8192 // keys)
    of_queries, of_keys, of_mask = _blocks(block, k, mask)
    return pl.pallas_call(
        functools.partial(_forward_kernel, options.rate, heads, length),
        jax.ShapeDtypeStruct(q.shape, v.dtype),
        grid=(length // block, heads, rows),
        in_specs=[(of_queries, of_keys, of_keys), of_mask, pl.BlockSpec()],
        out_specs=of_queries,
        # At most 64 attention weights for each thread.
        compiler_params=triton.CompilerParams(num_warps=_warps(block * keys, 4), num_stages=1),
        interpret=options.interpret,
        name="attention",
    )(qkv, mask, seed)


def _forward(options: Options, qkv: Arrays, mask: jax.Array, seed: jax.Array) -> tuple[jax.Array, Kept]:
    return _attend(options, qkv, mask, seed), (qkv, mask, seed)


def _backward(options: Options, kept: Kept, dy: jax.Array) -> tuple[Arrays, None, None]:
    """Runs the backward kernel."""
    qkv, mask, seed = kept
    q, k, v = qkv
    (rows, length, heads, width), keys = q.shape, k.shape[1]
    of_queries, of_keys, of_mask = _blocks(length, k, mask)
    of_qkv = of_queries, of_keys, of_keys
    (gradients,) = pl.pallas_call(
        functools.partial(_backward_kernel, options.rate, heads, min(length, 64 if keys <= 64 else 32)),
        [tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv)],
        grid=(1, heads, rows),
        in_specs=[of_qkv, of_mask, pl.BlockSpec(), of_queries],
        out_specs=[of_qkv],
        # At most 128 elements of dk and dv together for each thread. Two programs of 4 warps, one of which loads while
        # the other computes, fill a processor better than one of 8, but 256 keys need 8.
        compiler_params=triton.CompilerParams(
            num_warps=_warps(keys * width, 4 if keys * width <= 8192 else 8), num_stages=2
        ),
        interpret=options.interpret,
        name="attention_backward",
    )(qkv, mask, seed, dy.astype(v.dtype))
    return gradients, None, None


_attend.defvjp(_forward, _backward)


def _blocks(queries: int, k: jax.Array, mask: jax.Array) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Returns what a program of the grid (blocks of queries, heads, rows) sees of [B, T, H, K], [B, S, H, K], mask."""
    _, keys, _, width = k.shape
    one_row, one_query = (size == 1 for size in mask.shape[:2])
    return (
        pl.BlockSpec((None, queries, None, width), lambda t, h, b: (b, t, h, 0)),
        pl.BlockSpec((None, keys, None, width), lambda t, h, b: (b, 0, h, 0)),
        pl.BlockSpec(
            (None, 1 if one_query else queries, mask.shape[2]),
            lambda t, h, b: (0 if one_row else b, 0 if one_query else t, 0),
        ),
    )


def _warps(elements: int, most: int) -> int:
    return min(max(elements // 1024, 1), most)


def _forward_kernel(
    rate: float, heads: int, length: int, qkv: tuple[Ref, Ref, Ref], mask_ref: Ref, seed_ref: Ref, y_ref: Ref
) -> None:
    """Computes y [T, K] of one head, for a block of the `length` queries."""
    q_ref, k_ref, v_ref = qkv
    p_TS = _softmax(jnp.where(mask_ref[...], _dot(_scaled(q_ref[...]), k_ref[...].T), MASKED), axis=1)
    first = _head_number(heads) * length + pl.program_id(0) * p_TS.shape[0]
    drop = _dropout(rate, seed_ref, first, p_TS.shape, keys=1)
    y_ref[...] = _dot(drop(p_TS).astype(v_ref.dtype), v_ref[...]).astype(y_ref.dtype)


def _backward_kernel(
    rate: float,
    heads: int,
    block: int,
    qkv: tuple[Ref, Ref, Ref],
    mask_ref: Ref,
    seed_ref: Ref,
    dy_ref: Ref,
    gradients: tuple[Ref, Ref, Ref],
) -> None:
    """Computes dq [T, K], dk and dv [S, K] of one head, with `block` queries at a time."""
    (q_ref, k_ref, v_ref), (dq_ref, dk_ref, dv_ref) = qkv, gradients
    k_SK, v_SK, (length, width) = k_ref[...], v_ref[...], q_ref.shape
    first = _head_number(heads) * length

    def add_block(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dk_SK, dv_SK = sums
        queries = pl.ds(index * block, block)
        q_TK, dy_TK = _scaled(q_ref[queries, :]), dy_ref[queries, :]
        mask_ST = (mask_ref[...] if mask_ref.shape[0] == 1 else mask_ref[queries, :]).T
        p_ST = _softmax(jnp.where(mask_ST, _dot(k_SK, q_TK.T), MASKED), axis=0)
        drop = _dropout(rate, seed_ref, first + index * block, p_ST.shape, keys=0)
        dv_SK += _dot(drop(p_ST).astype(v_SK.dtype), dy_TK)
        pdp_ST = p_ST * drop(_dot(v_SK, dy_TK.T))
        # Where all keys of a query are masked, p is not zero.
        ds_ST = jnp.where(mask_ST, pdp_ST - p_ST * pdp_ST.sum(0, keepdims=True), 0).astype(k_SK.dtype)
        dq_ref[queries, :] = (_dot(ds_ST.T, k_SK) * width**-0.5).astype(dq_ref.dtype)
        return dk_SK + _dot(ds_ST, q_TK), dv_SK

    zeros = jnp.zeros(k_SK.shape, jnp.float32)
    dk_SK, dv_SK = jax.lax.fori_loop(0, length // block, add_block, (zeros, zeros))
    dk_ref[...], dv_ref[...] = dk_SK.astype(dk_ref.dtype), dv_SK.astype(dv_ref.dtype)


def _head_number(heads: int) -> jax.Array:
    """Returns the number of the program's head, counted over all rows."""
    return pl.program_id(2) * heads + pl.program_id(1)


def _scaled(q: jax.Array) -> jax.Array:
    return q * q.shape[-1] ** -0.5


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _softmax(scores: jax.Array, axis: int) -> jax.Array:
    exponentials = jnp.exp(scores - scores.max(axis, keepdims=True))
    return exponentials * (1 / exponentials.sum(axis, keepdims=True))


def _dropout(
    rate: float, seed_ref: Ref, first: jax.Array, shape: tuple[int, ...], keys: int
) -> Callable[[jax.Array], jax.Array]:
    """Returns the dropout of arrays of a shape.

    Args:
      rate: dropout rate; 0 means no dropout.
      seed_ref: see `_attend`.
      first: number of the first query, counted over all queries, heads and rows.
      shape: shape of the arrays.
      keys: axis of the keys; the other axis is the queries.
    """
    if rate == 0.0:
        return lambda x: x
    query = first.astype(jnp.uint32) + jax.lax.broadcasted_iota(jnp.uint32, shape, 1 - keys)
    index = query * np.uint32(shape[keys]) + jax.lax.broadcasted_iota(jnp.uint32, shape, keys)
    dropped = dropped_at(index, (seed_ref[0], seed_ref[1], seed_ref[2]), rate)
    return lambda x: jnp.where(dropped, 0, x * (1 / (1 - rate)))

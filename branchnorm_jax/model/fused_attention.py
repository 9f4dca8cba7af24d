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


Arrays = tuple[jax.Array, ...]
"""q, k and v in this order, or their gradients: each array [B, T, N, H, K] holds N of them. In self-attention there is
one array, in cross-attention one with q and one with k and v, as the products of `attention.py` write them."""

Kept = tuple[Arrays, jax.Array, jax.Array]
"""What the backward pass needs: q, k, v, the mask and the seed."""


class Options(NamedTuple):
    """Static arguments."""

    rate: float
    """Dropout rate of the attention weights."""
    interpret: bool
    """Runs the kernels as ordinary JAX operations."""


def supported(q_BTHK: jax.ShapeDtypeStruct, k_BSHK: jax.ShapeDtypeStruct) -> bool:
    """Returns whether `fused_attend` takes queries and keys of these shapes, of one type.

    Triton requires that T, S and K are powers of two.
    """
    (_, length, _, width), keys, dtype = q_BTHK.shape, k_BSHK.shape[1], q_BTHK.dtype
    sizes = all(size >= SMALLEST and size.bit_count() == 1 for size in (length, keys, width))
    return sizes and keys <= KEYS and keys * width * dtype.itemsize <= KEY_BYTES and dtype in DTYPES


def fused_attend(
    q_k_v: Arrays,
    mask_BTS: jax.Array,
    rate: float = 0.0,
    key: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `attention.attend`, with the same dropout mask, for shapes that are `supported`.

    As there, GPUs multiply float32 matrices in TF32 unless `jax_default_matmul_precision` says otherwise. `interpret`
    runs the kernels as ordinary JAX operations, for tests on CPUs.
    """
    rows, length, _, heads, _ = q_k_v[0].shape
    seed = seed_of(key, rows * heads * length * q_k_v[-1].shape[1])
    return _attend(Options(0.0 if key is None else rate, interpret), q_k_v, mask_BTS, seed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, q_k_v: Arrays, mask: jax.Array, seed: jax.Array) -> jax.Array:
    """Runs the forward kernel. `seed`: see `dropout.seed_of`."""
    (rows, length, _, heads, width), keys = q_k_v[0].shape, q_k_v[-1].shape[1]
    block = min(length, 64, 8192 // keys)
    return pl.pallas_call(
        functools.partial(_forward_kernel, options.rate, heads, block),
        jax.ShapeDtypeStruct((rows, length, heads, width), q_k_v[-1].dtype),
        grid=(length // block, heads, rows),
        in_specs=[_of_head(q_k_v), _of_row(mask), pl.BlockSpec()],
        out_specs=pl.BlockSpec((None, length, None, width), lambda t, h, b: (b, 0, h, 0)),
        # At most 64 attention weights for each thread.
        compiler_params=triton.CompilerParams(num_warps=_warps(block * keys, 4), num_stages=1),
        interpret=options.interpret,
        name="attention",
    )(q_k_v, mask, seed)


def _forward(options: Options, q_k_v: Arrays, mask: jax.Array, seed: jax.Array) -> tuple[jax.Array, Kept]:
    return _attend(options, q_k_v, mask, seed), (q_k_v, mask, seed)


def _backward(options: Options, kept: Kept, dy: jax.Array) -> tuple[Arrays, None, None]:
    """Runs the backward kernel."""
    q_k_v, mask, seed = kept
    (rows, length, _, heads, width), keys = q_k_v[0].shape, q_k_v[-1].shape[1]
    of_dy = pl.BlockSpec((None, length, None, width), lambda t, h, b: (b, 0, h, 0))
    (gradients,) = pl.pallas_call(
        functools.partial(_backward_kernel, options.rate, heads, min(length, 64 if keys <= 64 else 32)),
        [tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in q_k_v)],
        grid=(1, heads, rows),
        in_specs=[_of_head(q_k_v), _of_row(mask), pl.BlockSpec(), of_dy],
        out_specs=[_of_head(q_k_v)],
        # At most 128 elements of dk and dv together for each thread. Two programs of 4 warps, one of which loads while
        # the other computes, fill a processor better than one of 8, but 256 keys need 8.
        compiler_params=triton.CompilerParams(
            num_warps=_warps(keys * width, 4 if keys * width <= 8192 else 8), num_stages=2
        ),
        interpret=options.interpret,
        name="attention_backward",
    )(q_k_v, mask, seed, dy.astype(q_k_v[-1].dtype))
    return gradients, None, None


_attend.defvjp(_forward, _backward)


def _of_head(q_k_v: Arrays) -> tuple[pl.BlockSpec, ...]:
    """Returns what a program of the grid (blocks of queries, heads, rows) sees of q, k and v: those of its head."""
    shapes = [(None, length, count, None, width) for _, length, count, _, width in (x.shape for x in q_k_v)]
    return tuple(pl.BlockSpec(shape, lambda t, h, b: (b, 0, 0, h, 0)) for shape in shapes)


def _of_row(mask: jax.Array) -> pl.BlockSpec:
    """Returns what a program sees of the mask [B or 1, T or 1, S]: that of its row."""
    one_row = mask.shape[0] == 1
    return pl.BlockSpec((None, *mask.shape[1:]), lambda t, h, b: (0 if one_row else b, 0, 0))


def _one_by_one(refs: tuple[Ref, ...]) -> list[tuple[Ref, int]]:
    """Returns where q, k and v are: (reference, index of its second axis)."""
    return [(ref, index) for ref in refs for index in range(ref.shape[1])]


def _warps(elements: int, most: int) -> int:
    return min(max(elements // 1024, 1), most)


def _forward_kernel(
    rate: float, heads: int, block: int, q_k_v: tuple[Ref, ...], mask_ref: Ref, seed_ref: Ref, y_ref: Ref
) -> None:
    """Computes y [T, K] of one head, for a block of queries."""
    (q_ref, q), (k_ref, k), (v_ref, v) = _one_by_one(q_k_v)
    start = pl.program_id(0) * block
    queries, length = pl.ds(start, block), y_ref.shape[0]
    scores_TS = _dot(_scaled(q_ref[queries, q, :]), k_ref[:, k, :].T)
    p_TS = _softmax(jnp.where(_mask(mask_ref, queries), scores_TS, MASKED), axis=1)
    drop = _dropout(rate, seed_ref, _head_number(heads) * length + start, p_TS.shape, keys=1)
    y_ref[queries, :] = _dot(drop(p_TS).astype(v_ref.dtype), v_ref[:, v, :]).astype(y_ref.dtype)


def _backward_kernel(
    rate: float,
    heads: int,
    block: int,
    q_k_v: tuple[Ref, ...],
    mask_ref: Ref,
    seed_ref: Ref,
    dy_ref: Ref,
    gradients: tuple[Ref, ...],
) -> None:
    """Computes dq [T, K], dk and dv [S, K] of one head, with `block` queries at a time."""
    (q_ref, q), (k_ref, k), (v_ref, v) = _one_by_one(q_k_v)
    dq_ref, dk_ref, dv_ref = (ref for ref, _ in _one_by_one(gradients))
    k_SK, v_SK, (length, width) = k_ref[:, k, :], v_ref[:, v, :], dy_ref.shape
    first = _head_number(heads) * length

    def add_block(index: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dk_SK, dv_SK = sums
        queries = pl.ds(index * block, block)
        q_TK, dy_TK = _scaled(q_ref[queries, q, :]), dy_ref[queries, :]
        mask_ST = _mask(mask_ref, queries).T
        p_ST = _softmax(jnp.where(mask_ST, _dot(k_SK, q_TK.T), MASKED), axis=0)
        drop = _dropout(rate, seed_ref, first + index * block, p_ST.shape, keys=0)
        dv_SK += _dot(drop(p_ST).astype(v_SK.dtype), dy_TK)
        pdp_ST = p_ST * drop(_dot(v_SK, dy_TK.T))
        # Where all keys of a query are masked, p is not zero.
        ds_ST = jnp.where(mask_ST, pdp_ST - p_ST * pdp_ST.sum(0, keepdims=True), 0).astype(k_SK.dtype)
        dq_ref[queries, q, :] = (_dot(ds_ST.T, k_SK) * width**-0.5).astype(dq_ref.dtype)
        return dk_SK + _dot(ds_ST, q_TK), dv_SK

    zeros = jnp.zeros(k_SK.shape, jnp.float32)
    dk_SK, dv_SK = jax.lax.fori_loop(0, length // block, add_block, (zeros, zeros))
    dk_ref[:, k, :], dv_ref[:, v, :] = dk_SK.astype(dk_ref.dtype), dv_SK.astype(dv_ref.dtype)


def _mask(mask_ref: Ref, queries: Any) -> jax.Array:
    """Returns the mask of the queries, [T or 1, S]."""
    return mask_ref[...] if mask_ref.shape[0] == 1 else mask_ref[queries, :]


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

"""Attention as one TPU kernel for each direction: the function `attention.attend`, but no array [T, S] is stored.

The equations are those of `fused_attention`, the kernels for GPUs. These kernels are written in Pallas and compiled by
Mosaic. They read the arrays as the projections write them, [B, T, D] with D = H K.

A TPU computes with registers of 8 sublanes x 128 lanes, and sums over sublanes are cheaper than sums over lanes. So the
kernels hold the scores as tiles [S, W]: the keys are the sublanes, and W = 128 pairs of a head and a query the lanes. A
tile has 128 queries of one head or, if T < 128, all queries of G = 128 / T heads. A product with the queries

    Q [W, L],   row (g, t) = q of query t in the K lanes of head g, and 0 in the lanes of the other heads

gives the scores of G heads at once: k Q^T [S, W]. No array is ever cut within 128 lanes. The other products are

    Y = p^T v [W, L]      y = the K lanes of head g of row (g, t)      dk = ds Q      dv = p dY

Dropout hashes the indices that `dropout.random_bits` hashes, so the mask is the one of `attend`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from branchnorm_jax.model.dropout import dropped_at, seed_of
from branchnorm_jax.model.fused_attention import Ref
from branchnorm_jax.model.segments import MASKED

LANES = 128
"""Lanes of a register."""

SMALLEST, LARGEST = 16, 512
"""Smallest and largest number of queries and of keys. A register has 16 rows of bfloat16 numbers."""

BLOCK_BYTES = 2**19
"""Most bytes of an array that a program reads at once. The backward pass reads and writes seven, each twice in VMEM."""

AT_ONCE = 256
"""Keys that a program computes at once, over several rows: enough independent work to hide the latency of products."""

DTYPES = (jnp.bfloat16, jnp.float32)

Arrays = tuple[jax.Array, jax.Array, jax.Array]
"""q, k and v, or their gradients."""

Kept = tuple[Arrays, jax.Array, jax.Array]
"""What the backward pass needs: q, k, v, the mask and the seed."""


class Tiling(NamedTuple):
    """Static arguments: how the kernels divide the work."""

    rate: float
    """Dropout rate of the attention weights."""
    heads: int
    """H."""
    queries: int
    """T."""
    keys: int
    """S."""
    width: int
    """K."""
    interpret: bool
    """Runs the kernels as ordinary JAX operations."""

    @property
    def tile_queries(self) -> int:
        """Queries of a tile."""
        return min(self.queries, LANES)

    @property
    def tile_heads(self) -> int:
        """G: heads of a tile, a power of two that divides H."""
        return math.gcd(self.heads, LANES // self.tile_queries)

    @property
    def lanes(self) -> int:
        """L: lanes of q, k, v and y that a program reads, all of whole heads."""
        return max(LANES, self.tile_heads * self.width)

    @property
    def first_heads(self) -> range:
        """First head of each tile, among the heads of a program."""
        return range(0, self.lanes // self.width, self.tile_heads)

    @property
    def first_queries(self) -> range:
        """First query of each tile."""
        return range(0, self.queries, self.tile_queries)

    def rows(self, rows: int, itemsize: int) -> int:
        """Returns the rows of a program: a power of two that divides the number of rows. 0 if one is too large."""
        most = BLOCK_BYTES // (max(self.queries, self.keys) * self.lanes * itemsize)
        return math.gcd(rows, 1 << (most.bit_length() - 1)) if most else 0


def supported(q_BTHK: jax.ShapeDtypeStruct, k_BSHK: jax.ShapeDtypeStruct) -> bool:
    """Returns whether `fused_attend` takes queries and keys of these shapes, of one type.

    T, S and K have to be powers of two.
    """
    (rows, length, heads, width), keys, dtype = q_BTHK.shape, k_BSHK.shape[1], q_BTHK.dtype
    powers = all(size.bit_count() == 1 for size in (length, keys, width))
    if not (powers and SMALLEST <= min(length, keys) <= max(length, keys) <= LARGEST):
        return False
    tiling = Tiling(0.0, heads, length, keys, width, False)
    fits = heads * width % tiling.lanes == 0 and tiling.rows(rows, dtype.itemsize) > 0
    return fits and dtype in DTYPES


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

    As there, TPUs round float32 matrices to bfloat16 unless `jax_default_matmul_precision` says otherwise.
    `interpret` runs the kernels as ordinary JAX operations, for tests on CPUs.
    """
    (rows, length, heads, width), keys = q_BTHK.shape, k_BSHK.shape[1]
    tiling = Tiling(0.0 if key is None else rate, heads, length, keys, width, interpret)
    q, k, v = (x.reshape(*x.shape[:2], heads * width) for x in (q_BTHK, k_BSHK, v_BSHK))
    seed = seed_of(key, rows * heads * length * keys)
    return _attend(tiling, (q, k, v), mask_BTS, seed).reshape(q_BTHK.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiling: Tiling, qkv: Arrays, mask: jax.Array, seed: jax.Array) -> jax.Array:
    """Runs the forward kernel. `seed`: see `dropout.seed_of`."""
    q, _, v = qkv
    of_queries, of_keys, of_mask, of_seed = _blocks(tiling, q, mask)
    return pl.pallas_call(
        functools.partial(_forward_kernel, tiling),
        jax.ShapeDtypeStruct(q.shape, v.dtype),
        grid=_grid(tiling, q),
        in_specs=[of_seed, of_mask, (of_queries, of_keys, of_keys)],
        out_specs=of_queries,
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=tiling.interpret,
        name="attention",
    )(seed[None], mask.astype(jnp.int8), qkv)


def _forward(tiling: Tiling, qkv: Arrays, mask: jax.Array, seed: jax.Array) -> tuple[jax.Array, Kept]:
    return _attend(tiling, qkv, mask, seed), (qkv, mask, seed)


def _backward(tiling: Tiling, kept: Kept, dy: jax.Array) -> tuple[Arrays, None, None]:
    """Runs the backward kernel."""
    qkv, mask, seed = kept
    q, _, v = qkv
    of_queries, of_keys, of_mask, of_seed = _blocks(tiling, q, mask)
    of_qkv = of_queries, of_keys, of_keys
    (gradients,) = pl.pallas_call(
        functools.partial(_backward_kernel, tiling),
        [tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv)],
        grid=_grid(tiling, q),
        in_specs=[of_seed, of_mask, of_qkv, of_queries],
        out_specs=[of_qkv],
        compiler_params=tpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=tiling.interpret,
        name="attention_backward",
    )(seed[None], mask.astype(jnp.int8), qkv, dy.astype(v.dtype))
    return gradients, None, None


_attend.defvjp(_forward, _backward)


def _grid(tiling: Tiling, q: jax.Array) -> tuple[int, int]:
    """Returns (blocks of rows, blocks of heads)."""
    rows, _, features = q.shape
    return rows // tiling.rows(rows, q.dtype.itemsize), features // tiling.lanes


def _blocks(
    tiling: Tiling, q: jax.Array, mask: jax.Array
) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Returns what a program of the grid sees of [B, T, D], [B, S, D], the mask and the seed."""
    rows, one_row = tiling.rows(q.shape[0], q.dtype.itemsize), mask.shape[0] == 1
    return (
        pl.BlockSpec((rows, tiling.queries, tiling.lanes), lambda b, h: (b, 0, h)),
        pl.BlockSpec((rows, tiling.keys, tiling.lanes), lambda b, h: (b, 0, h)),
        pl.BlockSpec((1 if one_row else rows, *mask.shape[1:]), lambda b, h: (0 if one_row else b, 0, 0)),
        pl.BlockSpec((1, 3), lambda b, h: (0, 0), memory_space=tpu.SMEM),
    )


def _for_rows(tiling: Tiling, rows: int, compute: Callable[[Any, jax.Array], None]) -> None:
    """Calls `compute` for groups of a program's rows.

    Its arguments are the rows' indices, and the number of the first query of the first row and of the program's first
    head, counted over [B, H, T].
    """
    step, heads = math.gcd(rows, max(1, AT_ONCE // tiling.keys)), tiling.lanes // tiling.width
    first = (pl.program_id(0) * (rows * tiling.heads) + pl.program_id(1) * heads) * tiling.queries

    def group(index: jax.Array, _: None) -> None:
        compute(pl.ds(index * step, step), first + index * (step * tiling.heads * tiling.queries))

    jax.lax.fori_loop(0, rows // step, group, None)


def _forward_kernel(tiling: Tiling, seed_ref: Ref, mask_ref: Ref, qkv: tuple[Ref, Ref, Ref], y_ref: Ref) -> None:
    """Computes y for the rows and heads of a program."""
    q_ref, k_ref, v_ref = qkv

    def compute(rows: Any, first: jax.Array) -> None:
        k_RSL, v_RSL = k_ref[rows], v_ref[rows]
        for query in tiling.first_queries:
            queries = pl.ds(query, tiling.tile_queries)
            mask, q_RTL = _mask(tiling, mask_ref, rows, queries), _scaled(tiling, q_ref[rows, queries])
            y_RTL = jnp.zeros(q_RTL.shape, jnp.float32)
            for head in tiling.first_heads:
                p_RSW = _softmax(jnp.where(mask, _dot(k_RSL, _spread(tiling, q_RTL, head), 2, 2), MASKED))
                drop = _dropout(tiling, seed_ref, first + (head * tiling.queries + query), p_RSW.shape)
                y_RTL = _gather(tiling, _dot(drop(p_RSW).astype(v_RSL.dtype), v_RSL, 1, 1), head, y_RTL)
            y_ref[rows, queries] = y_RTL.astype(y_ref.dtype)

    _for_rows(tiling, q_ref.shape[0], compute)


def _backward_kernel(
    tiling: Tiling,
    seed_ref: Ref,
    mask_ref: Ref,
    qkv: tuple[Ref, Ref, Ref],
    dy_ref: Ref,
    gradients: tuple[Ref, Ref, Ref],
) -> None:
    """Computes dq, dk and dv for the rows and heads of a program."""
    (q_ref, k_ref, v_ref), (dq_ref, dk_ref, dv_ref) = qkv, gradients

    def compute(rows: Any, first: jax.Array) -> None:
        k_RSL, v_RSL = k_ref[rows], v_ref[rows]
        dk_RSL = dv_RSL = jnp.zeros(k_RSL.shape, jnp.float32)
        for query in tiling.first_queries:
            queries = pl.ds(query, tiling.tile_queries)
            mask, q_RTL = _mask(tiling, mask_ref, rows, queries), _scaled(tiling, q_ref[rows, queries])
            dy_RTL, dq_RTL = dy_ref[rows, queries], jnp.zeros(q_RTL.shape, jnp.float32)
            for head in tiling.first_heads:
                q_RWL, dy_RWL = (_spread(tiling, x, head) for x in (q_RTL, dy_RTL))
                p_RSW = _softmax(jnp.where(mask, _dot(k_RSL, q_RWL, 2, 2), MASKED))
                drop = _dropout(tiling, seed_ref, first + (head * tiling.queries + query), p_RSW.shape)
                dv_RSL += _dot(drop(p_RSW).astype(v_RSL.dtype), dy_RWL, 2, 1)
                pdp_RSW = p_RSW * drop(_dot(v_RSL, dy_RWL, 2, 2))
                # Where all keys of a query are masked, p is not zero.
                ds_RSW = jnp.where(mask, pdp_RSW - p_RSW * pdp_RSW.sum(1, keepdims=True), 0).astype(k_RSL.dtype)
                dk_RSL += _dot(ds_RSW, q_RWL, 2, 1)
                dq_RTL = _gather(tiling, _dot(ds_RSW, k_RSL, 1, 1), head, dq_RTL)
            dq_ref[rows, queries] = (dq_RTL * tiling.width**-0.5).astype(dq_ref.dtype)
        dk_ref[rows], dv_ref[rows] = dk_RSL.astype(dk_ref.dtype), dv_RSL.astype(dv_ref.dtype)

    _for_rows(tiling, q_ref.shape[0], compute)


def _scaled(tiling: Tiling, q: jax.Array) -> jax.Array:
    """Returns q / sqrt(K), as `attend` computes it: in the type of q. Older TPUs have no products of bfloat16."""
    return (q.astype(jnp.float32) * float(np.asarray(tiling.width**-0.5, q.dtype))).astype(q.dtype)


def _in_head(tiling: Tiling, shape: tuple[int, ...], head: int) -> jax.Array:
    """Returns True in the K lanes of a head, [..., L]."""
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return (lane >= head * tiling.width) & (lane < (head + 1) * tiling.width)


def _spread(tiling: Tiling, x_RTL: jax.Array, head: int) -> jax.Array:
    """Returns [R, W, L]: row (g, t) has x of query t in the lanes of head `head` + g, and 0 in the other lanes."""
    # Older TPUs select bfloat16 numbers only after they have unpacked them, but mask their bits as they are.
    integer = jnp.int16 if x_RTL.dtype.itemsize == 2 else jnp.int32
    bits = jax.lax.bitcast_convert_type(x_RTL, integer)
    heads = range(head, head + tiling.tile_heads)
    masks = [jnp.where(_in_head(tiling, (1, *x_RTL.shape[1:]), each), -1, 0).astype(integer) for each in heads]
    spread = jnp.concatenate([bits & mask for mask in masks], axis=1)
    return jax.lax.bitcast_convert_type(spread, x_RTL.dtype)


def _gather(tiling: Tiling, x_RWL: jax.Array, head: int, others_RTL: jax.Array) -> jax.Array:
    """Returns [R, T, L]: the lanes of head `head` + g from row (g, t), and of other heads from `others_RTL`."""
    for g in range(tiling.tile_heads):
        x_RTL = x_RWL[:, g * tiling.tile_queries : (g + 1) * tiling.tile_queries]
        # The other heads overwrite what the first head leaves in their lanes.
        in_head = _in_head(tiling, x_RTL.shape, head + g)
        others_RTL = x_RTL if head + g == 0 else jnp.where(in_head, x_RTL, others_RTL)
    return others_RTL


def _mask(tiling: Tiling, mask_ref: Ref, rows: Any, queries: Any) -> jax.Array:
    """Returns the mask of a tile, [R or 1, S, W]."""
    rows = slice(None) if mask_ref.shape[0] == 1 else rows
    one_query = mask_ref.shape[1] == 1
    mask_RTS = mask_ref[rows, slice(None) if one_query else queries].astype(jnp.float32)
    mask_RTS = jnp.broadcast_to(mask_RTS, (mask_RTS.shape[0], tiling.tile_queries, tiling.keys))
    return jnp.concatenate([mask_RTS] * tiling.tile_heads, axis=1).swapaxes(1, 2) != 0


def _dot(a: jax.Array, b: jax.Array, axis_of_a: int, axis_of_b: int) -> jax.Array:
    """Multiplies two matrices of each row, in float32: sums over one axis of each."""
    axes = ((axis_of_a,), (axis_of_b,)), ((0,), (0,))
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _softmax(scores_RSW: jax.Array) -> jax.Array:
    exponentials = jnp.exp(scores_RSW - scores_RSW.max(1, keepdims=True))
    return exponentials * (1 / exponentials.sum(1, keepdims=True))


def _dropout(
    tiling: Tiling, seed_ref: Ref, first: jax.Array, shape: tuple[int, ...]
) -> Callable[[jax.Array], jax.Array]:
    """Returns the dropout of tiles [R, S, W]. `first`: number of the first query, counted over [B, H, T]."""
    if tiling.rate == 0.0:
        return lambda x: x
    # A tile with several heads has all of their queries, so its queries are consecutive in [B, H, T].
    row, key, query = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    query += row * np.uint32(tiling.heads * tiling.queries) + first.astype(jnp.uint32)
    seed = seed_ref[0, 0], seed_ref[0, 1], seed_ref[0, 2]
    dropped = dropped_at(query * np.uint32(tiling.keys) + key, seed, tiling.rate)
    return lambda x: jnp.where(dropped, 0, x * (1 / (1 - tiling.rate)))

"""Bytes, operations and times of kernels against counts by hand, in programs in the text form of XLA's compilers."""

import jax
import jax.numpy as jnp
import pytest

from branchnorm_jax.analysis import program
from branchnorm_jax.analysis.devices import DEVICES
from branchnorm_jax.analysis.roofline import BANDWIDTH_SHARE, MATRIX_SHARE, START, Kernel, kernels

H200 = DEVICES["h200"]


def only(text: str) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in kernels(program.parse(text))}


def test_matrix_product_compiled_here() -> None:
    """x [64, 96] times W [96, 32] in float32: reads both, writes [64, 32], 2 x 64 x 96 x 32 operations."""
    x, w = jax.ShapeDtypeStruct((64, 96), jnp.float32), jax.ShapeDtypeStruct((96, 32), jnp.float32)
    found = only(jax.jit(jnp.dot).lower(x, w).compile().as_text() or "")
    (product,) = (kernel for kernel in found.values() if kernel.flops)
    assert product.flops == 2 * 64 * 96 * 32
    assert (product.read, product.written, product.times) == (4 * (64 * 96 + 96 * 32), 4 * 64 * 32, 1)


SCAN = """
%fused_product (p0: bf16[6,512,2048], p1: s32[], p2: f32[1024,512]) -> bf16[1024,2048] {
  %p0 = bf16[6,512,2048] parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,512,2048] dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,512,2048}
  %w = bf16[512,2048] bitcast(%slice)
  %p2 = f32[1024,512] parameter(2)
  %x = bf16[1024,512] convert(%p2)
  ROOT %dot = bf16[1024,2048] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_store (q0: bf16[6,1024,2048], q1: bf16[1024,2048], q2: s32[]) -> bf16[6,1024,2048] {
  %q0 = bf16[6,1024,2048] parameter(0)
  %q1 = bf16[1024,2048] parameter(1)
  %row = bf16[1,1024,2048] bitcast(%q1)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %store = bf16[6,1024,2048] dynamic-update-slice(%q0, %row, %q2, %none, %none)
}

%fused_head (r0: bf16[1024,2048]) -> bf16[64,2048] {
  %r0 = bf16[1024,2048] parameter(0)
  %twice = bf16[1024,2048] add(%r0, %r0)
  ROOT %head = bf16[64,2048] slice(%twice), slice={[0:64], [0:2048]}
}

%fused_two (s0: bf16[1024,2048]) -> (f32[1024,2048], bf16[64,2048]) {
  %s0 = bf16[1024,2048] parameter(0)
  %wide = f32[1024,2048] convert(%s0)
  %part = bf16[64,2048] slice(%s0), slice={[0:64], [0:2048]}
  ROOT %both = (f32[1024,2048], bf16[64,2048]) tuple(%wide, %part)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %ab = f32[] add(%a, %b)
}

%body (state: (s32[], f32[1024,512], bf16[6,512,2048], bf16[6,1024,2048])) -> (s32[], f32[1024,512]) {
  %state = (s32[], f32[1024,512], bf16[6,512,2048], bf16[6,1024,2048]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x.1 = f32[1024,512] get-tuple-element(%state), index=1
  %stack = bf16[6,512,2048] get-tuple-element(%state), index=2
  %kept = bf16[6,1024,2048] get-tuple-element(%state), index=3
  %h = bf16[1024,2048] fusion(%stack, %i, %x.1), kind=kCustom, calls=%fused_product
  %stored = bf16[6,1024,2048] fusion(%kept, %h, %i), kind=kLoop, calls=%fused_store
  %first = bf16[64,2048] fusion(%h), kind=kLoop, calls=%fused_head
  %two = (f32[1024,2048], bf16[64,2048]) fusion-start(%h), kind=kLoop, calls=%fused_two
  %done = (f32[1024,2048], bf16[64,2048]) fusion-done(%two)
  %zeros = f32[] constant(0)
  %total = f32[] reduce(%x.1, %zeros), dimensions={0,1}, to_apply=%sum
  ROOT %next = (s32[], f32[1024,512]) tuple(%i, %x.1)
}

%condition (c: (s32[], f32[1024,512])) -> pred[] {
  %c = (s32[], f32[1024,512]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (start: (s32[], f32[1024,512])) -> (s32[], f32[1024,512]) {
  %start = (s32[], f32[1024,512]) parameter(0)
  ROOT %loop = (s32[], f32[1024,512]) while(%start), condition=%condition, body=%body, known_trip_count={"n":"6"}
}
"""


def test_kernels_of_a_scan_over_stacked_matrices() -> None:
    found = only(SCAN)
    assert {kernel.times for kernel in found.values()} == {6}
    assert {kernel.loops for kernel in found.values()} == {("loop x 6",)}
    hidden, matrix = 2 * 1024 * 2048, 2 * 512 * 2048
    # Reads one matrix of the stack, the index, and x in float32.
    assert (found["h"].read, found["h"].written) == (matrix + 4 + 4 * 1024 * 512, hidden)
    assert found["h"].flops == 2 * 1024 * 512 * 2048
    # Writes one element of the stack in place.
    assert (found["stored"].read, found["stored"].written) == (hidden + 4, hidden)
    # Computes only the rows that it returns.
    assert (found["first"].read, found["first"].written) == (hidden // 16, hidden // 16)
    # Two results, one of which needs the whole operand.
    assert (found["two"].read, found["two"].written) == (hidden, 2 * hidden + hidden // 16)
    # The addition is a part of the reduction.
    assert (found["total"].read, found["total"].written) == (4 * 1024 * 512 + 4, 4)
    assert set(found) == {"h", "stored", "first", "two", "total"}


def test_time_is_the_larger_of_bytes_and_operations() -> None:
    found = only(SCAN)
    product, stored, total = (found[name] for name in ("h", "stored", "total"))
    assert product.matrix_seconds(H200) == product.flops / (MATRIX_SHARE * 989e12)
    moved = stored.read + stored.written
    assert stored.memory_seconds(H200) == pytest.approx(moved / (BANDWIDTH_SHARE * 4.8e12))
    assert product.seconds(H200) == 6 * max(product.matrix_seconds(H200), product.memory_seconds(H200))
    assert stored.traffic == 6 * moved
    # A small kernel takes as long as its start.
    assert total._replace(read=4).seconds(H200) == 6 * START


def test_tpu_kernels_take_the_cycles_of_their_compiler() -> None:
    v5e = DEVICES["v5e"]
    text = """
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %y = f32[8,128]{1,0:T(8,128)} negate(%x), backend_config={"estimated_cycles":"1500"}
  %z = f32[8,128]{1,0:T(8,128)} custom-call(%y), custom_call_target="tpu_custom_call"
  ROOT %w = f32[8,128]{1,0:T(8,128)} negate(%z), backend_config={"estimated_cycles":"9223372036854775807"}
}
"""
    found = only(text)
    assert found["y"].seconds(v5e) == pytest.approx(1e-6)
    assert found["z"].seconds(v5e) == 2 * 4 * 8 * 128 / (BANDWIDTH_SHARE * v5e.bandwidth)
    assert found["w"].seconds(v5e) == 0

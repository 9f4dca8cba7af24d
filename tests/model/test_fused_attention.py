"""The attention kernels against `attend`, in Pallas's interpret mode: those for GPUs, and what both have in common."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.axes import REPLICA
from branchnorm_jax.model import fused_attention_tpu
from branchnorm_jax.model.attention import attend
from branchnorm_jax.model.fused_attention import fused_attend, supported
from branchnorm_jax.model.segments import causal_mask, same_sentence, source_mask, source_segments, target_segments
from tests.model import attention_examples
from tests.model.attention_examples import Arrays, B, errors, packed, results, shapes

example = functools.partial(attention_examples.example, heads=2, width=16)


def fused(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, rate: float = 0.0, key: jax.Array | None = None
) -> jax.Array:
    """Runs the kernels for GPUs on q, k and v in one array, or on q, and k and v, in two."""
    joined = (jnp.stack([q, k, v], axis=2),) if q.shape == k.shape else (q[:, :, None], jnp.stack([k, v], axis=2))
    return fused_attend(joined, mask, rate, key, interpret=True)


class Kernel(NamedTuple):
    """The kernels of one platform, and a shape that they support."""

    fused: Callable[..., jax.Array]
    example: Callable[..., Arrays]


KERNELS = [
    pytest.param(Kernel(fused, example), id="gpu"),
    pytest.param(
        Kernel(
            functools.partial(fused_attention_tpu.fused_attend, interpret=True),
            functools.partial(attention_examples.example, heads=4, width=64),
        ),
        id="tpu",
        marks=pytest.mark.slow,
    ),
]
both = pytest.mark.parametrize("kernel", KERNELS)


MASKS = {
    "packed": lambda: same_sentence(source_segments(packed(32)), source_segments(packed(32))),
    "packed-causal": lambda: same_sentence(target_segments(packed(64)), target_segments(packed(64))) & causal_mask(64),
    # Two blocks of queries forward, four backward.
    "blocks": lambda: causal_mask(128),
    "padding": lambda: source_mask(packed(32)),
    "cross": lambda: same_sentence(target_segments(packed(16)), source_segments(packed(64))),
}


@pytest.mark.parametrize(
    ("name", "rate"),
    [("packed", 0.0), ("packed-causal", 0.5), ("blocks", 0.5), ("padding", 0.5), ("cross", 0.0)],
)
def test_equals_attend(name: str, rate: float) -> None:
    mask = MASKS[name]()
    lengths = (mask.shape[1] if mask.shape[1] > 1 else 64, mask.shape[2])
    arrays = example(*lengths)
    assert supported(*shapes(arrays))
    actual, expected = (results(function, arrays, mask, rate) for function in (fused, attend))
    assert max(errors(actual, expected)) < 1e-6


@both
def test_masked_row_gives_the_mean(kernel: Kernel) -> None:
    arrays = kernel.example(32, 32)
    mask = jnp.ones((B, 32, 32), bool).at[1].set(False)
    y, dq, dk, _ = results(kernel.fused, arrays, mask)
    np.testing.assert_allclose(y[1], jnp.broadcast_to(arrays[2][1].mean(0), y[1].shape), rtol=1e-5, atol=1e-6)
    assert not dq[1].any() and not dk[1].any()
    assert max(errors((y, dq, dk), results(attend, arrays, mask)[:3])) < 1e-6


@both
def test_bfloat16_is_about_as_exact_as_attend(kernel: Kernel) -> None:
    arrays, mask = kernel.example(32, 32, dtype=jnp.bfloat16), MASKS["padding"]()
    with jax.enable_x64():
        exact = results(attend, tuple(x.astype(jnp.float64) for x in arrays), mask)
    ours, twin = (errors(results(function, arrays, mask), exact, np.mean) for function in (kernel.fused, attend))
    # The kernel rounds ds to bfloat16 before the products for dq and dk; `attend` does not.
    assert max(ours) < jnp.finfo(jnp.bfloat16).eps
    assert all(mine < factor * other for mine, other, factor in zip(ours, twin, (1.1, 2, 2, 1.1), strict=True))


def test_float16() -> None:
    assert all(x.dtype == jnp.float16 for x in results(fused, example(16, 16, dtype=jnp.float16), causal_mask(16), 0.1))


@both
def test_no_leak_between_sentences(kernel: Kernel) -> None:
    segments = target_segments(packed(32))
    mask = same_sentence(segments, segments) & causal_mask(32)
    q, k, v, dy = kernel.example(32, 32)
    # The cotangent is that of the second sentence alone.
    second = ((segments.ids == 2) & segments.real)[:, :, None, None]
    _, *gradients = results(kernel.fused, (q, k, v, jnp.where(second, dy, 0)), mask, 0.5)
    for gradient in gradients:
        assert not jnp.where(second, 0, gradient).any()
        assert jnp.where(second, gradient, 0).any()


def test_dropout_depends_only_on_the_key() -> None:
    q, k, v, _ = example(32, 32)
    everywhere = jnp.ones((1, 1, 1), bool)

    @jax.jit
    def kept(seed: int) -> jax.Array:
        # With v = 1, the output is the sum of a query's attention weights after dropout.
        return fused(q, k, jnp.ones_like(v), everywhere, 0.5, jax.random.key(seed))

    assert (kept(1) == kept(1)).all()
    assert (kept(1) != kept(2)).any()
    assert abs(kept(1).mean() - 1) < 0.05


@both
def test_scan_remat_and_replicas(kernel: Kernel) -> None:
    """Each replica of `jax.vmap` continues the indices of the one before, as in `random_bits`."""
    q, k, v, _ = kernel.example(32, 32)

    def loss(function: Callable[..., jax.Array], q: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            return function(x, k[:1], v[:1], causal_mask(32), 0.5, jax.random.fold_in(jax.random.key(0), number)), None

        return jax.lax.scan(layer, q, jnp.arange(2))[0].sum()

    def gradient(function: Callable[..., jax.Array]) -> jax.Array:
        differentiate = jax.grad(lambda q: loss(function, q))
        return jax.jit(jax.vmap(differentiate, axis_name=REPLICA))(q[:, None])

    actual, expected = gradient(kernel.fused), gradient(attend)
    assert errors((actual,), (expected,))[0] < 1e-6
    assert (actual[0] != actual[1]).any()


@pytest.mark.parametrize(
    ("length", "keys", "width", "dtype", "expected"),
    [
        (32, 32, 64, jnp.bfloat16, True),
        (1024, 256, 64, jnp.bfloat16, True),
        (32, 512, 64, jnp.bfloat16, False),
        (32, 256, 128, jnp.bfloat16, False),
        (32, 256, 64, jnp.float32, False),
        (8, 32, 64, jnp.bfloat16, False),
        (48, 32, 64, jnp.float32, False),
        (32, 32, 48, jnp.float32, False),
        (32, 32, 64, jnp.int32, False),
    ],
)
def test_supported(length: int, keys: int, width: int, dtype: jnp.dtype, expected: bool) -> None:
    q, k = (jax.ShapeDtypeStruct((1, size, 1, width), dtype) for size in (length, keys))
    assert supported(q, k) is expected

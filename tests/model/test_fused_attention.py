"""The attention kernels against `attend`, in Pallas's interpret mode."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.axes import REPLICA
from branchnorm_jax.model.attention import attend
from branchnorm_jax.model.fused_attention import fused_attend, supported
from branchnorm_jax.model.segments import causal_mask, same_sentence, source_mask, source_segments, target_segments
from branchnorm_jax.tokens import EOS, PAD

B, H, K = 2, 2, 16

Arrays = tuple[jax.Array, ...]


def packed(length: int) -> jax.Array:
    """Returns rows [B, length] of three sentences each, with padding at the end."""
    tokens = np.full((B, length), 7)
    tokens[0, [length // 4, length // 2, length - 4]] = EOS
    tokens[1, [2, length // 3, length - 1]] = EOS
    tokens[0, length - 3 :] = PAD
    return jnp.array(tokens)


def example(length: int, keys: int, dtype: jnp.dtype = jnp.float32) -> Arrays:
    """Returns q, k, v and the cotangent of the output."""
    draw = np.random.default_rng(length + keys).normal
    return tuple(jnp.array(draw(size=(B, size, H, K)), dtype) for size in (length, keys, keys, length))


def results(function: Callable[..., jax.Array], arrays: Arrays, mask: jax.Array, rate: float = 0.0) -> Arrays:
    """Returns the output and the gradients of q, k and v."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Arrays:
        y, backward = jax.vjp(lambda *qkv: function(*qkv, mask, rate, jax.random.key(5)), q, k, v)
        return y, *backward(dy)

    return run(*arrays)


fused = functools.partial(fused_attend, interpret=True)


def errors(actual: Arrays, expected: Arrays, size: Callable[[np.ndarray], np.floating] = np.max) -> list[float]:
    """Returns the size of each array's differences, divided by the size of the expected values."""
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(actual, expected, strict=True)]
    return [float(size(abs(x - y)) / size(abs(y))) for x, y in pairs]


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
    assert supported(*arrays[:3])
    actual, expected = (results(function, arrays, mask, rate) for function in (fused, attend))
    assert max(errors(actual, expected)) < 1e-6


def test_masked_row_gives_the_mean() -> None:
    arrays = example(32, 32)
    mask = jnp.ones((B, 32, 32), bool).at[1].set(False)
    y, dq, dk, _ = results(fused, arrays, mask)
    np.testing.assert_allclose(y[1], jnp.broadcast_to(arrays[2][1].mean(0), y[1].shape), rtol=1e-5, atol=1e-6)
    assert not dq[1].any() and not dk[1].any()
    assert max(errors((y, dq, dk), results(attend, arrays, mask)[:3])) < 1e-6


def test_bfloat16_is_about_as_exact_as_attend() -> None:
    arrays, mask = example(32, 32, jnp.bfloat16), MASKS["padding"]()
    with jax.enable_x64():
        exact = results(attend, tuple(x.astype(jnp.float64) for x in arrays), mask)
    kernel, twin = (errors(results(function, arrays, mask), exact, np.mean) for function in (fused, attend))
    # The kernel rounds ds to bfloat16 before the products for dq and dk; `attend` does not.
    assert max(kernel) < jnp.finfo(jnp.bfloat16).eps
    assert all(mine < factor * other for mine, other, factor in zip(kernel, twin, (1.1, 2, 2, 1.1), strict=True))


def test_float16() -> None:
    assert all(x.dtype == jnp.float16 for x in results(fused, example(16, 16, jnp.float16), causal_mask(16), 0.1))


def test_no_leak_between_sentences() -> None:
    segments = target_segments(packed(32))
    mask = same_sentence(segments, segments) & causal_mask(32)
    q, k, v, dy = example(32, 32)
    # The cotangent is that of the second sentence alone.
    second = ((segments.ids == 2) & segments.real)[:, :, None, None]
    _, *gradients = results(fused, (q, k, v, jnp.where(second, dy, 0)), mask, 0.5)
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


def test_scan_remat_and_replicas() -> None:
    """Each replica of `jax.vmap` continues the indices of the one before, as in `random_bits`."""
    q, k, v, _ = example(32, 32)

    def loss(function: Callable[..., jax.Array], q: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            return function(x, k[:1], v[:1], causal_mask(32), 0.5, jax.random.fold_in(jax.random.key(0), number)), None

        return jax.lax.scan(layer, q, jnp.arange(2))[0].sum()

    def gradient(function: Callable[..., jax.Array]) -> jax.Array:
        differentiate = jax.grad(lambda q: loss(function, q))
        return jax.jit(jax.vmap(differentiate, axis_name=REPLICA))(q[:, None])

    actual, expected = gradient(fused), gradient(attend)
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
    assert supported(q, k, k) is expected  # type: ignore[arg-type]

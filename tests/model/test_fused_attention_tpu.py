"""The attention kernels for TPUs against `attend`, in Pallas's interpret mode."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.axes import REPLICA
from branchnorm_jax.model.attention import attend
from branchnorm_jax.model.fused_attention_tpu import fused_attend, supported
from branchnorm_jax.model.segments import causal_mask, same_sentence, source_mask, source_segments, target_segments
from branchnorm_jax.tokens import EOS, PAD

pytestmark = pytest.mark.slow

B, H, K = 2, 4, 64

Arrays = tuple[jax.Array, ...]


def packed(length: int) -> jax.Array:
    """Returns rows [B, length] of three sentences each, with padding at the end."""
    tokens = np.full((B, length), 7)
    tokens[0, [length // 4, length // 2, length - 4]] = EOS
    tokens[1, [2, length // 3, length - 1]] = EOS
    tokens[0, length - 3 :] = PAD
    return jnp.array(tokens)


def example(length: int, keys: int, dtype: jnp.dtype = jnp.float32, heads: int = H, width: int = K) -> Arrays:
    """Returns q, k, v and the cotangent of the output."""
    draw = np.random.default_rng(length + keys).normal
    return tuple(jnp.array(draw(size=(B, size, heads, width)), dtype) for size in (length, keys, keys, length))


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
    # A tile has four heads.
    "packed": lambda: same_sentence(source_segments(packed(32)), source_segments(packed(32))),
    # Two heads.
    "packed-causal": lambda: same_sentence(target_segments(packed(64)), target_segments(packed(64))) & causal_mask(64),
    # One head, and half of its queries.
    "blocks": lambda: causal_mask(256),
    "padding": lambda: source_mask(packed(32)),
    "cross": lambda: same_sentence(target_segments(packed(16)), source_segments(packed(64))),
}


@pytest.mark.parametrize(
    ("name", "queries", "rate"),
    [
        ("packed", 32, 0.0),
        ("packed-causal", 64, 0.5),
        ("blocks", 256, 0.5),
        ("padding", 256, 0.5),
        ("cross", 16, 0.5),
    ],
)
def test_equals_attend(name: str, queries: int, rate: float) -> None:
    mask = MASKS[name]()
    arrays = example(queries, mask.shape[2])
    assert supported(*arrays[:3])
    actual, expected = (results(function, arrays, mask, rate) for function in (fused, attend))
    assert max(errors(actual, expected)) < 1e-6


@pytest.mark.parametrize(("heads", "width"), [(8, 32), (1, 128), (6, 64)])
def test_heads(heads: int, width: int) -> None:
    arrays, mask = example(32, 32, heads=heads, width=width), MASKS["packed"]()
    assert supported(*arrays[:3])
    actual, expected = (results(function, arrays, mask, 0.5) for function in (fused, attend))
    assert max(errors(actual, expected)) < 1e-6


def test_programs_and_groups_of_rows() -> None:
    """Two programs of 16 rows, which compute 8 rows at once."""
    arrays = tuple(jnp.tile(x, (16, 1, 1, 1)) for x in example(32, 32))
    mask = jnp.tile(MASKS["packed"](), (16, 1, 1))
    actual, expected = (results(function, arrays, mask, 0.5) for function in (fused, attend))
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


def test_dropout_mask_is_that_of_attend() -> None:
    q, keys = example(32, 32)[0], jnp.zeros((B, 32, H, 32))
    # All attention weights are equal, so output k is 1 / 16 where the weight of key k is kept, and 0 elsewhere.
    values = jnp.broadcast_to(jnp.eye(32)[:, None], keys.shape)
    everywhere = jnp.ones((1, 1, 1), bool)
    actual, expected = (results(f, (q[..., :32], keys, values, keys), everywhere, 0.5)[0] for f in (fused, attend))
    np.testing.assert_array_equal(actual != 0, expected != 0)
    assert abs((actual == 0).mean() - 0.5) < 0.05


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
    ("length", "keys", "shape", "dtype", "expected"),
    [
        (32, 32, (8, 64), jnp.bfloat16, True),
        (512, 256, (8, 64), jnp.float32, True),
        (16, 32, (6, 64), jnp.bfloat16, True),
        (32, 32, (1, 64), jnp.bfloat16, False),
        (32, 32, (3, 64), jnp.bfloat16, False),
        (32, 1024, (8, 64), jnp.bfloat16, False),
        (512, 512, (8, 256), jnp.float32, True),
        (512, 512, (8, 512), jnp.float32, False),
        (8, 32, (8, 64), jnp.bfloat16, False),
        (48, 32, (8, 64), jnp.float32, False),
        (32, 32, (8, 48), jnp.float32, False),
        (32, 32, (8, 64), jnp.float16, False),
    ],
)
def test_supported(length: int, keys: int, shape: tuple[int, int], dtype: jnp.dtype, expected: bool) -> None:
    q, k = (jax.ShapeDtypeStruct((1, size, *shape), dtype) for size in (length, keys))
    assert supported(q, k, k) is expected  # type: ignore[arg-type]

"""What only the attention kernels for TPUs do, against `attend`, in Pallas's interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.attention import attend
from branchnorm_jax.model.fused_attention_tpu import fused_attend, supported
from branchnorm_jax.model.segments import causal_mask, same_sentence, source_mask, source_segments, target_segments
from tests.model import attention_examples
from tests.model.attention_examples import B, errors, packed, results, shapes

pytestmark = pytest.mark.slow

H, K = 4, 64

example = functools.partial(attention_examples.example, heads=H, width=K)
fused = functools.partial(fused_attend, interpret=True)

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
    assert supported(*shapes(arrays))
    actual, expected = (results(function, arrays, mask, rate) for function in (fused, attend))
    assert max(errors(actual, expected)) < 1e-6


@pytest.mark.parametrize(("heads", "width"), [(8, 32), (1, 128), (6, 64)])
def test_heads(heads: int, width: int) -> None:
    arrays, mask = example(32, 32, heads=heads, width=width), MASKS["packed"]()
    assert supported(*shapes(arrays))
    actual, expected = (results(function, arrays, mask, 0.5) for function in (fused, attend))
    assert max(errors(actual, expected)) < 1e-6


def test_programs_and_groups_of_rows() -> None:
    """Two programs of 16 rows, which compute 8 rows at once."""
    arrays = tuple(jnp.tile(x, (16, 1, 1, 1)) for x in example(32, 32))
    mask = jnp.tile(MASKS["packed"](), (16, 1, 1))
    actual, expected = (results(function, arrays, mask, 0.5) for function in (fused, attend))
    assert max(errors(actual, expected)) < 1e-6


def test_dropout_mask_is_that_of_attend() -> None:
    q, keys = example(32, 32)[0], jnp.zeros((B, 32, H, 32))
    # All attention weights are equal, so output k is 1 / 16 where the weight of key k is kept, and 0 elsewhere.
    values = jnp.broadcast_to(jnp.eye(32)[:, None], keys.shape)
    everywhere = jnp.ones((1, 1, 1), bool)
    actual, expected = (results(f, (q[..., :32], keys, values, keys), everywhere, 0.5)[0] for f in (fused, attend))
    np.testing.assert_array_equal(actual != 0, expected != 0)
    assert abs((actual == 0).mean() - 0.5) < 0.05


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
    assert supported(q, k) is expected

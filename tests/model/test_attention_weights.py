"""Compares the attention weights that the decoder reports with NumPy in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from tests.model.test_reference import ALPHA, SIZES, SOURCE, TARGET, random_params
from tests.reference import transformer as reference
from tests.reference.algebra import STREAMS, every_method

LAYERS = 3
CONFIG = ModelConfig(**(SIZES | {"decoder_layers": LAYERS}))
UNIFORM = jnp.full(LAYERS, 1 / LAYERS)


def model_of(**changes: Any) -> Transformer:
    return Transformer(dataclasses.replace(CONFIG, **changes), 12, 12)


def attention(model: Transformer, params: Any, weights: Any, alpha: Any = ALPHA) -> np.ndarray:
    """Returns the attention weights [B, T, S] for the given weights of the layers."""
    result = model.attention(params, jnp.asarray(SOURCE), jnp.asarray(TARGET), jnp.asarray(alpha), jnp.asarray(weights))
    return np.asarray(result)


@pytest.mark.parametrize("method", every_method(quick=STREAMS))
def test_attention_weights_of_every_method_equal_the_reference(method: str) -> None:
    """The weights of the layers all differ, so the sum changes if two layers are swapped."""
    weights = np.array([0.5, 0.3, 0.2])
    with jax.enable_x64(True), jax.disable_jit():
        model = model_of(method=method, dtype="float64", carry_dtype="float64")
        params = random_params(model, "float64")
        result = attention(model, params, weights)
    positions = np.arange(6)[:, None] / 10000 ** (2 * np.arange(4) / 8)
    positions = np.concatenate([np.sin(positions), np.cos(positions)], -1).astype(np.float32)
    table = params["embedding"]["shared"]
    source, target = (table[ids] * np.sqrt(8) + positions[: ids.shape[1]] for ids in (SOURCE, TARGET))
    heads: list[dict[int, np.ndarray]] = []
    reference.forward(method, params, source, target, SOURCE != 0, heads=2, alpha=ALPHA, attention_weights=heads)
    expected = [np.mean(list(layer.values()), axis=0) for layer in heads]
    np.testing.assert_allclose(result, np.tensordot(weights, np.stack(expected), 1), atol=1e-9)
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3, "all layers have the same attention weights"


def test_rows_sum_to_one_and_padding_has_no_weight() -> None:
    model = model_of()
    result = attention(model, random_params(model, "float32"), UNIFORM)
    assert result.shape == (*TARGET.shape, SOURCE.shape[1])
    assert result.dtype == np.float32
    np.testing.assert_allclose(result.sum(-1), 1, atol=1e-6)
    assert (result[np.broadcast_to((SOURCE == 0)[:, None], result.shape)] == 0).all()
    assert (result[0, :, :4] > 0).all()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dlcl", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *((method, {}) for method in ("branchnorm", "dlcl_post", "residual_dual")),
                ("branchnorm", dict(unroll=2)),
                ("branchnorm", dict(remat="nested", group=2)),
                ("dlcl", dict(remat="nested", group=2)),
            )
        ),
    ],
    ids=str,
)
def test_scan_equals_loop(method: str, options: dict[str, Any]) -> None:
    model = model_of(method=method, **options)
    params = random_params(model, "float32")
    with jax.disable_jit():  # a scan is a Python loop there
        loop = attention(model, params, UNIFORM)
    np.testing.assert_allclose(attention(model, params, UNIFORM), loop, atol=1e-6)


def test_layers_with_skipped_branches_return_their_attention() -> None:
    model = model_of(alpha_order="bottom_up")
    params = random_params(model, "float32")
    alpha = {"encoder": jnp.ones(CONFIG.encoder_layers), "decoder": jnp.array([1.0, 0.5, 0.0])}
    result = model.attention(params, jnp.asarray(SOURCE), jnp.asarray(TARGET), alpha, jnp.array([0.0, 0.0, 1.0]))
    uniform = model_of()
    expected = uniform.attention(params, jnp.asarray(SOURCE), jnp.asarray(TARGET), alpha, jnp.array([0.0, 0.0, 1.0]))
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_memory_does_not_grow_with_depth() -> None:
    """Compares the temporary memory of the compiled programs, without parameters."""

    def temporary(layers: int) -> int:
        model = model_of(decoder_layers=layers, encoder_layers=1)
        tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
        run = jax.jit(functools.partial(Transformer.attention, model))
        weights = jax.ShapeDtypeStruct((layers,), jnp.float32)
        lowered = run.lower(model.abstract_params(), tokens, tokens, jax.ShapeDtypeStruct((), jnp.float32), weights)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    one_map = 4 * 64 * 64 * 4
    assert temporary(40) - temporary(4) < one_map

"""Several residual streams and value residuals: loops, caches, both families, and what they reduce to."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model import streams
from branchnorm_jax.model.incremental import unstack_decoder
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from tests.decoding.cached import cached_logits

SIZES: dict[str, Any] = dict(decoder_layers=3, width=16, ffn_width=24, heads=2, dropout=0.1)
FAMILIES: dict[str, dict[str, Any]] = {
    "encoder_decoder": dict(encoder_layers=2),
    "decoder": dict(encoder_layers=0, family="decoder", positions="rotary"),
}
METHOD_NAMES = ("gpas", "siamese_norm", "mhc", "block_attnres")
MODELS: dict[str, dict[str, Any]] = {
    **{method: dict(method=method) for method in METHOD_NAMES},
    "value_residual": dict(method="pre_ln", value_residual=True),
}
SOURCE = jnp.array([[5, 6, 7, 1, 0, 0], [9, 8, 7, 6, 5, 1]])
INPUTS = decoder_inputs(jnp.array([[4, 5, 6, 3, 1], [7, 8, 9, 3, 1]]))
ALPHA = jnp.float32(1.0)


def random_params(model: Transformer) -> Any:
    """Returns initial parameters plus noise, so that none is 0."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), model.init(jax.random.key(0)))


# `test_every_method.py` has caches and loops of all methods in encoder-decoder models.
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("mhc", "decoder"),
        pytest.param("value_residual", "encoder_decoder", marks=pytest.mark.slow),
        *(pytest.param(name, "decoder", marks=pytest.mark.slow) for name in MODELS if name != "mhc"),
    ],
)
def test_cached_decoding_equals_teacher_forcing(name: str, family: str) -> None:
    model = Transformer(ModelConfig(**SIZES, **FAMILIES[family], **MODELS[name]), 30, 30)
    params = random_params(model)
    expected = model(params, SOURCE, INPUTS, ALPHA)
    for each in (params, unstack_decoder(model, params)):
        ours = cached_logits(model, each, SOURCE, INPUTS, ALPHA)[:, 0]
        np.testing.assert_allclose(ours, expected, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_loops_give_the_same_gradient(name: str) -> None:
    """A scan, a loop, and a scan whose backward pass runs groups of layers again."""
    config = ModelConfig(**SIZES, **FAMILIES["decoder"], **MODELS[name])
    params = random_params(Transformer(config, 30, 30))

    def gradient(**options: Any) -> Any:
        model = Transformer(dataclasses.replace(config, **options), 30, 30)

        def scalar(params: Any) -> jax.Array:
            out = model.hidden(params, INPUTS, INPUTS, ALPHA, jax.random.key(1))[0]
            return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum()

        return jax.jit(jax.grad(scalar))(params)

    scan = gradient()
    norm = float(jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(scan))))
    for options in (dict(unroll=3), dict(remat="nested", group=2)):
        for ours, theirs in zip(jax.tree.leaves(scan), jax.tree.leaves(gradient(**options)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-6 * norm)


def test_a_zero_gate_leaves_pre_ln_as_it_is() -> None:
    gpas, plain = (
        Transformer(ModelConfig(**SIZES, **FAMILIES["decoder"], method=m), 30, 30) for m in ("gpas", "pre_ln")
    )
    params = gpas.init(jax.random.key(0))
    np.testing.assert_array_equal(gpas(params, INPUTS, INPUTS, ALPHA), plain(params, INPUTS, INPUTS, ALPHA))


def test_values_of_the_first_layer_can_be_all_values() -> None:
    """With factors of 1 and 0, the matrices v after the first layer have no effect; with 0 and 1, it is Pre-LN."""
    model = Transformer(ModelConfig(**SIZES, **FAMILIES["decoder"], **MODELS["value_residual"]), 30, 30)
    params = random_params(model)

    def logits(model: Transformer, shares: list[float], factor: float) -> np.ndarray:
        attention = params["decoder"]["self"]
        scale = jnp.array([1.0, factor, factor])
        v = {name: leaf * scale.reshape(-1, *(1,) * (leaf.ndim - 1)) for name, leaf in attention["v"].items()}
        decoder = params["decoder"] | {"self": attention | {"v": v}, "value_shares": jnp.array([shares] * 3)}
        return np.asarray(model(params | {"decoder": decoder}, INPUTS, INPUTS, ALPHA))

    np.testing.assert_array_equal(logits(model, [1.0, 0.0], 1.0), logits(model, [1.0, 0.0], 7.0))
    plain = Transformer(dataclasses.replace(model.config, value_residual=False), 30, 30)
    np.testing.assert_allclose(logits(model, [0.0, 1.0], 1.0), logits(plain, [0.0, 1.0], 1.0), atol=1e-6)
    assert not np.allclose(logits(model, [0.5, 0.5], 1.0), logits(model, [0.5, 0.5], 7.0), atol=1e-3)


def test_mixing_matrices_are_doubly_stochastic() -> None:
    mixing = streams.doubly_stochastic(jax.random.normal(jax.random.key(0), (50, 4, 4)))
    assert float(mixing.min()) > 0
    np.testing.assert_allclose(mixing.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(mixing.sum(-2), 1.0, rtol=1e-4)


@pytest.mark.parametrize(("layers", "starts"), [(3, [0, 1, 2]), (8, [*range(8)]), (12, [0, 2, 3, 5, 6, 8, 9, 11])])
def test_first_layers_of_blocks(layers: int, starts: list[int]) -> None:
    block, begins = streams.Blocks.by_layer(layers)
    assert np.flatnonzero(begins).tolist() == starts
    np.testing.assert_array_equal(np.cumsum(begins) - 1, block)


def test_carries_of_several_streams() -> None:
    """Per layer, mHC stores 4 streams with remat=full, SiameseNorm 2, and block AttnRes 1 + 8."""
    x = jnp.zeros((2, 5, 16))
    carries = {
        method: sum(leaf.size for leaf in jax.tree.leaves(streams.KINDS[METHODS[method].stream].start(x, 20)))
        for method in ("pre_ln", "siamese_norm", "mhc", "block_attnres")
    }
    assert carries == {"pre_ln": x.size, "siamese_norm": 2 * x.size, "mhc": 4 * x.size, "block_attnres": 9 * x.size}

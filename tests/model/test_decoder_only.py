"""Decoder-only models: constants of depth, causality, documents, positions, and a model written in PyTorch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model import relative
from branchnorm_jax.model.coefficients import by_layer
from branchnorm_jax.model.growth import levels
from branchnorm_jax.model.incremental import CurrentTokens, prefill, start_cache, step, unstack_decoder
from branchnorm_jax.model.methods import METHODS, get_recipe
from branchnorm_jax.model.recipe import Depth
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.tokens import EOS, PAD
from tests.decoding.cached import cached_logits
from tests.model.test_reference import random_params
from tests.reference.algebra import STREAMS, every_method

INPUTS = jnp.array([[EOS, 5, 6, 7, EOS, 8, 9, 4], [3, 4, EOS, 9, 8, 7, PAD, PAD]])


def network(method: str = "pre_ln", **options: Any) -> Transformer:
    sizes = dict(width=8, ffn_width=12, heads=2, encoder_layers=0, decoder_layers=4, dropout=0.0)
    return Transformer(ModelConfig(family="decoder", method=method, **sizes | options), 12, 12)


def logits(model: Transformer, params: Any, inputs: jax.Array) -> jax.Array:
    return model(params, inputs, inputs, jnp.float32(0.7))


@pytest.mark.parametrize("layers", [1, 6, 100])
def test_constants_of_depth_count_two_sublayers_per_layer(layers: int) -> None:
    depth = Depth(0, layers)

    def of(rule: Any) -> np.ndarray:
        return by_layer(rule, depth, "decoder")

    deepnorm, keel = get_recipe("deepnorm"), get_recipe("keel")
    np.testing.assert_allclose(of(deepnorm.skip.start), np.full(layers, (2 * layers) ** 0.25))
    np.testing.assert_allclose(of(deepnorm.gain["fc1"]), np.full(layers, (8 * layers) ** -0.25))
    np.testing.assert_allclose(of(keel.skip.start), [1.0] + [2.0 * layers] * (layers - 1))
    np.testing.assert_allclose(of(get_recipe("sub_ln").gain["fc1"]), math.sqrt(math.log(2 * layers)))
    np.testing.assert_allclose(of(get_recipe("fixup").gain["fc1"]), (2 * layers) ** -0.5)
    np.testing.assert_allclose(of(get_recipe("admin_constant").skip.start), math.sqrt(2 * layers))
    np.testing.assert_allclose(of(get_recipe("t_fixup").gain["o"]), 0.67 * layers**-0.25)
    np.testing.assert_allclose(levels("1/sqrt(n)", depth, "decoder"), (2 * layers) ** -0.5)


def test_parameters_are_those_of_a_model_without_encoder_and_cross_attention() -> None:
    shapes = network("post_ln", output_bias=True).abstract_params()
    d, f = 8, 12
    layer = 4 * (d * d + d) + (d * f + f) + (f * d + d) + 2 * 2 * d
    assert sorted(shapes) == ["decoder", "embedding"]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 4 * layer + 12 * d + 12
    untied = network("post_ln", shared_embeddings="none").abstract_params()["embedding"]
    assert {name: leaf.shape for name, leaf in untied.items()} == {"target": (12, d), "output": (12, d)}


@pytest.mark.parametrize("method", every_method(quick=STREAMS))
def test_a_token_depends_only_on_earlier_tokens_of_its_document(method: str) -> None:
    model = network(method)
    params = random_params(model, "float32")
    before = logits(model, params, INPUTS)
    after = logits(model, params, INPUTS.at[0, 5].set(3))
    np.testing.assert_allclose(after[0, :5], before[0, :5], atol=1e-5)
    assert float(jnp.abs(after[0, 5:] - before[0, 5:]).max(-1).min()) > 1e-6
    first = logits(model, params, INPUTS.at[0, 2].set(3))  # in the first document of the row
    np.testing.assert_allclose(first[0, 4:], before[0, 4:], atol=1e-5)
    alone = logits(model, params, INPUTS[:1, 4:])
    np.testing.assert_allclose(alone[0], before[0, 4:], atol=1e-4)


@pytest.mark.parametrize("positions", ["marian", "tensor2tensor", "fairseq", "learned", "relative", "rotary"])
def test_cached_decoding_equals_teacher_forcing(positions: str) -> None:
    model = network(positions=positions, max_positions=8, relative_buckets=4, relative_distance=6)
    params, inputs = model.init(jax.random.key(0)), INPUTS[1:, :2].repeat(3, axis=1)
    expected = logits(model, params, inputs)
    cached = cached_logits(model, params, inputs, inputs, jnp.float32(0.7), 2)
    np.testing.assert_allclose(cached[:, 0], expected, atol=2e-5)
    np.testing.assert_allclose(cached[:, 1], expected, atol=2e-5)


@pytest.mark.parametrize("unstacked", [False, True])
@pytest.mark.parametrize("method", every_method(quick=STREAMS))
def test_prompts_are_read_at_once(method: str, unstacked: bool) -> None:
    check_prefill(method, "marian", unstacked)


@pytest.mark.parametrize("positions", ["learned", "relative", "rotary"])
def test_prompts_are_read_at_once_whatever_their_positions(positions: str) -> None:
    check_prefill("post_ln", positions, unstacked=False)


def check_prefill(method: str, positions: str, unstacked: bool) -> None:
    """Compares the logits after prompts of different lengths with those of teacher forcing."""
    model = network(method, positions=positions, max_positions=8, relative_buckets=4, relative_distance=6)
    params = random_params(model, "float32")
    layers = unstack_decoder(model, params) if unstacked else params
    prompts, following, ring = [[EOS, 5, 6, 7, 8], [EOS, 4], []], [9, 3], 7
    inputs = jnp.array([[PAD] * (6 - len(ids)) + ids for ids in prompts])
    lengths, slots, alpha = np.array([[5], [2], [0]]), np.arange(2 * ring), jnp.float32(0.7)
    read = (slots >= 2 * (ring - lengths)) & (slots % 2 == 0)
    current = CurrentTokens(
        jnp.array([following] * 3),
        model.positions(params, "decoder", ring)[lengths],
        jnp.broadcast_to(read[:, None], (3, 2, 2 * ring)),
        jnp.int32(0),
    )

    @jax.jit
    def logits_after(layers: Any) -> jax.Array:
        caches = start_cache(model, layers, jnp.zeros((3, 1, 1)), 2 * ring)
        return step(model, layers, prefill(model, layers, caches, inputs, 2, alpha), None, current, alpha)[0]

    found = logits_after(layers)
    whole = jnp.array([[*ids, token] + [PAD] * (5 - len(ids)) for ids in prompts for token in following])
    expected = jax.jit(logits, static_argnums=0)(model, params, whole)
    for row, ids in enumerate(prompts):
        for hypothesis in range(2):
            np.testing.assert_allclose(
                found[row, hypothesis], expected[2 * row + hypothesis, len(ids)], atol=1e-4, err_msg=f"{row}"
            )


def test_rotary_scores_depend_on_the_distance() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 6))
    table = relative.rotations(40, 6)

    def complex_score(distance: int) -> float:
        """Rotates pairs of features as complex numbers."""
        turn = np.exp(1j * distance * 10000.0 ** (-np.arange(3) / 3))
        return float(((q[:3] + 1j * q[3:]) * turn * np.conj(k[:3] + 1j * k[3:])).real.sum())

    def score(t: int, s: int) -> float:
        each = (jnp.asarray(x, jnp.float32)[None, None, None] for x in (q, k))
        q_t, k_s = (relative.rotated(x, jnp.asarray(table[None, None, at])) for x, at in zip(each, (t, s), strict=True))
        return float((q_t * k_s).sum())

    for t, s in ((0, 0), (5, 2), (35, 32), (39, 0)):
        assert score(t, s) == pytest.approx(complex_score(t - s), abs=1e-4)


def test_families_differ_only_in_cross_attention() -> None:
    """A decoder with cross-attention outputs of 0 computes what a decoder alone does."""
    alone = network("post_ln")
    both = Transformer(
        ModelConfig(method="pre_ln", width=8, ffn_width=12, heads=2, encoder_layers=1, decoder_layers=4, dropout=0.0),
        12,
        12,
    )
    alone, params = network("pre_ln"), random_params(both, "float32")
    silent = jax.tree.map(jnp.zeros_like, params["decoder"]["cross"]["o"])
    params["decoder"]["cross"] = params["decoder"]["cross"] | {"o": silent}
    own = {name: params[name] for name in ("embedding", "decoder_norm")}
    own["decoder"] = {name: leaf for name, leaf in params["decoder"].items() if not name.startswith("cross")}
    np.testing.assert_allclose(
        alone(own, INPUTS, INPUTS, jnp.ones(())), both(params, INPUTS, INPUTS, jnp.ones(())), atol=1e-6
    )


def test_every_method_is_a_decoder() -> None:
    for method in METHODS:
        assert "encoder" not in network(method).abstract_params()

"""DeepNorm's constants, initial weights and parameter counts against published or derived numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.config import ModelConfig
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.depth_rules import deepnorm_alpha, deepnorm_beta
from branchnorm_jax.model.initializers import get_base
from branchnorm_jax.model.methods import METHODS, get_recipe
from branchnorm_jax.model.recipe import Depth
from branchnorm_jax.model.transformer import Transformer

init = jax.jit(Transformer.init, static_argnums=0)

# N-M, alpha and beta of the encoder, alpha and beta of the decoder.
DEEPNORM = [
    (6, 6, 1.417938, 0.496989, 2.059767, 0.343295),
    (12, 12, 1.760878, 0.400198, 2.449490, 0.288675),
    (18, 18, 1.998746, 0.352571, 2.710806, 0.260847),
    (50, 50, 2.750509, 0.256207, 3.499636, 0.202052),
    (100, 100, 3.415742, 0.206310, 4.161791, 0.169904),
    (250, 250, 4.548218, 0.154940, 5.233176, 0.135120),
    (500, 500, 5.648240, 0.124765, 6.223330, 0.113622),
    (60, 12, 2.633126, 0.267629, 2.449490, 0.288675),
]


@pytest.mark.parametrize(("n", "m", "alpha_e", "beta_e", "alpha_d", "beta_d"), DEEPNORM)
def test_deepnorm_constants(n: int, m: int, alpha_e: float, beta_e: float, alpha_d: float, beta_d: float) -> None:
    np.testing.assert_allclose(deepnorm_alpha(Depth(n, m)), (alpha_e, alpha_d), atol=5e-7)
    np.testing.assert_allclose(deepnorm_beta(Depth(n, m)), (beta_e, beta_d), atol=5e-7)


@pytest.mark.parametrize(
    ("method", "counts"),
    [
        ("post_ln", (44_138_496, 132_415_488, 735_641_600)),
        ("deepnorm", (44_138_496, 132_415_488, 735_641_600)),
        ("branchnorm", (44_138_496, 132_415_488, 735_641_600)),
        ("pre_ln", (44_140_544, 132_417_536, 735_643_648)),
    ],
)
def test_parameter_counts(method: str, counts: tuple[int, ...]) -> None:
    for layers, expected in zip((6, 18, 100), counts, strict=True):
        model = Transformer(ModelConfig(method=method, encoder_layers=layers, decoder_layers=layers), 32768, 32768)
        params = model.abstract_params()
        total = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert total - 32768 * 512 == expected


def test_six_layers_with_shared_embedding_count() -> None:
    params = Transformer(ModelConfig(method="post_ln"), 32768, 32768).abstract_params()
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 60_915_712


@pytest.mark.parametrize(
    ("sharing", "tables"), [("all", 1), ("decoder", 2), ("none", 3)], ids=["all", "decoder", "none"]
)
def test_embedding_tables(sharing: str, tables: int) -> None:
    params = Transformer(ModelConfig(width=8, heads=2, shared_embeddings=sharing), 30, 30).abstract_params()
    assert sum(leaf.size for leaf in jax.tree.leaves(params["embedding"])) == tables * 30 * 8


@pytest.mark.parametrize(
    ("base", "matrix", "d_in", "d_out", "bound", "std"),
    [
        ("xavier_uniform", "o", 512, 512, 0.0765466, 0.0441942),
        ("xavier_uniform", "q", 512, 512, 0.0541266, 0.03125),
        ("xavier_uniform", "fc1", 512, 2048, 0.0484123, 0.0279508),
        ("fairseq", "fc1", 512, 2048, 0.0441942, 0.0255155),
        ("fairseq", "fc2", 2048, 512, 0.0220971, 0.0127578),
        ("xavier_normal", "fc2", 2048, 512, None, 0.0279508),
        ("xavier_normal", "q", 512, 512, None, 0.0441942),
    ],
)
def test_initial_statistics(base: str, matrix: str, d_in: int, d_out: int, bound: float | None, std: float) -> None:
    draw = np.asarray(get_base(base).kernel[matrix](jax.random.key(1), (d_in, d_out), d_in, d_out))
    # The standard error of a standard deviation from n values is about std / sqrt(2n): 5 of them.
    np.testing.assert_allclose(draw.std(), std, rtol=5 / np.sqrt(2 * draw.size))
    assert abs(draw.mean()) < 5 * std / np.sqrt(draw.size)
    if bound is not None:
        assert 0.999 * bound < np.abs(draw).max() <= bound * (1 + 1e-6)


def test_fairseq_biases_are_random_but_for_the_output_projection() -> None:
    model = Transformer(ModelConfig(width=64, heads=4, ffn_width=64, init="fairseq", method="post_ln"), 20, 20)
    attention = init(model, jax.random.key(0))["encoder"]["self"]
    assert float(jnp.abs(attention["o"]["bias"]).max()) == 0
    assert 0.9 * 64**-0.5 < float(jnp.abs(attention["q"]["bias"]).max()) <= 64**-0.5


@pytest.mark.parametrize("method", ["deepnorm", "branchnorm"])
def test_deepnorm_gains_in_the_model(method: str) -> None:
    layers, d, f = 18, 64, 256
    config = ModelConfig(
        method=method, encoder_layers=layers, decoder_layers=layers, width=d, heads=4, ffn_width=f, activation="swiglu"
    )
    params = init(Transformer(config, 20, 20), jax.random.key(0))
    beta = deepnorm_beta(Depth(layers, layers))
    for stack, sublayers in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        gain = getattr(beta, stack)
        for sublayer in sublayers:
            for matrix, expected in (("q", 1), ("k", 1), ("v", gain), ("o", gain)):
                kernel = params[stack][sublayer][matrix]["kernel"]
                assert kernel.shape == (layers, d, d)
                np.testing.assert_allclose(kernel.std(), expected * d**-0.5, rtol=5 / np.sqrt(2 * kernel.size))
        for matrix in ("fc1", "gate", "fc2"):
            kernel = params[stack]["ffn"][matrix]["kernel"]
            np.testing.assert_allclose(kernel.std(), gain * (2 / (d + f)) ** 0.5, rtol=5 / np.sqrt(2 * kernel.size))


def test_layers_start_differently_and_do_not_depend_on_depth() -> None:
    def kernels(layers: int) -> np.ndarray:
        config = ModelConfig(method="post_ln", encoder_layers=layers, width=8, heads=2, ffn_width=8)
        return np.asarray(init(Transformer(config, 20, 20), jax.random.key(0))["encoder"]["self"]["q"]["kernel"])

    three = kernels(3)
    assert not np.allclose(three[0], three[1])
    np.testing.assert_array_equal(three, kernels(5)[:3])


def test_embedding_starts_with_width_as_variance_and_a_zero_row_for_padding() -> None:
    table = init(Transformer(ModelConfig(), 4000, 4000), jax.random.key(0))["embedding"]["shared"]
    np.testing.assert_allclose(table.std(), 0.0441942, rtol=1e-2)
    assert float(jnp.abs(table[0]).max()) == 0


def test_unknown_names_are_one_clear_line() -> None:
    with pytest.raises(UserError, match=r"postln.*post_ln"):
        get_recipe("postln")
    with pytest.raises(UserError, match="xavier_normal"):
        get_base("normal")
    assert all(recipe.equation and recipe.citation for recipe in METHODS.values())

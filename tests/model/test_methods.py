"""Compares depth constants, initial weights and parameter counts with published or derived numbers."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.model import depth_rules as by
from branchnorm_jax.model.depth_rules import deepnorm_alpha, deepnorm_beta
from branchnorm_jax.model.initializers import get_base
from branchnorm_jax.model.methods import METHODS, get_recipe
from branchnorm_jax.model.recipe import Depth
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig

init = Transformer.init

# Columns: N, M, encoder alpha, encoder beta, decoder alpha, decoder beta.
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


def test_constants_of_deeploop() -> None:
    """A decoder-only model of N layers has (2N)^(1/2) and (8N)^(-1/2)."""
    recipe = METHODS["deepnorm_deeploop"]
    np.testing.assert_allclose(recipe.skip.start(Depth(0, 50)).decoder, 10)
    np.testing.assert_allclose(recipe.gain["o"](Depth(0, 50)).decoder, 1 / 20)
    np.testing.assert_allclose(recipe.skip.start(Depth(8, 27)), (4, 9))
    np.testing.assert_allclose(recipe.gain["v"](Depth(8, 27)), (1 / 8, 1 / 18))


SUB_LN = [
    (6, 1.547288, 1.700109),
    (18, 2.182857, 1.997244),
    (50, 2.773375, 2.238445),
    (100, 3.173875, 2.388259),
    (250, 3.703204, 2.572950),
    (500, 4.103573, 2.704297),
]


@pytest.mark.parametrize(("layers", "encoder", "decoder"), SUB_LN)
def test_sub_ln_gamma(layers: int, encoder: float, decoder: float) -> None:
    np.testing.assert_allclose(by.sub_ln_gamma(Depth(layers, layers)), (encoder, decoder), atol=5e-7)


def test_torchscale_beta_differs_only_in_the_encoder() -> None:
    for layers, encoder in ((6, 0.656940), (12, 0.528998), (18, 0.466042), (100, 0.272708), (500, 0.164919)):
        torchscale, paper = by.torchscale_beta(Depth(layers, layers)), by.deepnorm_beta(Depth(layers, layers))
        np.testing.assert_allclose(torchscale.encoder, encoder, atol=5e-7)
        assert torchscale.decoder == paper.decoder


@pytest.mark.parametrize(
    ("layers", "matrices", "embeddings"),
    [(6, 0.428092, 0.368894), (18, 0.325279, 0.280299), (100, 0.211873, 0.182574), (500, 0.141688, 0.122095)],
)
def test_t_fixup_gains(layers: int, matrices: float, embeddings: float) -> None:
    depth = Depth(layers, layers)
    np.testing.assert_allclose(by.t_fixup_gain(depth), (matrices, embeddings), atol=5e-7)
    np.testing.assert_allclose(by.t_fixup_embedding_gain(depth), (embeddings, embeddings), atol=5e-7)


@pytest.mark.parametrize(
    ("layers", "attention", "feed_forward"),
    [(6, 0.567300, 0.182574), (18, 0.472382, 0.105409), (100, 0.354954, 0.044721)],
)
def test_fixup_gains(layers: int, attention: float, feed_forward: float) -> None:
    gain = METHODS["fixup"].gain
    assert by.branches_power(1)(Depth(layers, layers)).encoder == 5 * layers
    np.testing.assert_allclose(gain["q"](Depth(layers, layers)), (attention, attention), atol=5e-7)
    np.testing.assert_allclose(gain["fc1"](Depth(layers, layers)), (feed_forward, feed_forward), atol=5e-7)
    np.testing.assert_allclose(
        METHODS["fixup_code"].gain["cross/q"](Depth(layers, layers)).decoder, 0.660901, atol=5e-7
    )


def test_admin_weights_without_profiling() -> None:
    """100L-100L has n = 200 and 300 sub-layers in encoder and decoder; 6L-6L has 12 and 18."""
    np.testing.assert_allclose(by.admin_log(Depth(100, 100)), (6.0746, 7.1931), atol=5e-5)
    np.testing.assert_allclose(by.admin_log(Depth(6, 6)), (2.0170, 2.3351), atol=5e-5)
    np.testing.assert_allclose(by.admin_constant(Depth(6, 6)), (12**0.5, 18**0.5))


PLAIN = (44_138_496, 132_415_488, 735_641_600)
COUNTS = {
    **dict.fromkeys(("post_ln", "deepnorm", "branchnorm", "mixnorm", "ds_init", "b2t"), PLAIN),
    **dict.fromkeys(
        ("pre_ln", "residual_dual", "lns", "mix_ln", "completep", "depth_mup"), (44_140_544, 132_417_536, 735_643_648)
    ),
    "sub_ln": (44_201_984, 132_601_856, 736_667_648),
    "normformer": (44_202_080, 132_602_144, 736_669_248),
    "normformer_residual": (44_208_224, 132_620_576, 736_771_648),
    "rezero": (44_107_788, 132_323_364, 735_129_800),
    "t_fixup": (44_107_776, 132_323_328, 735_129_600),
    "fixup": (44_040_279, 132_120_831, 734_004_603),
    "admin": (44_153_856, 132_461_568, 735_897_600),
    "dlcl": (44_152_930, 132_455_122, 735_868_850),
    "sandwich": (44_171_264, 132_509_696, 736_155_648),
    # Derived: one vector [D] per sub-layer; one scalar per sub-layer and no norms; two norms per sub-layer.
    "layerscale": tuple(count + 2048 + 512 * 5 * n for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    "skipinit": tuple(count - 1024 * 5 * n + 5 * n for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    "keel": tuple(count + 1024 * 5 * n for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    # Derived: Pre-LN with one scalar per sub-layer.
    "gpas": tuple(count + 2048 + 5 * n for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    # Two more norms in each sub-layer, and three at the end of each stack.
    "siamese_norm": tuple(count + 6 * 1024 + 5 * n * 2048 for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    # In each sub-layer, a matrix of 4 D x (4 + 4 + 16), its bias, and three scalars.
    "mhc": tuple(count + 2048 + 5 * n * (2048 * 24 + 24 + 3) for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    # A vector in each sub-layer and at the end of each stack.
    "block_attnres": tuple(count + 2048 + 512 * (5 * n + 2) for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    "gpt2norm": tuple(count + 2048 for count in PLAIN),
    "peri_ln": tuple(count + 4096 + 1024 * 5 * n for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    "rezero_ln": tuple(count + 2 * n for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
    **dict.fromkeys(("prores_post_ln", "prores_deepnorm"), PLAIN),
    **dict.fromkeys(("prores_pre_ln", "prores_lns"), (44_140_544, 132_417_536, 735_643_648)),
    "prores_sandwich": (44_171_264, 132_509_696, 736_155_648),
    "dlcl_post": tuple(count + 2 * n * 1024 + 2 * (n + 1) ** 2 for count, n in zip(PLAIN, (6, 18, 100), strict=True)),
}


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(COUNTS)))
def test_variants_have_the_parameters_of_their_origin(method: str) -> None:
    """The origin of a variant is the method whose name it extends; two variants have other names."""
    names = [known for known in COUNTS if method.startswith(known)]
    origin = {"small_init": "pre_ln", "pre_scale_norm": "pre_ln"}.get(method) or max(names, key=len)
    ours, theirs = (
        jax.tree.map(jnp.shape, Transformer(ModelConfig(method=name), 100, 100).abstract_params())
        for name in (method, origin)
    )
    assert ours == theirs


def test_every_method_names_its_paper() -> None:
    papers: dict[str, str] = {}
    for recipe in METHODS.values():
        assert re.fullmatch(r"(\d{4}\.\d{5})?", recipe.arxiv)
        assert papers.setdefault(recipe.citation, recipe.arxiv) == recipe.arxiv
    # T-Fixup appeared only in the proceedings of ICML.
    assert [citation for citation, arxiv in papers.items() if not arxiv] == [METHODS["t_fixup"].citation]


@pytest.mark.parametrize(("method", "counts"), COUNTS.items())
def test_parameter_counts(method: str, counts: tuple[int, ...]) -> None:
    for layers, expected in zip((6, 18, 100), counts, strict=True):
        model = Transformer(ModelConfig(method=method, encoder_layers=layers, decoder_layers=layers), 32768, 32768)
        params = model.abstract_params()
        total = sum(leaf.size for leaf in jax.tree.leaves(params))
        assert total - 32768 * 512 == expected


@pytest.mark.parametrize(
    ("norm", "counts"),
    [
        ("scale_norm", (44_107_808, 132_323_420, 735_130_102)),
        ("rms_norm", (44_124_160, 132_370_432, 735_386_624)),
        # Two scalars more than a layer norm in each of the 5 N norms of the sub-layers and the two at the end.
        ("derf", (44_140_608, 132_417_720, 735_644_652)),
    ],
)
def test_parameter_counts_with_other_norms(norm: str, counts: tuple[int, ...]) -> None:
    for layers, expected in zip((6, 18, 100), counts, strict=True):
        config = ModelConfig(method="pre_ln", encoder_layers=layers, decoder_layers=layers, norm=norm)
        params = Transformer(config, 8, 8).abstract_params()
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) - 8 * 512 == expected


@pytest.mark.parametrize(("layers", "total"), [(100, 863_642_624), (500, 3_806_209_024)])
def test_parameter_counts_with_a_table_of_250002_rows(layers: int, total: int) -> None:
    config = ModelConfig(method="branchnorm", encoder_layers=layers, decoder_layers=layers)
    params = Transformer(config, 250_002, 250_002).abstract_params()
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == total


def test_parameter_count_of_six_layers_with_shared_embedding() -> None:
    params = Transformer(ModelConfig(method="post_ln"), 32768, 32768).abstract_params()
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 60_915_712


@pytest.mark.parametrize(
    ("sharing", "tables"), [("all", 1), ("decoder", 2), ("none", 3)], ids=["all", "decoder", "none"]
)
def test_number_of_embedding_tables(sharing: str, tables: int) -> None:
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
        ("small", "q", 512, 512, None, 0.0279508),
        ("small", "fc2", 2048, 512, None, 0.0279508),
        ("torch", "fc1", 512, 2048, 0.0441942, 0.0255155),
    ],
)
def test_statistics_of_initial_weights(
    base: str, matrix: str, d_in: int, d_out: int, bound: float | None, std: float
) -> None:
    draw = np.asarray(get_base(base).kernel[matrix](jax.random.key(1), (d_in, d_out), d_in, d_out))
    # The standard error of a standard deviation from n values is about std / sqrt(2n); 5 of them are allowed.
    np.testing.assert_allclose(draw.std(), std, rtol=5 / np.sqrt(2 * draw.size))
    assert abs(draw.mean()) < 5 * std / np.sqrt(draw.size)
    if bound is not None:
        assert 0.999 * bound < np.abs(draw).max() <= bound * (1 + 1e-6)


def test_fairseq_biases_are_random_except_in_the_output_projection() -> None:
    model = Transformer(ModelConfig(width=64, heads=4, ffn_width=64, init="fairseq", method="post_ln"), 20, 20)
    attention = init(model, jax.random.key(0))["encoder"]["self"]
    assert float(jnp.abs(attention["o"]["bias"]).max()) == 0
    assert 0.9 * 64**-0.5 < float(jnp.abs(attention["q"]["bias"]).max()) <= 64**-0.5


def gains(method: str, layers: int) -> dict[str, tuple[float, float]]:
    """Returns the papers' std of encoder and decoder weights relative to Xavier, by sub-layer and matrix."""
    n = layers
    everywhere = [f"{sub}/{matrix}" for sub in ("self", "cross") for matrix in "qkvo"] + ["ffn/fc1", "ffn/fc2"]
    result = dict.fromkeys(everywhere, (1.0, 1.0))
    branch = [name for name in everywhere if name[-1] not in "qk"]
    if method == "deepnorm_deeploop":
        result |= dict.fromkeys(branch, ((8 * n) ** -0.5, (12 * n) ** -0.5))
    elif method in ("deepnorm", "branchnorm", "mixnorm"):
        result |= dict.fromkeys(branch, (0.87 * (n**5) ** (-1 / 16), (12 * n) ** -0.25))
    elif method == "sub_ln":
        encoder, decoder = math.sqrt(math.log(3 * n) * math.log(2 * n) / 3), math.sqrt(math.log(3 * n))
        result |= dict.fromkeys([name for name in branch if not name.startswith("cross")], (encoder, decoder))
    else:
        result |= dict.fromkeys([name for name in everywhere if name[-1] in "qkv"], (0.5**0.5, 0.5**0.5))
    if method == "t_fixup":
        result |= dict.fromkeys(branch, (0.67 * n**-0.25, (9 * n) ** -0.25))
    elif method == "fixup":
        result = {name: (std[0] * (5 * n) ** (-1 / 6),) * 2 for name, std in result.items()}
        result |= dict.fromkeys([name for name in everywhere if name[-2:] in ("/o", "c2")], (0.0, 0.0))
        result |= {"ffn/fc1": ((5 * n) ** -0.5,) * 2}
    elif method == "b2t":
        result = {name: (std[0] * n**-0.5,) * 2 for name, std in result.items()}
    return result


@pytest.mark.parametrize(
    "method",
    [
        *("post_ln", "deepnorm", "deepnorm_deeploop", "branchnorm", "mixnorm"),
        *("sub_ln", "t_fixup", "fixup", "b2t", "admin", "dlcl"),
    ],
)
def test_initial_weights_of_the_model(method: str) -> None:
    """Monte Carlo: the std of every matrix role in both stacks is within 5 standard errors."""
    layers, d, f = 18, 64, 256
    config = ModelConfig(
        method=method, encoder_layers=layers, decoder_layers=layers, width=d, heads=4, ffn_width=f, activation="swiglu"
    )
    params = init(Transformer(config, 2000, 2000), jax.random.key(0))
    for name, expected in gains(method, layers).items():
        sublayer, matrix = name.split("/")
        xavier = d**-0.5 if matrix in "qkvo" else (2 / (d + f)) ** 0.5
        for stack, gain in zip(("encoder", "decoder"), expected, strict=True):
            if stack == "encoder" and sublayer == "cross":
                continue
            for leaf in [matrix, "gate"] if matrix == "fc1" else [matrix]:
                kernel = params[stack][sublayer][leaf]["kernel"]
                np.testing.assert_allclose(kernel.std(), gain * xavier, rtol=5 / np.sqrt(2 * kernel.size))
    table = params["embedding"]["shared"]
    expected_std = d**-0.5 * ((9 * layers) ** -0.25 if method == "t_fixup" else 1.0)
    np.testing.assert_allclose(table[3:].std(), expected_std, rtol=5 / np.sqrt(2 * table.size))


@pytest.mark.parametrize(("method", "power"), [("ds_init", -0.5), ("ds_init_code", -0.25)])
def test_depth_scaled_initialisation_depends_on_the_layer(method: str, power: float) -> None:
    config = ModelConfig(method=method, encoder_layers=9, decoder_layers=4, width=64, heads=4, ffn_width=64)
    params = init(Transformer(config, 20, 20), jax.random.key(0))
    for stack in ("encoder", "decoder"):
        kernel = params[stack]["ffn"]["fc1"]["kernel"]
        for layer in range(kernel.shape[0]):
            expected = (layer + 1) ** power * 64**-0.5
            np.testing.assert_allclose(kernel[layer].std(), expected, rtol=5 / np.sqrt(2 * kernel[layer].size))
    # U(-b, b) has b = sqrt(6 / (d_in + d_out)); kernels are fused [D, 3D] in self-attention, [D, D] in cross-attention.
    for sub, fans in (("self", 4 * 64), ("cross", 2 * 64)):
        for matrix in "qkv":
            largest = np.abs(params["decoder"][sub][matrix]["kernel"]).max((1, 2))
            np.testing.assert_allclose(largest, (np.arange(4) + 1.0) ** power * (6 / fans) ** 0.5, rtol=0.01)


def test_initial_embedding_tables_of_t_fixup_and_fixup() -> None:
    """In T-Fixup, source and target tables have different gains. In Fixup, an untied output table starts at zero."""
    options: dict = dict(encoder_layers=4, decoder_layers=16, width=64, heads=4, ffn_width=64, shared_embeddings="none")
    tables = init(Transformer(ModelConfig(method="t_fixup", **options), 4000, 4000), jax.random.key(0))["embedding"]
    for name, gain in (("source", 36**-0.25), ("target", 144**-0.25), ("output", 1.0)):
        np.testing.assert_allclose(tables[name].std(), gain * 64**-0.5, rtol=0.01)
    tables = init(Transformer(ModelConfig(method="fixup", **options), 40, 40), jax.random.key(0))["embedding"]
    assert float(jnp.abs(tables["output"]).max()) == 0 < float(jnp.abs(tables["source"]).max())


def test_learned_weights_have_the_initial_values_of_the_recipe() -> None:
    options: dict = dict(encoder_layers=6, decoder_layers=20, width=8, heads=2, ffn_width=8)

    def start(method: str) -> dict:
        return init(Transformer(ModelConfig(method=method, **options), 20, 20), jax.random.key(0))

    np.testing.assert_array_equal(start("rezero")["decoder"]["branch"], np.zeros(20))
    np.testing.assert_array_equal(start("rezero_one")["decoder"]["branch"], np.ones(20))
    np.testing.assert_allclose(start("admin_log")["encoder"]["ffn_skip"], np.full((6, 8), 2.0170), atol=5e-5)
    np.testing.assert_allclose(start("admin_linear")["encoder"]["self_skip"], np.ones((6, 8)))
    np.testing.assert_allclose(start("layerscale")["decoder"]["cross_branch"], np.full((20, 8), 1e-5), rtol=1e-6)
    np.testing.assert_array_equal(start("fixup")["encoder"]["ffn_branch"], np.ones(6))


def test_initial_layers_differ_and_do_not_depend_on_depth() -> None:
    def kernels(layers: int) -> np.ndarray:
        config = ModelConfig(method="post_ln", encoder_layers=layers, width=8, heads=2, ffn_width=8)
        return np.asarray(init(Transformer(config, 20, 20), jax.random.key(0))["encoder"]["self"]["q"]["kernel"])

    three = kernels(3)
    assert not np.allclose(three[0], three[1])
    np.testing.assert_array_equal(three, kernels(5)[:3])


def test_initial_embedding_has_variance_1_over_width_and_a_zero_padding_row() -> None:
    config = ModelConfig(encoder_layers=1, decoder_layers=1, ffn_width=8)
    table = init(Transformer(config, 4000, 4000), jax.random.key(0))["embedding"]["shared"]
    np.testing.assert_allclose(table.std(), 0.0441942, rtol=1e-2)
    assert float(jnp.abs(table[0]).max()) == 0


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(UserError, match=r"postln.*post_ln"):
        get_recipe("postln")
    for written in ("PostLN", "Post-LN", "post ln"):
        with pytest.raises(UserError, match="did you mean 'post_ln'"):
            get_recipe(written)
    with pytest.raises(UserError, match="xavier_normal"):
        get_base("normal")
    assert all(recipe.equation and recipe.citation for recipe in METHODS.values())

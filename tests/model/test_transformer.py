"""Compares the model with PyTorch at the same weights, and tests its identities."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen as nn

from branchnorm_jax.model.embedding import sinusoids
from branchnorm_jax.model.feedforward import FeedForward
from branchnorm_jax.model.incremental import unstack_decoder
from branchnorm_jax.model.losses import smoothed_cross_entropy
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.norms import layer_norm
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from tests.cases import quick_and_slow
from tests.decoding.cached import cached_logits

SMALL = ModelConfig(encoder_layers=3, decoder_layers=2, width=32, ffn_width=48, heads=4, dropout=0.0)
SOURCE = jnp.array([[5, 6, 7, 1, 0, 0], [9, 8, 7, 6, 5, 1]])
TARGET = jnp.array([[1, 4, 5, 6, 0], [1, 7, 8, 9, 3]])
ONE = jnp.float32(1.0)

# Compiled once per model and shape. A model equals its config, so it can be a static argument.
init = jax.jit(Transformer.init, static_argnums=0)
forward = jax.jit(Transformer.__call__, static_argnums=0)
encode = jax.jit(Transformer.encode, static_argnums=0)
decode = jax.jit(Transformer.decode, static_argnums=0)
KEY = jax.random.key(0)


def small(**changes: Any) -> Transformer:
    return Transformer(dataclasses.replace(SMALL, **changes), 50, 50)


def randomised(params: Any, scale: float = 0.3) -> Any:
    """Adds noise to the initial values, so that biases are not 0 and norms are not 1."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return jax.tree.unflatten(
        tree, [leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def copy_to_torch(layer: Any, params: Any, index: int, method: str) -> None:
    """Writes layer `index` of our stacked parameters into a torch Transformer layer."""
    kind = "pre" if METHODS[method].pre else "post"

    def tensor(leaf: jax.Array) -> torch.Tensor:
        return torch.tensor(np.asarray(leaf[index]))

    def attention(ours: dict, theirs: torch.nn.MultiheadAttention) -> None:
        theirs.in_proj_weight.data = torch.cat([tensor(ours[m]["kernel"]).T for m in "qkv"])
        theirs.in_proj_bias.data = torch.cat([tensor(ours[m]["bias"]) for m in "qkv"])
        theirs.out_proj.weight.data = tensor(ours["o"]["kernel"]).T
        theirs.out_proj.bias.data = tensor(ours["o"]["bias"])

    attention(params["self"], layer.self_attn)
    names = ["self", "ffn"]
    if "cross" in params:
        attention(params["cross"], layer.multihead_attn)
        names = ["self", "cross", "ffn"]
    for matrix, linear in (("fc1", layer.linear1), ("fc2", layer.linear2)):
        linear.weight.data = tensor(params["ffn"][matrix]["kernel"]).T
        linear.bias.data = tensor(params["ffn"][matrix]["bias"])
    for place, name in enumerate(names, start=1):
        norm = getattr(layer, f"norm{place}")
        norm.weight.data = tensor(params[f"{name}_{kind}_norm"]["scale"])
        norm.bias.data = tensor(params[f"{name}_{kind}_norm"]["bias"])


@pytest.mark.parametrize("method", ["post_ln", "pre_ln"])
@pytest.mark.parametrize("activation", quick_and_slow(["relu", "gelu"], ["relu"]))
def test_stacks_equal_pytorch(method: str, activation: str) -> None:
    model = small(method=method, activation=activation)
    params = randomised(init(model, KEY))
    options: dict[str, Any] = dict(d_model=32, nhead=4, dim_feedforward=48, dropout=0.0, batch_first=True)
    options |= dict(activation=activation, norm_first=method == "pre_ln")
    padding = torch.tensor(np.asarray(SOURCE == 0))

    def embedded(tokens: jax.Array) -> torch.Tensor:
        table = np.asarray(params["embedding"]["shared"])
        x = table[np.asarray(tokens)] * np.sqrt(32) + sinusoids(tokens.shape[1], 32)
        return torch.tensor(x, dtype=torch.float32)

    def final(stack: str, x: torch.Tensor) -> torch.Tensor:
        if method == "post_ln":
            return x
        norm = {name: torch.tensor(np.asarray(leaf)) for name, leaf in params[f"{stack}_norm"].items()}
        return torch.nn.functional.layer_norm(x, (32,), norm["scale"], norm["bias"])

    with torch.no_grad():
        x = embedded(SOURCE)
        for index in range(3):
            encoder_layer = torch.nn.TransformerEncoderLayer(**options)
            copy_to_torch(encoder_layer, params["encoder"], index, method)
            x = encoder_layer(x, src_key_padding_mask=padding)
        memory = final("encoder", x)
        causal = torch.nn.Transformer.generate_square_subsequent_mask(TARGET.shape[1])
        x = embedded(TARGET)
        for index in range(2):
            decoder_layer = torch.nn.TransformerDecoderLayer(**options)
            copy_to_torch(decoder_layer, params["decoder"], index, method)
            x = decoder_layer(x, memory, tgt_mask=causal, memory_key_padding_mask=padding)
        logits = final("decoder", x) @ torch.tensor(np.asarray(params["embedding"]["shared"])).T

    ours_memory = encode(model, params, SOURCE, ONE)
    real = np.asarray(SOURCE != 0)
    np.testing.assert_allclose(np.asarray(ours_memory)[real], memory.numpy()[real], atol=1e-5, rtol=1e-5)
    scale = float(logits.abs().max())
    ours, real = np.asarray(forward(model, params, SOURCE, TARGET, ONE)), np.asarray(TARGET != 0)
    np.testing.assert_allclose(ours[real], logits.numpy()[real], atol=1e-5 * scale, rtol=1e-5)


def test_swiglu_equals_its_formula() -> None:
    config = ModelConfig(width=8, heads=2, ffn_width=12, activation="swiglu", activation_dropout=0.0)
    layer = FeedForward(config, METHODS["post_ln"])
    x = jax.random.normal(KEY, (2, 3, 8))
    params = randomised(nn.meta.unbox(layer.init(jax.random.key(1), x)["params"]))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    gate = np.asarray(x) @ p["gate"]["kernel"] + p["gate"]["bias"]
    hidden = gate / (1 + np.exp(-gate)) * (np.asarray(x) @ p["fc1"]["kernel"] + p["fc1"]["bias"])
    expected = hidden @ p["fc2"]["kernel"] + p["fc2"]["bias"]
    ours: Any = layer.apply({"params": params}, x)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_branchnorm_at_alpha_one_is_post_ln_bit_for_bit() -> None:
    params = randomised(init(small(), KEY))
    branchnorm = forward(small(method="branchnorm"), params, SOURCE, TARGET, ONE)
    np.testing.assert_array_equal(branchnorm, forward(small(method="post_ln"), params, SOURCE, TARGET, ONE))
    assert not np.allclose(branchnorm, forward(small(method="branchnorm"), params, SOURCE, TARGET, jnp.float32(0.5)))


def test_branchnorm_at_alpha_zero_normalises_embeddings_and_has_no_branch_gradients() -> None:
    model = small(method="branchnorm", encoder_layers=20)
    params = init(model, KEY)
    x0 = np.asarray(params["embedding"]["shared"])[np.asarray(SOURCE)] * np.sqrt(32) + sinusoids(6, 32)
    x0 = x0.astype(np.float64)
    expected = (x0 - x0.mean(-1, keepdims=True)) / np.sqrt(x0.var(-1, keepdims=True))
    # Each further norm divides by sqrt(1 + 1e-5).
    memory, real = encode(model, params, SOURCE, jnp.float32(0.0)), np.asarray(SOURCE != 0)
    np.testing.assert_allclose(memory[real], expected[real], atol=41 * 1e-5 * np.abs(expected).max())

    def loss(params: Any, alpha: jax.Array) -> jax.Array:
        x = model.hidden(params, SOURCE, TARGET, alpha)[0]
        return smoothed_cross_entropy(x, model.output(params), TARGET, TARGET != 0, 0.1).loss

    gradient = jax.jit(jax.grad(loss))(params, jnp.float32(0.0))
    for stack, sublayers in (("encoder", ("self", "ffn")), ("decoder", ("self", "cross", "ffn"))):
        for sublayer in sublayers:
            assert all(float(jnp.abs(leaf).max()) == 0 for leaf in jax.tree.leaves(gradient[stack][sublayer]))
    assert float(jnp.abs(gradient["decoder"]["ffn_post_norm"]["scale"]).max()) > 0


def test_deepnorm_is_branchnorm_at_the_inverse_of_deepnorms_alpha() -> None:
    from branchnorm_jax.model.depth_rules import deepnorm_alpha
    from branchnorm_jax.model.recipe import Depth

    deepnorm, branchnorm = small(method="deepnorm"), small(method="branchnorm")
    params = randomised(init(deepnorm, KEY), 0.05)
    alpha: Any = deepnorm_alpha(Depth(3, 2))
    memory = encode(deepnorm, params, SOURCE, ONE)
    held = encode(branchnorm, params, SOURCE, jnp.float32(1 / alpha.encoder))
    real = np.asarray(SOURCE != 0)
    np.testing.assert_allclose(np.asarray(memory)[real], np.asarray(held)[real], atol=5e-5)
    np.testing.assert_allclose(
        decode(deepnorm, params, memory, SOURCE, TARGET, ONE),
        decode(branchnorm, params, memory, SOURCE, TARGET, jnp.float32(1 / alpha.decoder)),
        atol=5e-5,
    )


def test_alpha_can_differ_per_layer() -> None:
    model = small(method="branchnorm")
    params = randomised(init(model, KEY))
    same = encode(model, params, SOURCE, jnp.full(3, 0.3))
    np.testing.assert_array_equal(same, encode(model, params, SOURCE, jnp.float32(0.3)))
    # A layer with alpha 0 normalises an input that is already normalised. With initial norms, it has no effect.
    params = init(model, KEY)
    skipped = encode(model, params, SOURCE, jnp.array([0.3, 0.0, 0.7]))
    without = params | {"encoder": jax.tree.map(lambda leaf: leaf[jnp.array([0, 2])], params["encoder"])}
    shorter = small(method="branchnorm", encoder_layers=2)
    np.testing.assert_allclose(skipped, encode(shorter, without, SOURCE, jnp.array([0.3, 0.7])), atol=1e-4)


RATES = dict(dropout=0.2, attention_dropout=0.1, activation_dropout=0.1)


@pytest.mark.slow
def test_scan_unroll_and_remat_give_the_same_loss_and_gradient() -> None:
    """Compares losses and gradients. XLA fuses the layers of a loop differently, so they agree up to rounding."""
    method = "branchnorm"
    depth = dict(encoder_layers=3, decoder_layers=1)
    alpha, key = jnp.float32(0.4), jax.random.key(5)

    def loss_and_gradient(**options: Any) -> Any:
        model = small(method=method, **depth, **RATES, **options)

        def loss(params: Any) -> jax.Array:
            x = model.hidden(params, SOURCE, TARGET, alpha, key)[0]
            sums = smoothed_cross_entropy(x, model.output(params), TARGET, TARGET != 0, 0.1)
            return sums.loss / sums.tokens

        return jax.jit(jax.value_and_grad(loss))(params)

    params = init(small(method=method, **depth), KEY)
    loss, gradient = loss_and_gradient()
    norm = np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(gradient)))
    variants: list[dict[str, Any]] = [{"remat": remat, "group": 2} for remat in ("save_branches", "nested")]
    for options in [dict(unroll=3), *variants]:
        other_loss, other_gradient = loss_and_gradient(**options)
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), gradient, other_gradient)
        assert max(jax.tree.leaves(difference)) <= 1e-6 * norm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes"), [("branchnorm", {}), ("b2t", {}), ("deepnorm", {"remat": "full", "group": 2})]
)
def test_fused_kernels_give_the_same_loss_and_gradient(method: str, changes: dict[str, Any]) -> None:
    """With dropout and packed rows; the kernels are interpreted."""
    rng, key = np.random.default_rng(0), jax.random.key(5)
    source, target = (jnp.asarray(rng.integers(0, 30, (8, 16)).clip(1)) for _ in range(2))
    options = dict(method=method, width=128, ffn_width=64, heads=4, decoder_layers=3, **RATES, **changes)
    params = randomised(init(small(**options), KEY), 0.1)

    def loss_and_gradient(kernels: str) -> Any:
        model = small(kernels=kernels, **options)

        def loss(params: Any) -> jax.Array:
            x = model.hidden(params, source, target, jnp.float32(0.4), key)[0]
            return smoothed_cross_entropy(x, model.output(params), target, target != 0, 0.1).loss / target.size

        return jax.jit(jax.value_and_grad(loss))(params)

    (expected, gradient), (loss, ours) = loss_and_gradient("plain"), loss_and_gradient("interpret")
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    norm = np.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(gradient)))
    difference = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), gradient, ours)
    assert max(jax.tree.leaves(difference)) <= 1e-6 * norm


def test_dropout_depends_on_its_key_and_is_off_without_one() -> None:
    params = init(small(), KEY)
    plain = forward(small(**RATES), params, SOURCE, TARGET, ONE)
    np.testing.assert_array_equal(plain, forward(small(), params, SOURCE, TARGET, ONE))
    drawn = [forward(small(**RATES), params, SOURCE, TARGET, ONE, jax.random.key(seed)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.allclose(drawn[0], drawn[2])
    assert not np.allclose(drawn[0], plain)


@pytest.mark.parametrize(
    "options",
    [
        dict(method="branchnorm"),
        dict(method="pre_ln"),
        dict(method="pre_ln", positions="learned", max_positions=6, embedding_norm=True),
    ],
)
@pytest.mark.parametrize("unstacked", [False, True])
def test_decoding_with_a_cache_equals_teacher_forcing(options: dict[str, Any], unstacked: bool) -> None:
    model = small(**options)
    params, alpha = randomised(init(model, KEY), 0.1), jnp.float32(0.6)
    forced = forward(model, params, SOURCE, TARGET, alpha)
    params = unstack_decoder(model, params) if unstacked else params
    # Two hypotheses per sentence share its slots.
    cached, real = cached_logits(model, params, SOURCE, TARGET, alpha, 2), np.asarray(TARGET != 0)
    for hypothesis in (0, 1):
        np.testing.assert_allclose(cached[:, hypothesis][real], forced[real], atol=2e-5)


@pytest.mark.parametrize(("left", "right"), [(0, 5), (5, 0), (2, 3)])
def test_padding_does_not_change_the_output(left: int, right: int) -> None:
    model = small()
    params = init(model, KEY)
    wide = jnp.pad(SOURCE, ((0, 0), (left, right)))
    np.testing.assert_allclose(
        forward(model, params, wide, TARGET, ONE), forward(model, params, SOURCE, TARGET, ONE), atol=1e-5
    )


def test_rows_of_padding_are_finite() -> None:
    model = small()
    params = init(model, KEY)
    empty_row = forward(model, params, jnp.zeros_like(SOURCE), TARGET, ONE)
    assert bool(jnp.isfinite(empty_row).all())


def test_bfloat16_is_close_to_float32() -> None:
    params = init(small(), KEY)
    exact = forward(small(), params, SOURCE, TARGET, ONE)
    rounded = forward(small(dtype="bfloat16"), params, SOURCE, TARGET, ONE)
    assert rounded.dtype == jnp.float32
    error = float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact))
    assert 0 < error < 2e-2


def test_carry_dtype_is_the_dtype_of_the_stream() -> None:
    params = init(small(), KEY)
    exact = encode(small(), params, SOURCE, ONE)
    half = encode(small(carry_dtype="float16"), params, SOURCE, ONE)
    assert half.dtype == jnp.float16
    np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=1e-2)


def test_sinusoids_equal_fairseq_and_marian() -> None:
    expected = [0.909297, 0.092699, 0.004309, 0.0002, -0.416147, 0.995694, 0.999991, 1.0]
    np.testing.assert_allclose(sinusoids(1, 8, "fairseq")[0], expected, atol=1e-6)
    row = sinusoids(1, 512, "fairseq")[0]
    np.testing.assert_allclose([row[0], row[255], row[256]], [0.9092974, 1.99999999e-4, -0.4161468], atol=1e-7)
    marian = sinusoids(7, 8)
    np.testing.assert_allclose(marian[0], [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(marian[5, 1], np.sin(5 / 10000 ** (2 / 8)), rtol=1e-6)
    np.testing.assert_allclose(marian[5, 6], np.cos(5 / 10000 ** (4 / 8)), rtol=1e-6)


def test_learned_positions_begin_as_in_fairseq() -> None:
    """A table for each stack, from a normal distribution with the standard deviation of word embeddings."""
    tables = init(small(positions="learned", max_positions=1000), KEY)["embedding"]
    encoder, decoder = (np.asarray(tables[f"{stack}_positions"]) for stack in ("encoder", "decoder"))
    for table in (encoder, decoder):
        assert table.shape == (1000, 32)
        assert table.std() == pytest.approx(32**-0.5, rel=0.03)
        assert abs(table.mean()) < 5 * 32**-0.5 / table.size**0.5
        assert (np.abs(table).max(1) > 0).all()
    assert abs(np.corrcoef(encoder.ravel(), decoder.ravel())[0, 1]) < 0.03


def test_layer_norm_equals_pytorch_far_from_zero() -> None:
    x = np.random.default_rng(0).normal(100, 1, (4, 16)).astype(np.float32)
    scale, bias = np.linspace(0.5, 2, 16, dtype=np.float32), np.linspace(-1, 1, 16, dtype=np.float32)
    theirs = torch.nn.functional.layer_norm(torch.tensor(x), (16,), torch.tensor(scale), torch.tensor(bias))
    ours = layer_norm(jnp.asarray(x), jnp.asarray(scale), jnp.asarray(bias))
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["branchnorm", "mixnorm", "mixnorm_anneal"])
def test_skipping_branches_with_alpha_zero_does_not_change_results(method: str) -> None:
    """Output, gradient and cached decoding are the same if a closed branch is multiplied by 0 or not computed."""
    alpha = {"encoder": jnp.array([0.3, 0.0, 0.7]), "decoder": jnp.array([0.0, 0.5])}
    rates = dict(encoder_layers=3, decoder_layers=2, method=method, **RATES)
    computed, skipped = small(**rates), small(**rates, alpha_order="bottom_up")
    params = randomised(init(computed, KEY))

    def loss(model: Transformer) -> Any:
        def objective(params: Any) -> jax.Array:
            x, _ = model.hidden(params, SOURCE, TARGET, alpha, jax.random.key(5))
            return jnp.square(x * jnp.arange(x.shape[-1])).sum()

        return jax.value_and_grad(objective)(params)

    (expected, by_computed), (result, by_skipped) = loss(computed), loss(skipped)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(by_computed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * scale), by_skipped, by_computed)
    assert float(jnp.abs(by_skipped["encoder"]["ffn"]["fc1"]["kernel"][1]).max()) == 0

    memory = encode(skipped, params, SOURCE, alpha)
    forced = skipped.logits(params, decode(skipped, params, memory, SOURCE, TARGET, alpha))
    real = np.asarray(TARGET != 0)
    result = cached_logits(skipped, params, SOURCE, TARGET, alpha)[:, 0]
    np.testing.assert_allclose(result[real], forced[real], atol=2e-5)


def test_closed_branches_are_not_computed() -> None:
    """If they were computed, their NaN weights would make the output NaN."""
    alpha = {"encoder": jnp.array([0.3, 0.0, 0.7]), "decoder": jnp.array([0.0, 0.5])}
    model = small(method="branchnorm", encoder_layers=3, decoder_layers=2, alpha_order="top_down")
    params = init(model, KEY)
    for stack, layer in (("encoder", 1), ("decoder", 0)):
        kernel = params[stack]["ffn"]["fc1"]["kernel"]
        params[stack]["ffn"]["fc1"]["kernel"] = kernel.at[layer].set(jnp.nan)
    assert np.isfinite(model.hidden(params, SOURCE, TARGET, alpha)[0]).all()
    assert np.isnan(model.hidden(params, SOURCE, TARGET, jnp.float32(0.3))[0]).all()

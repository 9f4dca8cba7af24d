"""Identities that relate the methods to each other and to closed forms."""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from branchnorm_jax.model import admin
from branchnorm_jax.model.losses import smoothed_cross_entropy
from branchnorm_jax.model.methods import METHODS
from branchnorm_jax.model.norms import apply_norm, declare_norm
from branchnorm_jax.model.recipe import NOWHERE, ONE, Recipe, Weight
from branchnorm_jax.model.segments import decoder_inputs, source_segments, target_segments
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from tests.cases import quick_and_slow
from tests.reference import transformer as reference

SMALL = ModelConfig(encoder_layers=3, decoder_layers=2, width=16, ffn_width=24, heads=2, dropout=0.0, unroll=3)
SOURCE = jnp.array([[5, 6, 7, 1, 0, 0], [9, 8, 7, 6, 5, 1]])
TARGET = jnp.array([[1, 4, 5, 6, 0], [1, 7, 8, 9, 3]])
KEY, ALPHA = jax.random.key(0), jnp.float32(0.7)


def small(method: str, **changes: Any) -> Transformer:
    return Transformer(dataclasses.replace(SMALL, method=method, **changes), 30, 30)


def random_params(model: Transformer) -> Any:
    """Returns random parameters with the model's shapes. The scales of norms are around 1."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(centre, 0.3, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, model.abstract_params())


def outputs(model: Transformer, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the encoder output at tokens that are not padding, and the decoder output."""
    memory = model.encode(params, SOURCE, ALPHA)
    out = model.decode(params, memory, SOURCE, TARGET, ALPHA)
    return np.asarray(memory)[np.asarray(SOURCE != 0)], np.asarray(out)


def embedded(model: Transformer, params: Any, stack: str, tokens: jax.Array) -> jax.Array:
    """Returns the input of a stack, [B, T, D]."""
    segments = source_segments(tokens) if stack == "encoder" else target_segments(tokens)
    return model.embed_tokens(
        params, stack, tokens, model.positions(params, stack, tokens.shape[1])[segments.positions]
    )


def register(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> str:
    monkeypatch.setitem(METHODS, "changed", recipe)
    return "changed"


WITHOUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepnorm with a = 1 is Post-LN": ("deepnorm", dict(skip=Weight()), "post_ln"),
    "Admin without its weights is Post-LN": ("admin", dict(skip=Weight()), "post_ln"),
    "B2T without its connection is Post-LN": ("b2t", dict(stream="plain"), "post_ln"),
    "Sub-LN without inner norms is Pre-LN": ("sub_ln", dict(inner_norm=NOWHERE), "pre_ln"),
    "NormFormer without its norms and scales is Pre-LN": (
        "normformer",
        dict(inner_norm=NOWHERE, branch_norm=NOWHERE, head_scale=NOWHERE),
        "pre_ln",
    ),
    "LNS with a factor of 1 is Pre-LN": ("lns", dict(pre_scale=ONE), "pre_ln"),
    "DLCL without combinations is Pre-LN": ("dlcl", dict(stream="plain"), "pre_ln"),
}


@pytest.mark.parametrize("law", quick_and_slow([*WITHOUT], [*WITHOUT][:2]))
def test_reduced_method_equals_the_plain_method(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, changes, plain = WITHOUT[law]
    changed = small(register(monkeypatch, dataclasses.replace(METHODS[method], **changes)))
    # The plain methods ignore the parameters that only the special method learns.
    params = random_params(small(method))
    for ours, theirs in zip(outputs(changed, params), outputs(small(plain), params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.allclose(outputs(small(method), params)[0], outputs(changed, params)[0], atol=1e-3)


def test_admin_with_weights_of_one_is_post_ln() -> None:
    admin_params = random_params(small("admin"))
    for stack in ("encoder", "decoder"):
        for name in [name for name in admin_params[stack] if name.endswith("_skip")]:
            admin_params[stack][name] = jnp.ones_like(admin_params[stack][name])
    plain = {
        part: {name: leaf for name, leaf in tree.items() if not name.endswith("_skip")}
        for part, tree in admin_params.items()
    }
    for ours, theirs in zip(outputs(small("admin"), admin_params), outputs(small("post_ln"), plain), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_residual_dual_without_its_final_norm_is_post_ln() -> None:
    model = small("residual_dual")
    params = random_params(model)
    for stack in ("encoder", "decoder"):
        params[f"{stack}_norm"] = jax.tree.map(jnp.zeros_like, params[f"{stack}_norm"])
    for ours, theirs in zip(outputs(model, params), outputs(small("post_ln"), params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("method", quick_and_slow(["rezero", "skipinit", "fixup"], ["rezero"]))
def test_stacks_start_as_the_identity(method: str) -> None:
    """The output equals the embedding exactly, and all singular values of the encoder's Jacobian are 1."""
    model = small(method, shared_embeddings="none", encoder_layers=12)
    params = model.init(KEY)
    np.testing.assert_array_equal(model.encode(params, SOURCE, ALPHA), embedded(model, params, "encoder", SOURCE))
    if method == "fixup":
        np.testing.assert_array_equal(model(params, SOURCE, TARGET, ALPHA), jnp.zeros((2, 5, 30)))

    def through(probe: jax.Array) -> jax.Array:
        change = jnp.zeros((2, 6, 16)).at[0, :3].set(probe)
        return model.first_stack(params, SOURCE, ALPHA, change)[0, :3].ravel()

    jacobian = jax.jacobian(through)(jnp.zeros((3, 16))).reshape(48, 48)
    np.testing.assert_allclose(np.linalg.svd(jacobian, compute_uv=False), 1.0, atol=1e-6)


@pytest.mark.parametrize("method", ["residual_dual", "siamese_norm", "dlcl", "post_ln"])
def test_a_change_of_the_embeddings_reaches_all_layers_that_read_them(method: str) -> None:
    """The derivative along a change is that along the change of the table that has it as its effect."""
    model = small(method, shared_embeddings="none")
    params = random_params(model)
    tables = jax.random.normal(jax.random.key(1), params["embedding"]["source"].shape)

    def changed(size: jax.Array) -> Any:
        return params | {"embedding": params["embedding"] | {"source": params["embedding"]["source"] + size * tables}}

    def through(function: Any) -> jax.Array:
        return jax.jvp(function, (jnp.zeros(()),), (jnp.ones(()),))[1]

    change = through(lambda size: embedded(model, changed(size), "encoder", SOURCE))
    ours = through(lambda size: model.first_stack(params, SOURCE, ALPHA, size * change))
    theirs = through(lambda size: model.encode(changed(size), SOURCE, ALPHA))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_scale_norm_is_rms_norm_with_one_gain() -> None:
    """g x / |x| = x / rms(x) * g / sqrt(D)."""
    x = jax.random.normal(KEY, (4, 16))
    tied = apply_norm("rms_norm", {"scale": jnp.full(16, 3.0 / 4)}, x, 0.0)
    np.testing.assert_allclose(apply_norm("scale_norm", {"scale": jnp.float32(3.0)}, x), tied, rtol=1e-6)
    np.testing.assert_allclose(
        apply_norm("scale_norm_fixed", {}, x), apply_norm("rms_norm", {"scale": jnp.ones(())}, x, 0.0), rtol=1e-6
    )


@pytest.mark.parametrize(("method", "learned"), [("pre_scale_norm", 1), ("residual_dual", 1), ("post_ln", 0)])
def test_scale_norm_fixed_learns_only_the_last_g(method: str, learned: int) -> None:
    """Only the norm before the logits, if there is one, has a learned g (Transformers without Tears, Table 7)."""
    params = small(method, norm="scale_norm_fixed").abstract_params()
    names = [[entry.key for entry in path] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert [name for name in names if name[-1] == "scale"] == [["decoder_norm", "scale"]] * learned


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "scale_norm"])
def test_gradients_of_norms_are_finite_at_zero(kind: str) -> None:
    start = nn.meta.unbox(declare_norm(kind, 16))
    gradient = jax.grad(lambda x: apply_norm(kind, start, x).sum())(jnp.zeros((2, 16)))
    assert bool(jnp.isfinite(gradient).all())


@pytest.mark.parametrize("length", [5.0, 1e-7])
def test_derivatives_of_norms_are_those_of_their_formulas(length: float) -> None:
    """The norms define their derivatives; JAX differentiates the formulas, above and below the limit of ScaleNorm."""
    x, scale = jax.random.normal(KEY, (2, 16))
    x = x * length / jnp.linalg.norm(x)
    formulas = {
        "layer_norm": lambda x: (x - x.mean()) / jnp.sqrt(x.var() + 1e-5) * scale,
        "rms_norm": lambda x: x / jnp.sqrt((x**2).mean() + 1e-5) * scale,
        "scale_norm": lambda x: 3.0 * x / jnp.maximum(jnp.linalg.norm(x), 1e-5),
    }
    weights = {"layer_norm": {"scale": scale, "bias": 0.0}, "scale_norm": {"scale": jnp.float32(3.0)}}
    for kind, formula in formulas.items():
        norm = functools.partial(apply_norm, kind, weights.get(kind, {"scale": scale}))
        for jacobian in (jax.jacfwd, jax.jacrev):
            expected = jacobian(formula)(x)
            np.testing.assert_allclose(jacobian(norm)(x), expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_dlcl_with_identity_weights_is_pre_ln_with_norms_between_layers() -> None:
    model = small("dlcl")
    params = random_params(model)
    params["encoder_combination"]["weight"] = jnp.eye(4)
    memory = np.asarray(model.encode(params, SOURCE, ALPHA))
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.asarray(embedded(model, params, "encoder", SOURCE), np.float64)
    mask = np.asarray(SOURCE != 0)[:, None]
    for index in range(3):
        p = jax.tree.map(lambda leaf, index=index: leaf[index], exact["encoder"])
        z = reference.ln(x, p["self_pre_norm"])
        x = x + reference.attention(z, z, p["self"], mask, 2, None, False)
        x = x + reference.ffn(reference.ln(x, p["ffn_pre_norm"]), p["ffn"], None)
        x = reference.ln(x, jax.tree.map(lambda leaf, index=index: leaf[index], exact["encoder_combination"]["norm"]))
    real = np.asarray(SOURCE != 0)
    np.testing.assert_allclose(memory[real], reference.ln(x, exact["encoder_norm"])[real], atol=2e-5)


def test_dlcl_starts_with_means_and_ignores_the_upper_triangle() -> None:
    model = small("dlcl")
    params = model.init(KEY)
    weight = params["encoder_combination"]["weight"]
    np.testing.assert_allclose(weight, np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None], rtol=1e-6)
    before = outputs(model, params)
    params["encoder_combination"]["weight"] = weight + jnp.triu(jnp.ones((4, 4)), 1)
    for ours, theirs in zip(outputs(model, params), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_admin_profiling_equals_its_definition() -> None:
    """Computes each sub-layer in NumPy: w_k = r, then r = sqrt(Var(w_k x) + Var(F)) over all elements."""
    model = small("admin")
    params = model.init(KEY)
    target = jnp.array([[4, 5, 6, 8, 1], [7, 8, 9, 3, 1]])
    profiled = admin.profile(model, params, SOURCE, target, KEY)
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    source_mask = np.asarray(SOURCE != 0)[:, None]
    causal = np.tri(5, dtype=bool)[None]

    def stack(name: str, x: np.ndarray, branches: Any, layers: int) -> np.ndarray:
        r = 1.0
        for index in range(layers):
            p = jax.tree.map(lambda leaf, index=index: leaf[index], exact[name])
            for sub, F in branches(p).items():
                np.testing.assert_allclose(profiled[name][f"{sub}_skip"][index], r, rtol=1e-5)
                f = F(x)
                r_next = math.sqrt((r * x).var() + f.var())
                x = reference.ln(r * x + f, p[f"{sub}_post_norm"])
                r = r_next
        return x

    memory = stack(
        "encoder",
        np.asarray(embedded(model, params, "encoder", SOURCE), np.float64),
        lambda p: {
            "self": lambda z: reference.attention(z, z, p["self"], source_mask, 2, None, False),
            "ffn": lambda z: reference.ffn(z, p["ffn"], None),
        },
        3,
    )
    stack(
        "decoder",
        np.asarray(embedded(model, params, "decoder", decoder_inputs(target)), np.float64),
        lambda p: {
            "self": lambda z: reference.attention(z, z, p["self"], causal, 2, None, False),
            "cross": lambda z: reference.attention(z, memory, p["cross"], source_mask, 2, None, False),
            "ffn": lambda z: reference.ffn(z, p["ffn"], None),
        },
        2,
    )
    others = lambda tree: {k: v for k, v in tree["encoder"].items() if not k.endswith("_skip")}  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, others(profiled), others(params))


def test_fixnorm_ignores_the_length_of_embedding_rows() -> None:
    model = small("pre_scale_norm", norm="scale_norm", embedding="fixnorm")
    params = model.init(KEY)
    before = model(params, SOURCE, TARGET, ALPHA)
    lengths = jnp.exp(jax.random.normal(KEY, (30, 1)))
    params["embedding"]["shared"] = params["embedding"]["shared"] * lengths
    np.testing.assert_allclose(model(params, SOURCE, TARGET, ALPHA), before, atol=1e-5)
    # Logits are cosines times the last norm's g = sqrt(D).
    assert float(jnp.abs(before).max()) <= math.sqrt(16) * (1 + 1e-5)


@pytest.mark.parametrize("tags", [0, 5])
def test_word_dropout_replaces_words_at_its_rate(tags: int) -> None:
    from branchnorm_jax.model.embedding import drop_words

    tokens = jnp.arange(40_000).reshape(200, 200) % 50
    dropped = drop_words(tokens, 0.1, KEY, tags)
    words = np.asarray(tokens > 2 + tags)
    changed = np.asarray(dropped != tokens)
    assert not changed[~words].any()
    assert set(np.asarray(dropped)[changed]) == {2}
    assert abs(changed[words].mean() - 0.1) < 5 * math.sqrt(0.1 * 0.9 / words.sum())


def test_unused_words_get_no_probability_and_no_smoothing() -> None:
    unused = (3, 17, 29)
    model = Transformer(dataclasses.replace(SMALL, method="post_ln"), 30, 30, unused)
    params = random_params(model)
    probabilities = jax.nn.softmax(model(params, SOURCE, TARGET, ALPHA))
    assert float(probabilities[..., list(unused)].max()) == 0
    used = [word for word in range(30) if word not in unused]
    full = Transformer(dataclasses.replace(SMALL, method="post_ln"), 30, 30)
    logits = full(params, SOURCE, TARGET, ALPHA)
    np.testing.assert_allclose(probabilities[..., used], jax.nn.softmax(logits[..., used]), atol=1e-6)
    # The loss equals the loss with a vocabulary that lacks the unused words.
    targets, weights = jnp.array([[5, 9]]), jnp.ones((1, 2))
    x = full.hidden(params, SOURCE, TARGET, ALPHA)[0][:1, :2]
    smaller = full.output(params)._replace(
        table_VD=full.output(params).table_VD[np.array(used)], used_V=jnp.ones(27, bool)
    )
    renamed = jnp.array([[used.index(5), used.index(9)]])
    np.testing.assert_allclose(
        smoothed_cross_entropy(x, model.output(params), targets, weights, 0.1),
        smoothed_cross_entropy(x, smaller, renamed, weights, 0.1),
        rtol=1e-5,
    )

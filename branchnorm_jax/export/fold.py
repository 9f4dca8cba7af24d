"""Folding: a trained model of a method as a plain Transformer, whose sub-layers are LN(x + F(x)) or x + F(LN(x)).

Factors of the branch go into the last matrix of F, so b costs nothing. A factor of the skip connection goes into the
stream: with x~ = a x, LN(a x + F(x)) is LN(x~ + F(x~ / a)), so the norm that feeds the sub-layer is multiplied by a and
the matrices that read its output are divided by it. That leaves the norm's epsilon as it was, where dividing the branch
instead, LN(x + F(x) / a), would make it epsilon / a^2.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from branchnorm_jax.model.embedding import fix_norm
from branchnorm_jax.model.parameters import STACKS, by_layer
from branchnorm_jax.model.recipe import ONE, Recipe, Weight
from branchnorm_jax.model.transformer import BranchScale, Transformer

SUBLAYERS = {"encoder": ("self", "ffn"), "decoder": ("self", "cross", "ffn")}
LAST_MATRIX = {"self": "o", "cross": "o", "ffn": "fc2"}
READERS = {"self": ("q", "k", "v"), "cross": ("q",), "ffn": ("fc1",)}
"""Matrices of a sub-layer that read the stream; keys and values of cross-attention read the encoder."""

UNUSED_BIAS = -1e9
"""Added to the logits of words that get no probability."""


class Plain(NamedTuple):
    """A plain Transformer, NumPy arrays in float32; matrices are [d_in, d_out].

    Attributes:
      pre_norm: x + F(LN(x)), and a norm at the end of each stack; otherwise LN(x + F(x)).
      layers: by stack, sub-layer ("self", "cross", "ffn"), matrix ("q", ... "fc2") and leaf, [L, ...]; the norms are
        "self_norm", "cross_norm", "ffn_norm" with "scale" and "bias".
      final: by stack, the norm at its end; empty for Post-LN.
      tables: word embeddings "source", "target" and "output", [V, D]; those that are tied are the same array.
      embedding_scale: by stack, what sqrt(D) E[token] + position is multiplied by, [D].
      bias: of the logits, [V].
    """

    pre_norm: bool
    layers: dict[str, dict[str, Any]]
    final: dict[str, dict[str, np.ndarray]]
    tables: dict[str, np.ndarray]
    embedding_scale: dict[str, np.ndarray]
    bias: np.ndarray


def obstacle(model: Transformer) -> str:
    """Why a model is no plain Transformer, or ""."""
    r, c = model.recipe, model.config
    obstacles = {
        "its layers pass on more than one stream": r.stream != "plain",
        "a norm follows its branches": bool(r.branch_norm),
        "a norm stands inside its branches": bool(r.inner_norm),
        "its attention heads have factors": bool(r.head_scale),
        "scalars are subtracted inside its branches": r.shifts,
        "it has layers of both kinds, Pre-LN and Post-LN": r.post_layers is not None,
        "a norm follows its embeddings": r.embedding_norm,
        "it has no norms": not r.pre and not r.post,
        "it has norms on both sides of a sub-layer": r.pre and r.post,
        "its sub-layers' inputs are scaled": r.pre_scale is not ONE,
        "its skip connections have factors, and it is Pre-LN": r.pre and r.skip != Weight(),
        "a stack of Post-LN ends with a norm": r.post and r.final != "",
        f"its norms are {c.norm}": c.norm != "layer_norm",
        f"its activation is {c.activation}": c.activation not in ("relu", "gelu"),
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def fold(model: Transformer, params: Any, branch_scale: BranchScale) -> Plain:
    """The plain Transformer that computes what `model` does, for one whose `obstacle` is ""."""
    recipe, c = model.recipe, model.config
    tables = dict(jax.tree.map(np.array, params["embedding"]))
    bias = np.array(tables.pop("bias", np.zeros(model.target_vocab, np.float32)))
    bias[list(model.unused)] = UNUSED_BIAS
    if c.embedding == "fixnorm":
        tables = {name: np.array(fix_norm(table)) for name, table in tables.items()}
    source, target = (tables["shared" if "shared" in tables else side] for side in ("source", "target"))
    kind = "pre" if recipe.pre else "post"
    layers, scales = {}, {}
    for stack in STACKS:
        tree = jax.tree.map(lambda leaf: np.array(leaf, np.float64), params[stack])
        factors = {name: _factors(model, tree, stack, name, branch_scale) for name in SUBLAYERS[stack]}
        plain = {name: tree[name] for name in SUBLAYERS[stack]}
        plain |= {f"{name}_norm": tree[f"{name}_{kind}_norm"] for name in SUBLAYERS[stack]}
        scales[stack] = _fold_stack(plain, factors, SUBLAYERS[stack], c.width)
        layers[stack] = jax.tree.map(lambda leaf: leaf.astype(np.float32), plain)
    return Plain(
        pre_norm=recipe.pre,
        layers=layers,
        final={stack: jax.tree.map(np.asarray, params[f"{stack}_norm"]) for stack in STACKS} if recipe.final else {},
        tables={"source": source, "target": target, "output": tables.get("output", target)},
        embedding_scale=scales,
        bias=bias,
    )


def _factors(
    model: Transformer, tree: Any, stack: str, sublayer: str, branch_scale: BranchScale
) -> tuple[np.ndarray, np.ndarray]:
    """a and b of a sub-layer in every layer of a stack, [L, 1] or [L, D]."""

    def factor(weight: Weight, which: str) -> np.ndarray:
        layers = getattr(model.depth, stack)
        if sublayer not in weight.on:
            return np.ones((layers, 1))
        if weight.learned:
            return tree[which if weight.learned == "layer" else f"{sublayer}_{which}"].reshape(layers, -1)
        start = by_layer(weight.start, model.depth, stack)
        if weight.end is not None:
            alpha = branch_scale[stack] if isinstance(branch_scale, dict) else branch_scale
            start = start + (by_layer(weight.end, model.depth, stack) - start) * np.asarray(alpha, np.float64)
        return start.reshape(layers, 1)

    recipe: Recipe = model.recipe
    return factor(recipe.skip, "skip"), factor(recipe.branch, "branch")


def _fold_stack(
    plain: dict[str, Any], factors: dict[str, tuple[np.ndarray, np.ndarray]], sublayers: tuple[str, ...], width: int
) -> np.ndarray:
    """Folds a stack in place; returns the factor of its embeddings, [D]."""
    first = np.ones(width)
    for place, name in enumerate(sublayers):
        a, b = factors[name]
        last = plain[name][LAST_MATRIX[name]]
        last["kernel"] *= b[:, None, :]
        last["bias"] *= b
        for matrix in READERS[name]:
            plain[name][matrix]["kernel"] /= a[:, :, None]
        # The first sub-layer of a layer is fed by the last one of the layer below, that of the lowest by the embedding.
        norm, fed = (plain[f"{sublayers[place - 1]}_norm"], a) if place else (plain[f"{sublayers[-1]}_norm"], a[1:])
        for leaf in norm.values():
            leaf[: len(fed)] *= fed
        if not place:
            first = np.broadcast_to(a[0], (width,)).copy()
    return first


def without_embedding_scale(plain: Plain) -> Plain:
    """The same for an engine that cannot scale its embeddings: the first branch of each stack is divided instead.

    Its norm's epsilon then counts for epsilon / a^2. Raises `ValueError` if the factor is not one number.
    """
    layers = dict(plain.layers)
    for stack, scale in plain.embedding_scale.items():
        a = scale[0]
        if (scale != a).any():
            raise ValueError("each feature of the first skip connection has a factor of its own")
        first = jax.tree.map(np.copy, layers[stack]["self"])
        for matrix in READERS["self"]:
            first[matrix]["kernel"][0] *= a
        for leaf in first["o"].values():
            leaf[0] /= a
        layers[stack] = layers[stack] | {"self": first}
    scales = {stack: np.ones_like(scale) for stack, scale in plain.embedding_scale.items()}
    return plain._replace(layers=layers, embedding_scale=scales)

"""Folding: converts a trained model to a plain Transformer with sub-layers LN(x + F(x)) or x + F(LN(x)).

For a sub-layer LN(a x + b F(x)), the branch factor b is multiplied into the last matrix of F. The skip factor a is
moved into the residual stream: with x~ = a x, LN(a x + F(x)) = LN(x~ + F(x~ / a)). The norm that produces x is
multiplied by a, and the matrices that read x are divided by a. This keeps the epsilon of the norm. Dividing the branch
instead, LN(x + F(x) / a), would change it to epsilon / a^2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.model import relative
from branchnorm_jax.model.coefficients import Alpha, sublayer_factors
from branchnorm_jax.model.embedding import fix_norm
from branchnorm_jax.model.initializers import LAST_MATRIX
from branchnorm_jax.model.recipe import Weight
from branchnorm_jax.model.transformer import Transformer

SUBLAYERS = {"encoder": ("self", "ffn"), "decoder": ("self", "cross", "ffn")}
READERS = {"self": {"q", "k", "v"}, "cross": {"q"}, "ffn": {"fc1", "gate"}}
"""Matrices of each sub-layer that read the residual stream; cross-attention's "k" and "v" read the encoder output."""

UNUSED_BIAS = -1e9
"""Logit bias of unused tokens. It makes their probability 0."""


class Plain(NamedTuple):
    """The parameters of a plain Transformer as float32 NumPy arrays; matrices are [d_in, d_out].

    Matrices without biases get biases of 0, and gated ones have a "gate". Only LayerNorm has a bias.

    Attributes:
      pre_norm: True for x + F(LN(x)) with a final norm per stack, False for LN(x + F(x)).
      layers: stack -> sub-layer ("self", "cross", "ffn") -> matrix ("q", ..., "fc2") -> leaf, [L, ...]. The norms are
        "self_norm", "cross_norm" and "ffn_norm", with the leaves "scale" and "bias".
      final: stack -> final norm; empty for Post-LN.
      tables: embedding tables "source", "target" and "output", [V, D]; tied tables are the same array. Without an
        encoder, "source" is that of the target.
      embedding_scale: stack -> factor of sqrt(D) E[token] + position, [D]; 1 if a norm follows.
      embedding_norm: stack -> norm of the embeddings; empty without one.
      positions: stack -> learned positions, [P, D]; empty without them.
      relative: stack -> biases of relative positions, [buckets, H]; empty without them.
      bias: bias of the logits, [V].
    """

    pre_norm: bool
    layers: dict[str, dict[str, Any]]
    final: dict[str, dict[str, np.ndarray]]
    tables: dict[str, np.ndarray]
    embedding_scale: dict[str, np.ndarray]
    embedding_norm: dict[str, dict[str, np.ndarray]]
    positions: dict[str, np.ndarray]
    relative: dict[str, np.ndarray]
    bias: np.ndarray

    @property
    def unused(self) -> list[int]:
        """Ids of target tokens with probability 0."""
        return np.flatnonzero(self.bias <= UNUSED_BIAS / 2).tolist()

    def with_rows(self, source: Sequence[int], target: Sequence[int]) -> "Plain":
        """Returns the model with some of its tokens, in this order. Tables that are one array stay one."""
        rows = {"source": list(source), "target": list(target), "output": list(target)}
        ordered = {id(table): table[rows[name]] for name, table in self.tables.items()}
        tables = {name: ordered[id(table)] for name, table in self.tables.items()}
        return self._replace(tables=tables, bias=self.bias[rows["target"]])


def obstacle(model: Transformer) -> str:
    """Returns the reason why a model cannot be folded, or "" if it can."""
    r, norm = model.recipe, model.config.norm
    obstacles = {
        "its layers have more than one residual stream": r.stream != "plain",
        "it has norms after its branches": bool(r.branch_norm),
        "it has norms inside its branches": bool(r.inner_norm),
        "its attention heads have scaling factors": bool(r.head_scale),
        "its sub-layers end with a learned damping": r.damped,
        "its branches subtract scalars from their inputs": r.shifts,
        "it has both Pre-LN and Post-LN layers": r.post_layers is not None,
        "it has no norms": not r.pre and not r.post,
        "it has norms on both sides of a sub-layer": r.pre and r.post,
        "its sub-layers' inputs are scaled": r.pre_scale is not None,
        "it is Pre-LN, and its skip connections have factors": r.pre and r.skip != Weight(),
        "it is Post-LN, and a norm follows its last layer": r.post and r.final != "",
        "its self-attention mixes values of the first layer": model.config.value_residual,
        f"its norms are {norm}": norm not in ("layer_norm", "rms_norm"),
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def fold(model: Transformer, params: Any, alpha: Alpha) -> Plain:
    """Returns the plain Transformer equivalent to `model`.

    `obstacle(model)` must be "".
    """
    recipe, c = model.recipe, model.config
    tables: dict[str, np.ndarray] = dict(jax.tree.map(np.array, params["embedding"]))
    bias = np.array(tables.pop("bias", np.zeros(model.target_vocab, np.float32)))
    bias[list(model.unused)] = UNUSED_BIAS
    positions = {stack: tables.pop(f"{stack}_positions") for stack in c.stacks if c.positions == "learned"}
    if c.embedding == "fixnorm":
        tables = {name: np.array(fix_norm(jnp.asarray(table))) for name, table in tables.items()}
    target = tables["shared" if "shared" in tables else "target"]
    source = tables.get("source", target)
    kind = "pre" if recipe.pre else "post"
    layers, scales, norms = {}, {}, {}
    for stack in c.stacks:
        sublayers = tuple(name for name in SUBLAYERS[stack] if name in params[stack])
        tree = jax.tree.map(lambda leaf: np.array(leaf, np.float64), params[stack])
        factors_of = sublayer_factors(recipe, model.depth, stack, alpha, tree)
        factors = {name: factors_of(name) for name in sublayers}
        plain = {name: tree[name] for name in sublayers}
        for matrix in (each for name in sublayers for each in plain[name].values()):
            matrix.setdefault("bias", np.zeros_like(matrix["kernel"][:, 0]))
        plain |= {f"{name}_norm": tree[f"{name}_{kind}_norm"] for name in sublayers}
        scales[stack] = _fold_stack(plain, factors, sublayers, c.width)
        layers[stack] = jax.tree.map(lambda leaf: leaf.astype(np.float32), plain)
        if recipe.embedding_norm:
            scale = scales[stack]
            norms[stack] = {
                leaf: (np.asarray(value) * scale).astype(np.float32)
                for leaf, value in params[f"{stack}_embedding_norm"].items()
            }
            scales[stack] = np.ones_like(scale)
    return Plain(
        pre_norm=recipe.pre,
        layers=layers,
        final={stack: jax.tree.map(np.asarray, params[f"{stack}_norm"]) for stack in c.stacks} if recipe.final else {},
        tables={"source": source, "target": target, "output": tables.get("output", target)},
        embedding_scale=scales,
        embedding_norm=norms,
        positions=positions,
        relative={
            stack: np.asarray(params[relative.table_name(stack)]) for stack in c.stacks if c.positions == "relative"
        },
        bias=bias,
    )


def _fold_stack(
    plain: dict[str, Any], factors: dict[str, tuple[np.ndarray, np.ndarray]], sublayers: tuple[str, ...], width: int
) -> np.ndarray:
    """Folds a stack in place; returns the scale of its embeddings, [D]."""
    first = np.ones(width)
    for place, name in enumerate(sublayers):
        a, b = factors[name]
        last = plain[name][LAST_MATRIX[name]]
        last["kernel"] *= b[:, None, :]
        last["bias"] *= b
        for matrix in READERS[name] & plain[name].keys():
            plain[name][matrix]["kernel"] /= a[:, :, None]
        # The input of a layer's first sub-layer is the output of the layer below, or the embedding for the first layer.
        norm, fed = (plain[f"{sublayers[place - 1]}_norm"], a) if place else (plain[f"{sublayers[-1]}_norm"], a[1:])
        for leaf in norm.values():
            leaf[: len(fed)] *= fed
        if not place:
            first = np.broadcast_to(a[0], (width,)).copy()
    return first


def without_embedding_scale(plain: Plain) -> Plain:
    """Removes the embedding scale by dividing the first branch of each stack instead.

    Some engines cannot scale embeddings. The epsilon of the first norm then has the effect of epsilon / a^2.

    Raises:
      ValueError: if the scale is not a single number.
    """
    layers = dict(plain.layers)
    for stack, scale in plain.embedding_scale.items():
        a = scale[0]
        if (scale != a).any():
            raise ValueError("the first skip connection has a different factor per feature")
        first = jax.tree.map(np.copy, layers[stack]["self"])
        for matrix in READERS["self"]:
            first[matrix]["kernel"][0] *= a
        for leaf in first["o"].values():
            leaf[0] /= a
        layers[stack] = layers[stack] | {"self": first}
    scales = {stack: np.ones_like(scale) for stack, scale in plain.embedding_scale.items()}
    return plain._replace(layers=layers, embedding_scale=scales)

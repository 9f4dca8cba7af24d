"""Statistics of the layers in one update, and their diagnosis.

The diagnosis finds vanishing gradients, collapsed stacks, and the layer where trouble began.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.recipe import STACKS

Layers = Mapping[str, Mapping[str, Any]]
"""`Metrics.layers`: stack -> statistic -> array [L]."""

WEAK = 1e-3
"""A layer is weak if its gradient norm is below this fraction of the largest one in its stack.

Weak layers learn almost nothing.
"""

WEAK_SHARE = 0.1
"""The gradient of a stack vanishes if at least this fraction of its layers is weak."""

COLLAPSED = 0.999
"""A stack is collapsed if the token similarity of its output is above this value.

Its output is then almost the same vector for all tokens of a sentence. An encoder can recover from up to 0.9999 if its
first layers still get a gradient (docs/results.md).
"""


FACTOR = "factor/"
"""Prefix of the names of learned factors among the statistics of a layer."""

OTHER_PARAMETERS = ("kernel", "bias", "mapping", "query")
"""Last names of the parameters of a layer that are not factors: matrices, and vectors that are added or compared."""

FEW = 3
"""A parameter of at most this many numbers per layer is reported number by number, a longer one by its mean."""


def factors(params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the learned factors of the layers of a stack by name, float32 [L] each.

    Factors are the gains of norms (g of ScaleNorm), the weights of skip connection and branch (r of ReZero), the shares
    of a value residual, and all other parameters except matrices and biases. Of a vector, the result has the mean.

    >>> layers = {"branch": jnp.array([0.5, 0.25]), "ffn": {"fc1": {"kernel": jnp.ones((2, 4, 8))}}}
    >>> {name: values.tolist() for name, values in factors(layers).items()}
    {'factor/branch': [0.5, 0.25]}
    """
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [key.key for key in path]
        if names[-1] in OTHER_PARAMETERS:
            continue
        name = FACTOR + "/".join(names)
        if leaf.ndim == 2 and leaf.shape[1] <= FEW:
            found |= {f"{name}/{index + 1}": leaf[:, index] for index in range(leaf.shape[1])}
        else:
            found[name] = leaf.reshape(leaf.shape[0], -1).mean(1)
    return found


def layer_statistics(
    watched: Any,
    gradient: Mapping[str, jax.Array],
    update: Mapping[str, jax.Array],
    norm: Mapping[str, jax.Array],
    params: Mapping[str, Any],
    alpha: Alpha | None,
) -> dict[str, dict[str, jax.Array]]:
    """Returns statistics of every layer in one update, by stack and name, float32 [L] each.

    - gradient: norm of the gradient with respect to the layer's parameters.
    - update: norm of the layer's update (rate x direction) divided by the norm of its parameters. The value is the same
      if the run then skips the update.
    - alpha: the layer's alpha; only if `alpha` is given.
    - branch: rms(b F) / rms(a x), the mean over the sub-layers where x is not 0. It is 0 where a block of
      `streams.Blocks` begins.
    - cosine: cosine of the layer's input and output, the mean over positions.
    - sparsity: fraction of hidden feed-forward units that are exactly 0.
    - similarity: cosine of the layer's outputs at two different tokens of a sentence, the mean over all such pairs. At
      1 all tokens of a sentence have the same vector, and attention cannot distinguish them.
    - factor/...: learned factors before the update; see `factors`.

    Branch, cosine and sparsity include all positions, also padding. Similarity includes only real tokens.

    Args:
      watched: the values that `Transformer.hidden` returns for "watch".
      gradient: stack -> norm of the gradient of the loss with respect to each layer's parameters, [L].
      update: stack -> norm of each layer's update, which is subtracted from its parameters, [L].
      norm: stack -> norm of each layer's parameters before the update, [L].
      params: stack -> parameters before the update, [L, ...] each.
      alpha: alpha of the update if it differs between layers, else None.
    """

    def of(stack: str) -> dict[str, jax.Array]:
        rows = jax.tree.map(lambda leaf: leaf.mean(-1), watched[stack])
        return ({} if alpha is None else {"alpha": alpha[stack]}) | {
            "gradient": gradient[stack],
            "update": update[stack] / norm[stack],
            "branch": jnp.sqrt(rows["branch"] / rows["skip"]).mean(-1, where=rows["skip"] != 0),
            "cosine": rows["cosine"],
            "sparsity": rows["sparsity"],
            "similarity": jnp.where(rows["pairs"] > 0, rows["similarity"] / rows["pairs"], 0.0),
            **factors(params[stack]),
        }

    return {stack: of(stack) for stack in watched}


def weak_layers(gradient: Mapping[str, Any], alpha: Mapping[str, Any] | None = None) -> dict[str, list[int]]:
    """Returns the weak layers of each stack (see `WEAK`), counted from 1.

    A stack without any gradient, or with a norm that is not finite, has no weak layers: next to infinity, all other
    norms would look small.

    Args:
      gradient: stack -> norm of each layer's gradient, [L].
      alpha: stack -> alpha, if it differs between layers. Layers with alpha 0 have not started to grow and are not
        weak.
    """
    weak = {}
    for stack, values in gradient.items():
        started = True if alpha is None else np.asarray(alpha[stack]) > 0
        finite = np.isfinite(values).all()
        weak[stack] = (np.flatnonzero((values < WEAK * np.max(values)) & started & finite) + 1).tolist()
    return weak


def vanishing(gradient: Mapping[str, Any], alpha: Mapping[str, Any] | None = None) -> str:
    """Returns the layers with vanishing gradients as text, such as "decoder layers 1-312 of 500", or ""."""
    weak = weak_layers(gradient, alpha)
    return " and ".join(
        f"{stack} layers {_ranges(layers)} of {len(gradient[stack])}"
        for stack, layers in weak.items()
        if len(layers) >= WEAK_SHARE * len(gradient[stack])
    )


def collapsed(layers: Layers, limit: float = COLLAPSED) -> str:
    """Returns the stacks above the limit as text, such as "the encoder (similarity 0.9998)", or ""."""
    last = {stack: float(statistics["similarity"][-1]) for stack, statistics in layers.items()}
    return " and ".join(f"the {stack} (similarity {value:.4f})" for stack, value in last.items() if value > limit)


def _ranges(numbers: list[int]) -> str:
    """Formats increasing numbers as ranges: [1, 2, 3, 7] -> "1-3, 7"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def largest_update(layers: Layers) -> str:
    """Returns a description of the layer with the largest relative update; "" without statistics."""
    largest = [(np.max(values["update"]), stack, np.argmax(values["update"])) for stack, values in layers.items()]
    return f"; the largest relative update is in {max(largest)[1]} layer {max(largest)[2] + 1}" if largest else ""


def origin(layers: Layers) -> str:
    """Returns a description of the pass and the layer with the first value that is not finite, or "".

    In the forward pass, trouble spreads upward from the encoder to the decoder. In the backward pass, it spreads
    downward from the decoder to the encoder.
    """
    for way, statistic, order in (("forward", "branch", 1), ("backward", "gradient", -1)):
        # Not in the order of the dict: a compiled function sorts its keys.
        for stack in [stack for stack in STACKS if stack in layers][::order]:
            broken = np.flatnonzero(~np.isfinite(layers[stack][statistic]))
            if broken.size:
                return f", first in the {way} pass of {stack} layer {broken[::order][0] + 1}"
    return ""

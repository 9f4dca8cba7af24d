"""Statistics of the layers in one update, and what they show: where gradients vanish, where trouble began."""

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
"""A layer whose gradient is less than this share of the largest of its stack learns next to nothing."""

WEAK_SHARE = 0.1
"""Share of weak layers from which on a stack is said to vanish."""

COLLAPSED = 0.999
"""Token similarity above which the output of a stack no longer tells the tokens of a sentence apart.

Healthy encoders of 18 layers come up to 0.995 before they start to read the source, and recover.
"""


def layer_statistics(
    watched: Any,
    gradient: Mapping[str, jax.Array],
    update: Mapping[str, jax.Array],
    params: Mapping[str, jax.Array],
    alpha: Alpha | None,
) -> dict[str, dict[str, jax.Array]]:
    """What is worth knowing of every layer in one update, by stack: float32 [L] each.

    - gradient: norm over the layer's parameters.
    - update: norm of rate x direction, what is subtracted from them, over their own. (If the update was then skipped:
      what would have been.)
    - alpha: if it is given.
    - branch: rms(b F) / rms(a x), the mean of its sub-layers.
    - cosine: of its input and output, the mean over positions.
    - sparsity: share of hidden feed-forward units that are exactly 0.
    - similarity: cosine of the layer's outputs at two different tokens of a sentence, the mean over all such pairs. At
      1 the tokens of a sentence are one vector: attention has nothing left to choose from.

    Branch, cosine and sparsity are over all positions, padding included; similarity is over real tokens.

    Args:
      watched: what `Transformer.hidden` returns for "watch".
      gradient: stack -> norm of the loss's gradient by each layer's parameters, [L].
      update: stack -> norm of what is subtracted from them, [L].
      params: stack -> their own norm before that, [L].
      alpha: that of the update, where it differs between layers.
    """

    def of(stack: str) -> dict[str, jax.Array]:
        rows = jax.tree.map(lambda leaf: leaf.mean(-1), watched[stack])
        return ({} if alpha is None else {"alpha": alpha[stack]}) | {
            "gradient": gradient[stack],
            "update": update[stack] / params[stack],
            "branch": jnp.sqrt(rows["branch"] / rows["skip"]).mean(-1),
            "cosine": rows["cosine"],
            "sparsity": rows["sparsity"],
            "similarity": jnp.where(rows["pairs"] > 0, rows["similarity"] / rows["pairs"], 0.0),
        }

    return {stack: of(stack) for stack in STACKS}


def weak_layers(gradient: Mapping[str, Any], alpha: Mapping[str, Any] | None = None) -> dict[str, list[int]]:
    """By stack, the layers (from 1) whose gradient is below `WEAK` of the largest; none where there is no gradient.

    Args:
      gradient: stack -> norm of each layer's gradient, [L].
      alpha: where it differs between layers; those where it is 0 have not begun.
    """
    found = {}
    for stack, values in gradient.items():
        begun = True if alpha is None else np.asarray(alpha[stack]) > 0
        found[stack] = (np.flatnonzero((values < WEAK * np.max(values)) & begun) + 1).tolist()
    return found


def vanishing(gradient: Mapping[str, Any], alpha: Mapping[str, Any] | None = None) -> str:
    """Where the gradient vanishes, as words such as "decoder layers 1-312 of 500"; "" if nowhere."""
    weak = weak_layers(gradient, alpha)
    return " and ".join(
        f"{stack} layers {_ranges(layers)} of {len(gradient[stack])}"
        for stack, layers in weak.items()
        if len(layers) >= WEAK_SHARE * len(gradient[stack])
    )


def collapsed(layers: Layers) -> str:
    """Which stacks no longer tell tokens apart, as words such as "the encoder (similarity 0.9998)"; "" if none."""
    last = {stack: float(found["similarity"][-1]) for stack, found in layers.items()}
    return " and ".join(f"the {stack} (similarity {value:.4f})" for stack, value in last.items() if value > COLLAPSED)


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def largest_update(layers: Layers) -> str:
    """Which layer's parameters changed most, relatively, as words; "" without statistics."""
    found = [(np.max(of["update"]), stack, np.argmax(of["update"])) for stack, of in layers.items()]
    return f", most of it in {max(found)[1]} layer {max(found)[2] + 1}" if found else ""


def origin(layers: Layers) -> str:
    """In which pass and layer the first figure that is not finite arose, as words; "" if no layer shows any.

    Forward, trouble spreads upward from encoder to decoder; backward, downward from decoder to encoder.
    """
    for way, statistic, order in (("forward", "branch", 1), ("backward", "gradient", -1)):
        for stack in list(layers)[::order]:
            broken = np.flatnonzero(~np.isfinite(layers[stack][statistic]))
            if broken.size:
                return f", first in the {way} pass of {stack} layer {broken[::order][0] + 1}"
    return ""

"""What counts as trouble during training, where it began, and what to do then."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.errors import DivergedError
from branchnorm_jax.model.parameters import STACKS, Params, norm_by_layer

Layers = Mapping[str, Mapping[str, Any]]
"""`Metrics.layers`: stack -> statistic -> array [L]."""

SKIPPED_IN_A_ROW = 10
"""So many updates without a finite gradient are no accident."""

ADVICE = (
    "in a new --workdir, lower train.learning_rate, lengthen train.warmup_steps or model.alpha_steps, or set "
    "train.clip_norm"
)


def layer_statistics(
    watched: Any, gradient: Params, directions: Params, params: Params, rate: jax.Array
) -> dict[str, dict[str, jax.Array]]:
    """What is worth knowing of every layer in one update, by stack: float32 [L] each.

    - gradient: norm over the layer's parameters.
    - update: norm of rate x direction, what is subtracted from them, over their own. (If the update was then skipped:
      what would have been.)
    - branch: rms(b F) / rms(a x), the mean of its sub-layers.
    - cosine: of its input and output, the mean over positions.
    - sparsity: share of hidden feed-forward units that are exactly 0.

    The last three are over all positions, padding included.

    Args:
      watched: what `Transformer.hidden` returns for "watch".
      gradient: of the loss, by the parameters.
      directions: what the optimiser made of it.
      params: before the update.
      rate: learning rate.
    """

    def of(stack: str) -> dict[str, jax.Array]:
        rows = jax.tree.map(lambda leaf: leaf.mean(-1), watched[stack])
        return {
            "gradient": norm_by_layer(gradient[stack]),
            "update": rate * norm_by_layer(directions[stack]) / norm_by_layer(params[stack]),
            "branch": jnp.sqrt(rows["branch"] / rows["skip"]).mean(-1),
            "cosine": rows["cosine"],
            "sparsity": rows["sparsity"],
        }

    return {stack: of(stack) for stack in STACKS}


def check_finite(step: int, name: str, value: float, layers: Layers | None = None) -> None:
    """Raises `DivergedError` if a figure of the update made at `step`, or of the state before it, is not finite."""
    if not math.isfinite(value):
        raise DivergedError(f"diverged: the {name} is {value} at step {step}{origin(layers or {})}; {ADVICE}")


def check_skipped(step: int, in_a_row: int, layers: Layers) -> None:
    """Raises `DivergedError` if too many updates in a row, the last one at `step`, were skipped."""
    if in_a_row >= SKIPPED_IN_A_ROW:
        raise DivergedError(
            f"diverged: no finite gradient in {in_a_row} updates in a row, the last at step {step}{origin(layers)}; "
            f"{ADVICE}"
        )


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

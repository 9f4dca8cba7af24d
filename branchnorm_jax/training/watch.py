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

WEAK = 1e-3
"""A layer whose gradient is less than this share of the largest of its stack learns next to nothing."""

WEAK_SHARE = 0.1
"""Share of weak layers from which on a stack is said to vanish."""

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


def weak_layers(gradient: Mapping[str, Any]) -> dict[str, list[int]]:
    """By stack, the layers (from 1) whose gradient is below `WEAK` of the largest; none where there is no gradient.

    Args:
      gradient: stack -> norm of each layer's gradient, [L].
    """
    return {stack: (np.flatnonzero(values < WEAK * np.max(values)) + 1).tolist() for stack, values in gradient.items()}


def vanishing(gradient: Mapping[str, Any]) -> str:
    """Where the gradient vanishes, as words such as "decoder layers 1-312 of 500"; "" if nowhere."""
    weak = weak_layers(gradient)
    return " and ".join(
        f"{stack} layers {_ranges(layers)} of {len(gradient[stack])}"
        for stack, layers in weak.items()
        if len(layers) >= WEAK_SHARE * len(gradient[stack])
    )


def _ranges(numbers: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


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

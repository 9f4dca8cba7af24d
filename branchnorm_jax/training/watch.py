"""What counts as trouble during training, where it began, and what to do then."""

import math
from collections.abc import Mapping

import numpy as np

from branchnorm_jax.errors import DivergedError

Layers = Mapping[str, Mapping[str, np.ndarray]]
"""`Metrics.layers`: stack -> statistic -> [L]."""

SKIPPED_IN_A_ROW = 10
"""So many updates without a finite gradient are no accident."""

ADVICE = (
    "in a new --workdir, lower train.learning_rate, lengthen train.warmup_steps or model.alpha_steps, or set "
    "train.clip_norm"
)


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

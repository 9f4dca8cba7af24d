"""What counts as trouble during training, and what to do then."""

import math

from branchnorm_jax.errors import DivergedError


def check_finite(step: int, name: str, value: float) -> None:
    """Raises `DivergedError` if a figure of the update made at `step`, or of the state before it, is not finite."""
    if not math.isfinite(value):
        raise DivergedError(
            f"diverged: the {name} is {value} at step {step}; in a new --workdir, lower train.learning_rate, lengthen "
            f"train.warmup_steps or model.alpha_steps, or set train.clip_norm"
        )

"""What counts as trouble during training, and what to do then."""

import math

from branchnorm_jax.errors import DivergedError
from branchnorm_jax.training.step import Metrics


def check_finite(step: int, metrics: Metrics) -> None:
    """Raises `DivergedError` if the update made at `step` has a loss or gradient that is not finite."""
    for name in ("loss", "grad_norm"):
        value = float(getattr(metrics, name))
        if not math.isfinite(value):
            raise DivergedError(
                f"diverged: {name} is {value} in the update at step {step} (alpha {float(metrics.alpha):.4g}, learning "
                f"rate {float(metrics.learning_rate):.3g}); lower train.learning_rate, lengthen train.warmup_steps or "
                f"model.alpha_steps, or set train.clip_norm"
            )

"""Functions of `step`, the number of completed updates: the learning rate and BranchNorm's alpha.

Both are evaluated inside the compiled update, on a traced int32 step.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ModelConfig, TrainConfig

Schedule = Callable[[jax.Array], jax.Array]
"""step, int32 [] -> float32 []."""


def inverse_sqrt(train: TrainConfig, width: int) -> Schedule:
    """fairseq's inverse_sqrt: linear from `warmup_init` to the peak over W updates, then peak sqrt(W / step).

    Without warm-up (W = 0) it is peak / sqrt(max(step, 1)).
    """
    peak, warmup, first = train.learning_rate, train.warmup_steps, train.warmup_init

    def schedule(step: jax.Array) -> jax.Array:
        u = step.astype(jnp.float32)
        rising = first + u * ((peak - first) / max(warmup, 1))
        return jnp.where(u < warmup, rising, peak * jnp.sqrt(max(warmup, 1) / jnp.maximum(u, 1)))

    return schedule


def noam(train: TrainConfig, width: int) -> Schedule:
    """learning_rate D^-1/2 min(n^-1/2, n W^-3/2) with n = step + 1 (Vaswani et al., 2017)."""
    warmup = max(train.warmup_steps, 1)

    def schedule(step: jax.Array) -> jax.Array:
        n = step.astype(jnp.float32) + 1
        return train.learning_rate * width**-0.5 * jnp.minimum(n**-0.5, n * warmup**-1.5)

    return schedule


def constant(train: TrainConfig, width: int) -> Schedule:
    """Linear from `warmup_init` to the peak over W updates, then the peak."""
    peak, warmup, first = train.learning_rate, train.warmup_steps, train.warmup_init

    def schedule(step: jax.Array) -> jax.Array:
        u = step.astype(jnp.float32)
        return jnp.where(u < warmup, first + u * ((peak - first) / max(warmup, 1)), peak)

    return schedule


def inverse_sqrt_nowarmup(train: TrainConfig, width: int) -> Schedule:
    """T-Fixup's schedule: peak sqrt(P / (P + step)) with P = `decay_steps`, at its peak from the first update on."""
    period = train.decay_steps

    def schedule(step: jax.Array) -> jax.Array:
        return train.learning_rate * jnp.sqrt(period / (period + step.astype(jnp.float32)))

    return schedule


def polynomial(train: TrainConfig, width: int) -> Schedule:
    """Warm-up as `constant`, then end + (peak - end) (1 - (step - W) / (P - W))^power until P = `decay_steps`."""
    warm, peak, end, warmup = constant(train, width), train.learning_rate, train.end_learning_rate, train.warmup_steps
    length = max(train.decay_steps - warmup, 1)

    def schedule(step: jax.Array) -> jax.Array:
        left = jnp.clip(1 - (step.astype(jnp.float32) - warmup) / length, 0.0, 1.0)
        return jnp.where(step < warmup, warm(step), end + (peak - end) * left**train.decay_power)

    return schedule


def val_decay(scores: Sequence[float], patience: int) -> bool:
    """Whether the learning rate should shrink, after these validation scores (more is better, oldest first).

    ValDecay of Transformers without Tears (Nguyen and Salazar, 2019), as its code decides: there are more than
    `patience` scores, and the last is below each of the `patience` ones before it.
    """
    return len(scores) > patience and scores[-1] < min(scores[-1 - patience : -1])


LEARNING_RATES: dict[str, Callable[[TrainConfig, int], Schedule]] = {
    "inverse_sqrt": inverse_sqrt,
    "noam": noam,
    "constant": constant,
    "inverse_sqrt_nowarmup": inverse_sqrt_nowarmup,
    "polynomial": polynomial,
    # The loop multiplies it by `decay_factor` when `val_decay` says so.
    "val_decay": constant,
}


def learning_rate(train: TrainConfig, width: int) -> Schedule:
    """The schedule that the config names. Raises `UserError` with the known names."""
    if train.schedule not in LEARNING_RATES:
        raise UserError(f"config: train.schedule={train.schedule!r} is not one of {', '.join(LEARNING_RATES)}")
    return LEARNING_RATES[train.schedule](train, width)


def alpha(model: ModelConfig) -> Schedule:
    """BranchNorm's alpha_t: 0 at step 0, 1 from step T = `alpha_steps` on.

    linear: t / T (the paper's equation). exp: e^(t ln2 / T) - 1. sigmoid: the logistic curve of slope 10 / T around
    T / 2, shifted and scaled so that it starts at 0 and ends at 1. The paper names the last two without printing their
    formulas: these are this project's. adaptive: linear, at the most; see `next_alpha`.
    """
    total = model.alpha_steps
    edge = 1 / (1 + math.exp(5))
    shapes: dict[str, Callable[[jax.Array], jax.Array]] = {
        "linear": lambda u: u,
        "adaptive": lambda u: u,
        "exp": lambda u: jnp.expm1(math.log(2) * u),
        "sigmoid": lambda u: (jax.nn.sigmoid(10 * (u - 0.5)) - edge) / (1 - 2 * edge),
    }
    shape = shapes[model.alpha_schedule]

    def schedule(step: jax.Array) -> jax.Array:
        return jnp.where(step >= total, 1.0, shape(step.astype(jnp.float32) / total)).astype(jnp.float32)

    return schedule


def next_alpha(
    model: ModelConfig,
) -> Callable[[jax.Array, jax.Array, jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """(step, alpha, held, gradient) -> (alpha, held): alpha_t of update `step`, after the update before it.

    The papers' schedules know it from the step. `adaptive` lets alpha grow by 1 / T an update, but holds it for
    `alpha_hold` updates whenever the weakest layer of a stack has less than `alpha_floor` of the gradient of the
    strongest one (or a gradient that is not finite): it waits until the bottom of the stack learns again.

    `gradient`: stack -> norm of each layer's gradient in the update before, [L].
    """
    if model.alpha_schedule != "adaptive":
        schedule = alpha(model)
        return lambda step, before, held, gradient: (schedule(step), held)

    def react(
        step: jax.Array, before: jax.Array, held: jax.Array, gradient: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        healthy = [norms.min() >= model.alpha_floor * norms.max() for norms in gradient.values()]
        held = jnp.where(jnp.stack(healthy).all(), jnp.maximum(held - 1, 0), model.alpha_hold)
        grown = jnp.minimum(1.0, before + 1 / model.alpha_steps)
        return jnp.where(held > 0, before, grown).astype(jnp.float32), held.astype(jnp.int32)

    return react

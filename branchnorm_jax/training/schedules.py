"""The learning rate, a function of `step`, the number of completed updates; and BranchNorm's alpha, one of its clock.

Both are evaluated inside the compiled update, on a traced int32 scalar.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.errors import UserError
from branchnorm_jax.model.parameters import STACKS
from branchnorm_jax.model.transformer import BranchScale
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


def alpha(model: ModelConfig) -> Callable[[jax.Array], BranchScale]:
    """BranchNorm's alpha by its clock u (`TrainState.clock`): 0 at 0, 1 from T = `alpha_steps` on.

    linear: u / T (the paper's equation). exp: e^(u ln2 / T) - 1. sigmoid: the logistic curve of slope 10 / T around
    T / 2, shifted and scaled so that it starts at 0 and ends at 1. The paper names the last two without printing their
    formulas: these are this project's. adaptive: linear, but its clock may stand; see `tick`.

    Layers that do not all start at once (`alpha_order`, no paper's) share T: the layer of rank r in [0, 1] has the same
    curve, squeezed into the updates from s r T to (1 - s + s r) T, with s = `alpha_stagger`.

    Returns:
      A function of u, int32 [], to float32: [] if all layers have the same, else [L] by stack.
    """
    edge = 1 / (1 + math.exp(5))
    shapes: dict[str, Callable[[jax.Array], jax.Array]] = {
        "linear": lambda u: u,
        "adaptive": lambda u: u,
        "exp": lambda u: jnp.expm1(math.log(2) * u),
        "sigmoid": lambda u: (jax.nn.sigmoid(10 * (u - 0.5)) - edge) / (1 - 2 * edge),
    }
    shape, total, stagger = shapes[model.alpha_schedule], model.alpha_steps, model.alpha_stagger

    def grown(way: jax.Array) -> jax.Array:
        return jnp.where(way >= 1, 1.0, jnp.where(way <= 0, 0.0, shape(way))).astype(jnp.float32)

    def schedule(clock: jax.Array) -> BranchScale:
        # At the end all are 1, whatever rounding makes of their way.
        way, end = clock.astype(jnp.float32) / total, clock >= total
        if model.alpha_order == "uniform":
            return jnp.where(end, 1.0, grown(way))
        ranks = {stack: order(model.alpha_order, getattr(model, f"{stack}_layers")) for stack in STACKS}
        return {stack: jnp.where(end, 1.0, grown((way - stagger * r) / (1 - stagger))) for stack, r in ranks.items()}

    return schedule


def clock_at(model: ModelConfig, scale: BranchScale) -> int:
    """The first clock at which the mean of `alpha(model)` over all layers is that of `scale`, or more; at most T."""
    schedule = jax.jit(alpha(model))

    def mean(scale: BranchScale) -> float:
        return float(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(scale)]).mean(dtype=np.float64))

    wanted = mean(scale)
    return bisect.bisect_left(range(model.alpha_steps), wanted, key=lambda clock: mean(schedule(jnp.int32(clock))))


def order(name: str, layers: int) -> np.ndarray:
    """When each layer's alpha starts to grow, from 0 (the first) to 1 (the last): float32 [L].

    progressive: in the order of the layers' numbers with their bits reversed, so that those that have begun are spread
    evenly over the stack, ever closer to one another.
    """
    index, bits = range(layers), max(1, (layers - 1).bit_length())
    ranks = {
        "bottom_up": list(index),
        "top_down": [layers - 1 - layer for layer in index],
        "progressive": np.argsort(np.argsort([int(f"{layer:0{bits}b}"[::-1], 2) for layer in index])).tolist(),
    }[name]
    return np.asarray(ranks, np.float32) / max(1, layers - 1)


def advance(clock: jax.Array, held: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(clock, held) after an update: the clock goes on by 1, or stands if it is held."""
    return clock + (held == 0), jnp.maximum(held - 1, 0)


def tick(
    model: ModelConfig,
) -> Callable[[jax.Array, jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """(clock, held, gradient) -> (clock, held): `advance`, but for what the gradient of the update says.

    `adaptive` holds the clock for `alpha_hold` updates whenever the weakest layer of a stack has less than
    `alpha_floor` of the gradient of the strongest one (or one is not finite): alpha waits until the bottom of the stack
    learns again. With an `alpha_order`, layers that have not begun are not asked.

    `gradient`: stack -> norm of each layer's gradient in that update, [L].
    """
    schedule = alpha(model)

    def react(clock: jax.Array, held: jax.Array, gradient: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        if model.alpha_schedule == "adaptive":
            scale = schedule(clock)
            healthy = []
            for stack in STACKS:
                norms = gradient[stack]
                asked = scale[stack] > 0 if isinstance(scale, Mapping) else jnp.ones(norms.shape, bool)
                strong = jnp.where(asked, norms, jnp.inf).min() >= model.alpha_floor * norms.max()
                healthy.append(strong & jnp.isfinite(norms).all())
            held = jnp.where(jnp.stack(healthy).all(), held, jnp.maximum(held, model.alpha_hold))
        return advance(clock, held)

    return react

"""Learning-rate schedules and the clock of alpha.

A schedule is a function of `step`, the number of completed updates. The compiled update evaluates the schedule and the
clock on traced int32 scalars.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.config import usual_alpha_steps
from branchnorm_jax.errors import UserError
from branchnorm_jax.model import growth
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.depth_rules import relative_depth
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.recipe import Depth
from branchnorm_jax.options import Config, ModelConfig, TrainConfig

Schedule = Callable[[jax.Array], jax.Array]
"""A function from step, int32 [], to a learning rate, float32 []."""


def inverse_sqrt(train: TrainConfig, width: int) -> Schedule:
    """Returns fairseq's inverse_sqrt schedule.

    The learning rate is linear from `warmup_init` to the peak over W updates, and then peak sqrt(W / step). Without
    warm-up (W = 0) the learning rate is peak / sqrt(max(step, 1)).

    >>> rate = inverse_sqrt(TrainConfig(learning_rate=1.0, warmup_steps=100, warmup_init=0.0), width=512)
    >>> [round(float(rate(jnp.int32(step))), 3) for step in (0, 50, 100, 400, 10_000)]
    [0.0, 0.5, 1.0, 0.5, 0.1]
    """
    warm, peak, warmup = constant(train, width), train.learning_rate, train.warmup_steps

    def schedule(step: jax.Array) -> jax.Array:
        u = step.astype(jnp.float32)
        return jnp.where(u < warmup, warm(step), peak * jnp.sqrt(max(warmup, 1) / jnp.maximum(u, 1)))

    return schedule


def noam(train: TrainConfig, width: int) -> Schedule:
    """Returns the schedule learning_rate D^-1/2 min(n^-1/2, n W^-3/2), n = step + 1 (Vaswani et al., 2017)."""
    warmup = max(train.warmup_steps, 1)

    def schedule(step: jax.Array) -> jax.Array:
        n = step.astype(jnp.float32) + 1
        return train.learning_rate * width**-0.5 * jnp.minimum(n**-0.5, n * warmup**-1.5)

    return schedule


def constant(train: TrainConfig, width: int) -> Schedule:
    """Returns a schedule that is linear from `warmup_init` to the peak over W updates and then constant."""
    peak, warmup, first = train.learning_rate, train.warmup_steps, train.warmup_init

    def schedule(step: jax.Array) -> jax.Array:
        u = step.astype(jnp.float32)
        return jnp.where(u < warmup, first + u * ((peak - first) / max(warmup, 1)), peak)

    return schedule


def inverse_sqrt_nowarmup(train: TrainConfig, width: int) -> Schedule:
    """Returns T-Fixup's schedule: peak sqrt(P / (P + step)) with P = `decay_steps`."""
    period = train.decay_steps

    def schedule(step: jax.Array) -> jax.Array:
        return train.learning_rate * jnp.sqrt(period / (period + step.astype(jnp.float32)))

    return schedule


def polynomial(train: TrainConfig, width: int) -> Schedule:
    """Returns polynomial decay: the warm-up of `constant`, then a decay until step P = `decay_steps`.

    The learning rate during the decay is end + (peak - end) (1 - (step - W) / (P - W))^power.

    >>> options = TrainConfig(learning_rate=1.0, warmup_steps=10, decay_steps=110, decay_power=2.0, warmup_init=0.0)
    >>> rate = polynomial(options, width=512)
    >>> [round(float(rate(jnp.int32(step))), 3) for step in (5, 10, 60, 110, 200)]
    [0.5, 1.0, 0.25, 0.0, 0.0]
    """
    warm, peak, end, warmup = constant(train, width), train.learning_rate, train.end_learning_rate, train.warmup_steps
    length = max(train.decay_steps - warmup, 1)

    def schedule(step: jax.Array) -> jax.Array:
        remaining = jnp.clip(1 - (step.astype(jnp.float32) - warmup) / length, 0.0, 1.0)
        return jnp.where(step < warmup, warm(step), end + (peak - end) * remaining**train.decay_power)

    return schedule


def run_length(train: TrainConfig, updates_per_epoch: float) -> int:
    """Returns the number of updates of a run.

    >>> run_length(TrainConfig(steps=0, epochs=1.1), 100)  # 1.1 * 100 > 110 in floating point
    110
    """
    return train.steps or math.ceil(round(train.epochs * updates_per_epoch, 6))


def with_end(train: TrainConfig, updates: int) -> TrainConfig:
    """Returns the options of a run of `updates` updates, with `decay_steps` > 0.

    Raises:
      UserError: if the learning rate is 0 before the last update, or its decay ends before the warm-up.

    >>> with_end(TrainConfig(schedule="polynomial", decay_steps=0), updates=600).decay_steps
    600
    """
    if not train.decay_steps:
        return dataclasses.replace(train, decay_steps=updates)
    if train.schedule == "polynomial" and updates > train.warmup_steps >= train.decay_steps:
        raise UserError(
            f"train.schedule=polynomial: the decay ends at update {train.decay_steps} (train.decay_steps), before the "
            f"warm-up of train.warmup_steps={train.warmup_steps}; set train.decay_steps={updates}"
        )
    if train.schedule == "polynomial" and not train.end_learning_rate and updates > train.decay_steps:
        raise UserError(
            f"train.schedule=polynomial: the learning rate is 0 from update {train.decay_steps} on, but the run has "
            f"{updates} updates; set train.decay_steps={updates}, or 0 for the length of the run, or a "
            "train.end_learning_rate"
        )
    return train


def range_test(train: TrainConfig, width: int) -> Schedule:
    """Returns a range test (Smith, 2017): init (peak / init)^(step / W) with init = `warmup_init`.

    A single run shows the learning rate at which a method diverges.

    >>> rate = range_test(TrainConfig(warmup_init=1e-6, learning_rate=1.0, warmup_steps=600), width=512)
    >>> [f"{float(rate(jnp.int32(step))):.1e}" for step in (0, 100, 300, 600)]
    ['1.0e-06', '1.0e-05', '1.0e-03', '1.0e+00']
    """
    first, ratio = train.warmup_init, train.learning_rate / max(train.warmup_init, 1e-30)

    def schedule(step: jax.Array) -> jax.Array:
        return first * ratio ** (step.astype(jnp.float32) / max(train.warmup_steps, 1))

    return schedule


def val_decay(scores: Sequence[float], patience: int) -> bool:
    """Returns whether to reduce the learning rate, given validation scores (higher is better, oldest first).

    This is ValDecay of Transformers without Tears (Nguyen and Salazar, 2019), with the rule of the authors' code: the
    learning rate decays if the last score is below each of the `patience` scores before it. The caller ignores the
    result during the warm-up (section 2.4 of the paper). Like the authors' code, it keeps the scores of the warm-up.

    >>> val_decay([30.0, 31.0, 32.0, 29.0], patience=3), val_decay([30.0, 28.0, 32.0, 29.0], patience=3)
    (True, False)
    """
    return len(scores) > patience and scores[-1] < min(scores[-1 - patience : -1])


LEARNING_RATES: dict[str, Callable[[TrainConfig, int], Schedule]] = {
    "inverse_sqrt": inverse_sqrt,
    "noam": noam,
    "constant": constant,
    "inverse_sqrt_nowarmup": inverse_sqrt_nowarmup,
    "polynomial": polynomial,
    "range_test": range_test,
    # After the warm-up, the loop multiplies the learning rate by `decay_factor` when `val_decay` returns True.
    "val_decay": constant,
}


def learning_rate(train: TrainConfig, width: int) -> Schedule:
    """Returns the schedule that the config names.

    Raises:
      UserError: if the schedule is unknown. The message lists the known names.
    """
    if train.schedule not in LEARNING_RATES:
        raise UserError(f"config: train.schedule={train.schedule!r} is not one of {', '.join(LEARNING_RATES)}")
    return LEARNING_RATES[train.schedule](train, width)


def peak(train: TrainConfig, width: int) -> float:
    """Returns the largest learning rate of the schedule. That of `noam` is learning_rate (D W)^(-1/2)."""
    factor = (width * max(train.warmup_steps, 1)) ** -0.5 if train.schedule == "noam" else 1.0
    return train.learning_rate * factor


def doubts(config: Config, updates: int, made: int, clock: int) -> list[str]:
    """Returns lines for the user about schedules that may be wrong.

    Args:
      config: all options.
      updates: number of updates of the whole run.
      made: how many of them the run has made.
      clock: alpha's clock: the number of updates in which alpha has grown so far, also in the run's parent.
    """
    train, model, lines = config.train, config.model, []
    warmup, schedule = train.warmup_steps, learning_rate(train, model.width)

    def share(update: int) -> float:
        """Returns which part of the peak the learning rate has reached; 1 if the schedule has no warm-up."""
        rate, highest = (float(schedule(jnp.int32(each))) for each in (update, warmup))
        return rate / highest if rate < highest else 1.0

    remedy = "raise train.steps, or start another run with a lower" if made else "choose a lower"
    if 0 < updates < warmup and share(updates) < 1:
        lines.append(
            f"the run ends in its warm-up: at the end, the learning rate has reached {share(updates):.1%} of its peak; "
            f"{remedy} train.warmup_steps={warmup}, for example a tenth of the {updates:,} updates"
        )
    recipe = get_recipe(model.method)
    if recipe.grows and updates > 0 and (left := clock + updates - made) < model.alpha_steps:
        lines.append(
            f"alpha does not reach its end: the run ends at {left:,} of model.alpha_steps={model.alpha_steps} updates; "
            f"{remedy} model.alpha_steps, which follows train.warmup_steps unless you set it"
        )
    grows = recipe.grows and model.alpha_order == "equal" and "encoder" in model.stacks
    usual = usual_alpha_steps(config, recipe.warmup_layers)
    if grows and warmup and clock < model.alpha_steps < usual and share(min(model.alpha_steps, warmup - 1)) < 1:
        start, end = (growth.alpha(model)(jnp.int32(each))["encoder"] for each in (0, model.alpha_steps))
        if (start < end).any():
            lines.append(
                f"alpha grows faster than it should at this depth (model.alpha_steps={model.alpha_steps}, by default "
                f"{usual}): the encoder may collapse, see docs/depth.md"
            )
    return lines


def rates(config: Config) -> Callable[[jax.Array, Alpha, jax.Array], dict[str, jax.Array]]:
    """Returns a function (step, alpha, rate) -> learning rates by part of the parameters.

    The result maps each stack to float32 [], or to [L] if the layers differ:

        rate_l = rate alpha_l^p e f,   p = `branch_update_power`, e = `encoder_rate` in the encoder, else 1

    f is 1 except in recipes with a `depth_power`.

    In a deepened model, the rate of old layers and of the other parts is multiplied by `parent_rate`. It is 0 for the
    parts that `freeze` names. Parts that are not in the result have the rate `rate`.

    The size of an Adam update is the learning rate, even for a very small gradient. While alpha is near 0, the
    gradients of the branches are mostly noise. With p > 0, the weights of the branches change very little until alpha
    has grown. The factor alpha_l^p applies to methods with a growing branch weight. The factor e applies to the first
    `encoder_rate_steps` updates, or to all updates if `encoder_rate_steps` is 0.
    """
    train, power = config.train, config.train.branch_update_power
    recipe, stacks = get_recipe(config.model.method), config.model.stacks
    depth = Depth(config.model.encoder_layers, config.model.decoder_layers)
    factor = relative_depth(config.model.base_layers, recipe.depth_power - 1)(depth)
    is_old = {stack: growth.old_layers(config.model, stack) for stack in stacks}
    others = {"embedding", *(part for stack in stacks for part in parts_of(stack))} - {*stacks}
    frozen = frozen_parts(train)

    def by_layer(step: jax.Array, alpha: Alpha, rate: jax.Array) -> dict[str, jax.Array]:
        by_stack = dict.fromkeys(stacks, rate)
        if recipe.grows and power:
            by_stack = {stack: rate * alpha[stack] ** power for stack in stacks}
        if recipe.depth_power:
            by_stack = {stack: getattr(factor, stack) * by_stack[stack] for stack in stacks}
        if train.encoder_rate != 1:
            first = step < train.encoder_rate_steps if train.encoder_rate_steps else jnp.bool_(True)
            by_stack["encoder"] = by_stack["encoder"] * jnp.where(first, train.encoder_rate, 1.0)
        if train.parent_rate != 1:
            shares = {stack: np.where(old, train.parent_rate, 1.0).astype(np.float32) for stack, old in is_old.items()}
            by_stack = {stack: own * shares[stack] for stack, own in by_stack.items()}
            by_stack |= dict.fromkeys(others, rate * train.parent_rate)
        return by_stack | dict.fromkeys(frozen, jnp.zeros(()))

    return by_layer


def check_frozen(config: Config) -> None:
    """Raises `UserError` if the model lacks a part that `train.freeze` names."""
    known = (*config.model.stacks, "embedding")
    if unknown := {*config.train.frozen} - {*known}:
        raise UserError(f"config: train.freeze: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")


def frozen_parts(train: TrainConfig) -> list[str]:
    """Returns the names in the parameter tree that `train.freeze` freezes; not all need to exist."""
    return [part for name in train.frozen for part in parts_of(name)]


def parts_of(name: str) -> list[str]:
    """Returns the names in the parameter tree that belong to a stack or to the embedding; not all need to exist."""
    return [f"{name}{suffix}" for suffix in ("", "_norm", "_embedding_norm", "_combination", "_streams", "_relative")]


def clock_at(model: ModelConfig, alpha: Alpha) -> int:
    """Returns the first clock at which the model's schedule reaches the mean of `alpha` over all layers.

    The result is at most T = `alpha_steps`.
    """
    schedule = jax.jit(growth.alpha(model))
    clocks = range(model.alpha_steps)
    return bisect.bisect_left(clocks, mean(alpha), key=lambda clock: mean(schedule(jnp.int32(clock))))


def mean(alpha: Alpha) -> float:
    """Returns the mean of alpha over all layers."""
    return float(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(alpha)]).mean(dtype=np.float64))


def advance(clock: jax.Array, hold_steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (clock, hold_steps) after an update. The clock advances by 1, except while `hold_steps` > 0.

    >>> [tuple(map(int, advance(jnp.int32(7), jnp.int32(hold)))) for hold in (0, 1, 5)]
    [(8, 0), (7, 0), (7, 4)]
    """
    return clock + (hold_steps == 0), jnp.maximum(hold_steps - 1, 0)


def tick(
    model: ModelConfig,
) -> Callable[[jax.Array, jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]:
    """Returns a function (clock, hold_steps, gradient) -> (clock, hold_steps), called after each update.

    `gradient` maps each stack to the norms of its layers' gradients in that update, [L].

    The function calls `advance`. With the alpha schedule `adaptive` it can also hold the clock, so that alpha waits
    until the bottom of the stack learns again. It holds the clock for `alpha_hold` updates if, in any stack, the
    smallest gradient norm is below `alpha_floor` times the largest one, or a norm is not finite. With an `alpha_order`,
    the minimum excludes layers that have not started to grow.
    """
    schedule, uniform = growth.alpha(model), growth.is_uniform(model)

    def react(
        clock: jax.Array, hold_steps: jax.Array, gradient: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        if model.alpha_schedule == "adaptive":
            alpha = schedule(clock)
            healthy = []
            for stack in model.stacks:
                norms = gradient[stack]
                started = jnp.ones(norms.shape, bool) if uniform else alpha[stack] > 0
                strong = jnp.where(started, norms, jnp.inf).min() >= model.alpha_floor * norms.max()
                healthy.append(strong & jnp.isfinite(norms).all())
            hold_steps = jnp.where(jnp.stack(healthy).all(), hold_steps, jnp.maximum(hold_steps, model.alpha_hold))
        return advance(clock, hold_steps)

    return react

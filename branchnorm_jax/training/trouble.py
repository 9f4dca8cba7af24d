"""Trouble: updates that are not finite or that are spikes, and the reactions of the run.

The compiled update decides itself whether it is skipped, because this decision cannot wait for the host; see
`acceptable`. The host makes all other decisions from the metrics of the update. The functions `decide`,
`decide_about_skips` and `decide_about_state` return a `Decision`, and `plan_rollback` returns a `Rollback`. These
functions do not log or change the run. The loop does both.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from branchnorm_jax.errors import DivergedError
from branchnorm_jax.options import TrainConfig
from branchnorm_jax.training.loop_state import LoopState
from branchnorm_jax.training.watch import largest_update, origin

MAX_ROLLBACKS = 5
"""Maximum number of rollbacks in one run. One more would end the run."""

SKIPPED_IN_A_ROW = 10
"""Number of consecutive skipped updates that ends the run."""

WINDOW, SETTLED = 100, 50
"""Number of updates in the running statistics, and number of updates before a value can count as a spike."""

MIN_DEVIATION = (0.02, 0.05)
"""Lower bounds on the standard deviations of the loss (nats) and of the log update norm in `deviations`."""

ADVICE = (
    "in a new --workdir, lower train.learning_rate, lengthen train.warmup_steps or model.alpha_steps, or set "
    "train.clip_norm"
)


class RunningStats(NamedTuple):
    """Running mean and variance of the loss and of log(update norm / learning rate).

    Attributes:
      seen: number of updates, int32 [].
      mean: float32 [2].
      variance: float32 [2].
    """

    seen: jax.Array
    mean: jax.Array
    variance: jax.Array


def initial_stats() -> RunningStats:
    """Returns the running statistics before the first update."""
    return RunningStats(jnp.zeros((), jnp.int32), jnp.zeros(2), jnp.zeros(2))


def standard_deviations(stats: RunningStats) -> jax.Array:
    """Returns the standard deviations with the lower bounds `MIN_DEVIATION`, float32 [2]."""
    return jnp.maximum(jnp.sqrt(stats.variance), jnp.array(MIN_DEVIATION))


def deviations(stats: RunningStats, values: jax.Array) -> jax.Array:
    """Returns the distances of `values` [2] above their running means in standard deviations, float32 [2].

    The result is 0 before `SETTLED` updates.
    """
    return jnp.where(stats.seen < SETTLED, 0.0, (values - stats.mean) / standard_deviations(stats))


def update_stats(stats: RunningStats, values: jax.Array, limit: float) -> RunningStats:
    """Adds the `values` [2] of one update to the statistics, with weight 1 / min(updates, `WINDOW`).

    A value more than `limit` standard deviations above the mean is clipped to `limit` standard deviations. Therefore a
    spike changes the statistics only a little, but a lasting new level changes them over time. The function ignores
    updates with a value that is not finite. This includes updates with learning rate 0.
    """
    seen = stats.seen + 1
    weight = 1 / jnp.minimum(seen, WINDOW).astype(jnp.float32)
    away = values - stats.mean
    away = jnp.where(stats.seen < SETTLED, away, jnp.minimum(away, limit * standard_deviations(stats)))
    updated = RunningStats(
        seen, stats.mean + weight * away, (1 - weight) * (stats.variance + weight * jnp.square(away))
    )
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(values).all(), new, old), updated, stats)


def acceptable(
    train: TrainConfig, loss: jax.Array, grad_norm: jax.Array, update_norm: jax.Array, above: jax.Array
) -> jax.Array:
    """Returns whether to apply the update, bool []: False for trouble of a kind with the policy "skip".

    `above` is the result of `deviations` for this update, float32 [2].
    """
    good = jnp.bool_(True)
    if train.nonfinite == "skip":
        good &= jnp.isfinite(loss + grad_norm + update_norm)
    if train.spike == "skip":
        good &= ~(above > train.spike_deviations).any()
    return good


class Decision(NamedTuple):
    """The reaction of the run to one update.

    Attributes:
      action: "go" (continue), "skip" (the compiled update has already skipped itself), "stop" (end the run) or
        "rollback".
      step: the update that causes the trouble.
      kind: "nonfinite", "spike" or "skipped"; "" without trouble.
      policy: the value of the option for this kind, for events.jsonl. With "log" the run continues. With "skip" the run
        stops if the state itself is not finite.
      reason: a description of the trouble.
    """

    action: Literal["go", "skip", "stop", "rollback"]
    step: int
    kind: str = ""
    policy: str = ""
    reason: str = ""

    @property
    def ends(self) -> bool:
        """Whether the loop cannot continue from the current state."""
        return self.action in ("stop", "rollback")


def decide(step: int, metrics: Any, layers: Mapping[str, Any], train: TrainConfig) -> Decision:
    """Decides about the update at `step`.

    Args:
      step: the step of the update.
      metrics: the `Metrics` of the update, as Python numbers.
      layers: the layer statistics of the update, on the device or the host. They are read only if there is trouble.
      train: the policies and the threshold for a spike.
    """
    kind, fault = find_fault(metrics, train.spike_deviations)
    if not kind:
        return Decision("go", step)
    policy, fault = getattr(train, kind), fault + locate(layers)
    if policy in ("stop", "rollback"):
        return Decision(policy, step, kind, policy, f"at step {step} {fault}")
    return Decision("skip" if policy == "skip" else "go", step, kind, policy, fault)


def decide_about_skips(step: int, in_a_row: int, layers: Mapping[str, Any]) -> Decision:
    """Stops the run after `SKIPPED_IN_A_ROW` consecutive skipped updates, the last one at `step`."""
    if in_a_row < SKIPPED_IN_A_ROW:
        return Decision("go", step)
    reason = f"{in_a_row} updates in a row were skipped, the last at step {step}{locate(layers)}"
    return Decision("stop", step, "skipped", "stop", reason)


def decide_about_state(step: int, name: str, value: float, train: TrainConfig) -> Decision:
    """Decides about a value that is measured on the state at `step`.

    If the value is not finite, the previous update is the cause.
    """
    blamed = max(step - 1, 0)
    if math.isfinite(value):
        return Decision("go", blamed)
    action: Literal["rollback", "stop"] = "rollback" if train.nonfinite == "rollback" else "stop"
    return Decision(action, blamed, "nonfinite", train.nonfinite, f"at step {step} the {name} is {value}")


def find_fault(metrics: Any, limit: float) -> tuple[str, str]:
    """Returns the kind of trouble in an update and its description, or ("", "") if there is none.

    Args:
      metrics: the `Metrics` of the update, as Python numbers.
      limit: threshold for a spike, in standard deviations above the running mean.
    """
    for name, value in (
        ("loss", metrics.loss),
        ("gradient norm", metrics.grad_norm),
        ("update norm", metrics.update_norm),
    ):
        if not math.isfinite(value):
            return "nonfinite", f"the {name} is {value}"
    for name, value, above in (
        ("update norm", metrics.update_norm, metrics.update_deviations),
        ("loss", metrics.loss, metrics.loss_deviations),
    ):
        if above > limit:
            return "spike", f"the {name} is {value:.4g}, {above:.3g} standard deviations above its recent mean"
    return "", ""


def locate(layers: Mapping[str, Any]) -> str:
    """Returns a description of the layer where the trouble began, or of the largest relative update.

    The result is "" without layer statistics.
    """
    layers = jax.device_get(layers)
    return origin(layers) or largest_update(layers)


class Rollback(NamedTuple):
    """The plan of a rollback.

    Attributes:
      until: the step of the newest checkpoint that may be restored.
      left_out: the first and the last update that the run leaves out when it repeats them. None if the run holds alpha
        instead.
    """

    until: int
    left_out: tuple[int, int] | None


def plan_rollback(trouble: Decision, train: TrainConfig, loop_state: LoopState) -> Rollback:
    """Plans the rollback for the decision `trouble`.

    Raises:
      DivergedError: if another rollback cannot help, because there were already `MAX_ROLLBACKS` rollbacks, or because
        the last rollback held alpha and the trouble occurred again at the same update or before.
    """
    if loop_state.rollbacks == MAX_ROLLBACKS:
        text = f"diverged: {trouble.reason}; rolled back {MAX_ROLLBACKS} times already"
        raise DivergedError(text, trouble.step, trouble.kind)
    if train.rollback == "batches":
        first = max(0, trouble.step - train.rollback_updates + 1)
        return Rollback(first, (first, trouble.step))
    if trouble.step <= loop_state.troubled:
        # The same values of alpha would lead to the same trouble.
        text = f"diverged: {trouble.reason}; holding alpha did not prevent it"
        raise DivergedError(text, trouble.step, trouble.kind)
    return Rollback(trouble.step, None)

"""Trouble: updates that are not finite or far out of line, and what the run does about them.

The compiled update skips itself, because skipping cannot wait for the host: see `acceptable`. The host decides
everything else from the metrics of the update: `decide` and its siblings return a `Decision`, `plan_rollback` returns
how to go back. These functions neither log nor change the run; the loop does.
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
"""Rollbacks in one run; the next trouble ends it."""

SKIPPED_IN_A_ROW = 10
"""Consecutive skipped updates that end the run."""

WINDOW, SETTLED = 100, 50
"""Updates that the running statistics average over, and updates before which nothing counts as a spike."""

MIN_DEVIATION = (0.02, 0.05)
"""Smallest standard deviations of the loss (nats) and of the log update that `deviations` divides by."""

ADVICE = (
    "in a new --workdir, lower train.learning_rate, lengthen train.warmup_steps or model.alpha_steps, or set "
    "train.clip_norm"
)


class RunningStats(NamedTuple):
    """Running mean and variance of the loss and of the logarithm of the update's norm.

    Attributes:
      seen: updates, int32 [].
      mean: float32 [2].
      variance: float32 [2].
    """

    seen: jax.Array
    mean: jax.Array
    variance: jax.Array


def initial_stats() -> RunningStats:
    """The running statistics before the first update."""
    return RunningStats(jnp.zeros((), jnp.int32), jnp.zeros(2), jnp.zeros(2))


def standard_deviations(stats: RunningStats) -> jax.Array:
    """Standard deviations, at least `MIN_DEVIATION`: float32 [2]."""
    return jnp.maximum(jnp.sqrt(stats.variance), jnp.array(MIN_DEVIATION))


def deviations(stats: RunningStats, values: jax.Array) -> jax.Array:
    """Standard deviations that `values` [2] lie above their mean; 0 before `SETTLED` updates: float32 [2]."""
    return jnp.where(stats.seen < SETTLED, 0.0, (values - stats.mean) / standard_deviations(stats))


def update_stats(stats: RunningStats, values: jax.Array, limit: float) -> RunningStats:
    """Adds the values [2] of one more update, with weight 1 / min(updates, `WINDOW`).

    A value more than `limit` deviations too high counts as `limit` deviations: a spike changes the statistics little, a
    new level changes them over time. Values that are not finite are ignored, as is an update with learning rate 0.
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
    """Whether the update is applied, bool []: False if its trouble has the policy "skip". `above`: its `deviations`."""
    good = jnp.bool_(True)
    if train.nonfinite == "skip":
        good &= jnp.isfinite(loss + grad_norm + update_norm)
    if train.spike == "skip":
        good &= ~(above > train.spike_deviations).any()
    return good


class Decision(NamedTuple):
    """What the run does about one update.

    Attributes:
      action: "go" on, "skip" (the update has skipped itself), "stop" the run, or "rollback".
      step: the update that is to blame.
      kind: "nonfinite", "spike" or "skipped"; "" without trouble.
      policy: what the option of that kind says, for events.jsonl. "log" goes on; "skip" stops the run if the state
        itself is not finite.
      reason: the trouble in words.
    """

    action: Literal["go", "skip", "stop", "rollback"]
    step: int
    kind: str = ""
    policy: str = ""
    reason: str = ""

    @property
    def ends(self) -> bool:
        """Whether the loop cannot go on from the present state."""
        return self.action in ("stop", "rollback")


def decide(step: int, metrics: Any, layers: Mapping[str, Any], train: TrainConfig) -> Decision:
    """Decides about the update made at `step`.

    Args:
      step: of the update.
      metrics: its `Metrics`, as Python numbers.
      layers: its layer statistics, on the device or the host; read only if there is trouble.
      train: the policies and the limit of a spike.
    """
    kind, fault = find_fault(metrics, train.spike_deviations)
    if not kind:
        return Decision("go", step)
    policy, fault = getattr(train, kind), fault + locate(layers)
    if policy in ("stop", "rollback"):
        return Decision(policy, step, kind, policy, f"at step {step} {fault}")
    return Decision("skip" if policy == "skip" else "go", step, kind, policy, fault)


def decide_about_skips(step: int, in_a_row: int, layers: Mapping[str, Any]) -> Decision:
    """Stops the run after `SKIPPED_IN_A_ROW` skipped updates, the last one at `step`."""
    if in_a_row < SKIPPED_IN_A_ROW:
        return Decision("go", step)
    reason = f"{in_a_row} updates in a row were skipped, the last at step {step}{locate(layers)}"
    return Decision("stop", step, "skipped", "stop", reason)


def decide_about_state(step: int, name: str, value: float, train: TrainConfig) -> Decision:
    """Decides about a value measured on the state at `step`. If it is not finite, the update before is to blame."""
    blamed = max(step - 1, 0)
    if math.isfinite(value):
        return Decision("go", blamed)
    action: Literal["rollback", "stop"] = "rollback" if train.nonfinite == "rollback" else "stop"
    return Decision(action, blamed, "nonfinite", train.nonfinite, f"at step {step} the {name} is {value}")


def find_fault(metrics: Any, limit: float) -> tuple[str, str]:
    """The kind of trouble that an update shows, and a description; ("", "") if there is none.

    Args:
      metrics: its `Metrics`, as Python numbers.
      limit: standard deviations above the running mean from which a value is a spike.
    """
    for name, value in (
        ("loss", metrics.loss),
        ("gradient norm", metrics.grad_norm),
        ("norm of the update", metrics.update_norm),
    ):
        if not math.isfinite(value):
            return "nonfinite", f"the {name} is {value}"
    for name, value, above in (
        ("update", metrics.update_norm, metrics.update_deviations),
        ("loss", metrics.loss, metrics.loss_deviations),
    ):
        if above > limit:
            return "spike", f"the {name} is {value:.4g}, {above:.3g} standard deviations above the last ones"
    return "", ""


def locate(layers: Mapping[str, Any]) -> str:
    """Where trouble began, or which layer changed most, as words; "" without layer statistics."""
    layers = jax.device_get(layers)
    return origin(layers) or largest_update(layers)


class Rollback(NamedTuple):
    """How the run goes back.

    Attributes:
      until: the newest checkpoint that may be restored, as a step.
      left_out: first and last of the updates that are left out on the way back; None if alpha stands still instead.
    """

    until: int
    left_out: tuple[int, int] | None


def plan_rollback(trouble: Decision, train: TrainConfig, loop_state: LoopState) -> Rollback:
    """Plans the rollback that `trouble` calls for. Raises `DivergedError` if another one cannot help."""
    if loop_state.rollbacks == MAX_ROLLBACKS:
        text = f"diverged: {trouble.reason}; rolled back {MAX_ROLLBACKS} times already"
        raise DivergedError(text, trouble.step, trouble.kind)
    if train.rollback == "batches":
        first = max(0, trouble.step - train.rollback_updates + 1)
        return Rollback(first, (first, trouble.step))
    if trouble.step <= loop_state.troubled:
        # The same values of alpha would lead to the same trouble.
        text = f"diverged: {trouble.reason}; alpha stood still, and it came again"
        raise DivergedError(text, trouble.step, trouble.kind)
    return Rollback(trouble.step, None)

"""What counts as trouble during training, where it began, and what to do then."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.errors import DivergedError
from branchnorm_jax.model.parameters import STACKS

Layers = Mapping[str, Mapping[str, Any]]
"""`Metrics.layers`: stack -> statistic -> array [L]."""

SKIPPED_IN_A_ROW = 10
"""So many updates that had to be skipped are no accident."""

REMEMBERED, SETTLED = 100, 50
"""Updates that make up what is usual; so many at least, before anything is unusual."""

SPREAD = (0.02, 0.05)
"""Standard deviations of loss (nats) and log update that are nothing: smaller ones count as these."""

WEAK = 1e-3
"""A layer whose gradient is less than this share of the largest of its stack learns next to nothing."""

WEAK_SHARE = 0.1
"""Share of weak layers from which on a stack is said to vanish."""

ADVICE = (
    "in a new --workdir, lower train.learning_rate, lengthen train.warmup_steps or model.alpha_steps, or set "
    "train.clip_norm"
)


class Usual(NamedTuple):
    """Running mean and variance of what updates show: of the loss and of the logarithm of the update's norm.

    Attributes:
      seen: updates, int32 [].
      mean: float32 [2].
      variance: float32 [2].
    """

    seen: jax.Array
    mean: jax.Array
    variance: jax.Array


def nothing_seen() -> Usual:
    """Before the first update."""
    return Usual(jnp.zeros((), jnp.int32), jnp.zeros(2), jnp.zeros(2))


def spread(usual: Usual) -> jax.Array:
    """Standard deviations, `SPREAD` at least: float32 [2]."""
    return jnp.maximum(jnp.sqrt(usual.variance), jnp.array(SPREAD))


def deviations(usual: Usual, figures: jax.Array) -> jax.Array:
    """How many standard deviations above their mean `figures` [2] are; 0 before `SETTLED` updates: float32 [2]."""
    return jnp.where(usual.seen < SETTLED, 0.0, (figures - usual.mean) / spread(usual))


def remember(usual: Usual, figures: jax.Array, limit: float) -> Usual:
    """Takes the figures [2] of one more update in, with weight 1 / min(updates, `REMEMBERED`).

    What is more than `limit` deviations too high counts as that many: a spike hardly changes what is usual, a new level
    does in time. What is not finite is forgotten, as is the update of a learning rate of 0.
    """
    seen = usual.seen + 1
    weight = 1 / jnp.minimum(seen, REMEMBERED).astype(jnp.float32)
    away = figures - usual.mean
    away = jnp.where(usual.seen < SETTLED, away, jnp.minimum(away, limit * spread(usual)))
    found = Usual(seen, usual.mean + weight * away, (1 - weight) * (usual.variance + weight * jnp.square(away)))
    return jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(figures).all(), new, old), found, usual)


def layer_statistics(
    watched: Any,
    gradient: Mapping[str, jax.Array],
    update: Mapping[str, jax.Array],
    params: Mapping[str, jax.Array],
    alpha: Any,
) -> dict[str, dict[str, jax.Array]]:
    """What is worth knowing of every layer in one update, by stack: float32 [L] each.

    - gradient: norm over the layer's parameters.
    - update: norm of rate x direction, what is subtracted from them, over their own. (If the update was then skipped:
      what would have been.)
    - alpha: where it differs between layers.
    - branch: rms(b F) / rms(a x), the mean of its sub-layers.
    - cosine: of its input and output, the mean over positions.
    - sparsity: share of hidden feed-forward units that are exactly 0.

    The last three are over all positions, padding included.

    Args:
      watched: what `Transformer.hidden` returns for "watch".
      gradient: stack -> norm of the loss's gradient by each layer's parameters, [L].
      update: stack -> norm of what is subtracted from them, [L].
      params: stack -> their own norm before that, [L].
      alpha: the `BranchScale` of the update.
    """

    def of(stack: str) -> dict[str, jax.Array]:
        rows = jax.tree.map(lambda leaf: leaf.mean(-1), watched[stack])
        return ({"alpha": alpha[stack]} if isinstance(alpha, Mapping) else {}) | {
            "gradient": gradient[stack],
            "update": update[stack] / params[stack],
            "branch": jnp.sqrt(rows["branch"] / rows["skip"]).mean(-1),
            "cosine": rows["cosine"],
            "sparsity": rows["sparsity"],
        }

    return {stack: of(stack) for stack in STACKS}


def check_finite(step: int, name: str, value: float) -> None:
    """Raises `DivergedError`, which blames the update before, if a figure of the state at `step` is not finite."""
    if not math.isfinite(value):
        raise DivergedError(f"at step {step} the {name} is {value}", max(step - 1, 0))


def trouble(metrics: Any, limit: float) -> tuple[str, str]:
    """What is wrong with an update, of the kinds "nonfinite" and "spike", and in words; ("", "") if nothing is.

    Args:
      metrics: its `Metrics`, as numbers.
      limit: so many standard deviations above what is usual are a spike.
    """
    for name, value in (
        ("loss", metrics.loss),
        ("gradient norm", metrics.grad_norm),
        ("norm of the update", metrics.update_norm),
    ):
        if not math.isfinite(value):
            return "nonfinite", f"the {name} is {value}"
    figures = (
        ("update", metrics.update_norm, metrics.update_deviations),
        ("loss", metrics.loss, metrics.loss_deviations),
    )
    for name, value, above in figures:
        if above > limit:
            return "spike", f"the {name} is {value:.4g}, {above:.3g} standard deviations above the last ones"
    return "", ""


def check_skipped(step: int, in_a_row: int, layers: Layers) -> None:
    """Raises `DivergedError` if too many updates in a row, the last one at `step`, had to be skipped."""
    if in_a_row >= SKIPPED_IN_A_ROW:
        where = origin(layers) or largest_update(layers)
        raise DivergedError(
            f"{in_a_row} updates in a row were skipped, the last at step {step}{where}", step, "skipped"
        )


def weak_layers(gradient: Mapping[str, Any], alpha: Any = 1.0) -> dict[str, list[int]]:
    """By stack, the layers (from 1) whose gradient is below `WEAK` of the largest; none where there is no gradient.

    Args:
      gradient: stack -> norm of each layer's gradient, [L].
      alpha: the `BranchScale`; layers where it is 0 have not begun.
    """
    found = {}
    for stack, values in gradient.items():
        begun = np.asarray(alpha[stack]) > 0 if isinstance(alpha, Mapping) else True
        found[stack] = (np.flatnonzero((values < WEAK * np.max(values)) & begun) + 1).tolist()
    return found


def vanishing(gradient: Mapping[str, Any], alpha: Any = 1.0) -> str:
    """Where the gradient vanishes, as words such as "decoder layers 1-312 of 500"; "" if nowhere."""
    weak = weak_layers(gradient, alpha)
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


def largest_update(layers: Layers) -> str:
    """Which layer's parameters changed most, relatively, as words; "" without statistics."""
    found = [(np.max(of["update"]), stack, np.argmax(of["update"])) for stack, of in layers.items()]
    return f", most of it in {max(found)[1]} layer {max(found)[2] + 1}" if found else ""


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

"""Before a deep run: a time lapse of it at its real depth, and what it says of every layer.

A few updates are made at several points of the run's own schedules, one after the other: at its start, and where a
tenth, half and all of the way to the full alpha and the peak learning rate is done. The updates between the points are
left out. Width and batch are reduced; depth, method, optimiser, schedules and text are the run's.
"""

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.data.batches import BatchPlan
from branchnorm_jax.model.parameters import STACKS, Params
from branchnorm_jax.model.transformer import Transformer, decoder_inputs
from branchnorm_jax.options import Config
from branchnorm_jax.training import schedules
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, first_state
from branchnorm_jax.training.step import loss_sums, make_train_step
from branchnorm_jax.training.watch import vanishing

WIDTH, ROWS, UPDATES = 64, 8, 10
"""At most so wide, so many sentences a batch; so many updates at each point."""

POINTS = (0.0, 0.1, 0.5, 1.0)
"""Shares of the way to the full alpha and the peak learning rate."""


class Point(NamedTuple):
    """What the model shows at one point of the run."""

    step: int
    alpha: float
    learning_rate: float
    loss: list[float]
    """Before the first update at this point, after it, and after the last."""
    moved: list[float]
    """Relative change of the decoder's output by the first update, and by all."""
    gradient: dict[str, np.ndarray]
    """After the last: norm of the loss's gradient by the input of each layer, [L] per stack."""
    update: dict[str, np.ndarray]
    """Relative size of the first update of each layer's parameters, [L] per stack."""
    starved: dict[str, np.ndarray]
    """After the last: share of each layer's gradient that is smaller than Adam's epsilon, [L] per stack."""
    gain: float
    """After the last: how much longer a random change of the encoder's input is at its end."""


def reduced(config: Config) -> Config:
    """The same run of a narrower model, in float32."""
    m = config.model
    width = min(m.width, WIDTH)
    heads = max(n for n in range(1, m.heads + 1) if width % n == 0 and width // n >= min(8, width))
    narrow = dataclasses.replace(
        m, width=width, ffn_width=max(1, m.ffn_width * width // m.width), heads=heads, dtype="float32"
    )
    train = dataclasses.replace(config.train, accumulation=1, watch_every=1, nonfinite="stop")
    return dataclasses.replace(config, model=narrow, train=train)


def points_of(config: Config) -> list[int]:
    """The updates at which the lapse looks."""
    way = max(config.model.alpha_steps, config.train.warmup_steps)
    end = min(way, max(config.train.steps - UPDATES, 0)) if config.train.steps else way
    return sorted({round(share * end) for share in POINTS})


def batches_of(plan: BatchPlan) -> Callable[[int], Batch]:
    """A few sentences for each update, from the run's batches of the most common shape."""
    first = [plan.batch_at(step) for step in range(min(200, plan.batches_per_epoch))]
    shape = collections.Counter(batch.source.shape for batch in first).most_common(1)[0][0]
    pool = [batch for batch in first if batch.source.shape == shape]

    def batch(step: int) -> Batch:
        return Batch(*(jnp.asarray(side[:ROWS]) for side in pool[step % len(pool)]))

    return batch


def lapse(
    config: Config, model: Transformer, params: Params, batches: Callable[[int], Batch], progress: Callable[[], Any]
) -> list[Point]:
    """Makes the updates and looks; ends early where the loss is no longer finite.

    Args:
      config: what `reduced` made of the run.
      model: its network.
      params: untrained.
      batches: batch of an update, all of one shape.
      progress: called after each update.
    """
    alpha = schedules.alpha(config.model)
    optimizer = make_optimizer(config.train)
    step = jax.jit(make_train_step(model, optimizer, config), donate_argnums=0)
    look = jax.jit(lambda params, batch, alpha: _look(config, model, params, batch, alpha))
    state = jax.jit(lambda params: first_state(params, optimizer))(params)
    found = []
    for start in points_of(config):
        batch, alpha_t = batches(start), alpha(jnp.int32(start))
        state = dataclasses.replace(state, step=jnp.int32(start), alpha=alpha_t)
        seen = [look(state.params, batch, alpha_t)]
        metrics = []
        for index in range(UPDATES):
            state, made = step(state, batches(start + index))
            metrics.append(made)
            progress()
            if index in (0, UPDATES - 1):
                seen.append(look(state.params, batch, alpha_t))
        seen, metrics = jax.device_get((seen, metrics))
        before, last = seen[0], seen[-1]
        found.append(
            Point(
                step=start,
                alpha=float(alpha_t),
                learning_rate=float(metrics[0].learning_rate),
                loss=[float(one["loss"]) for one in seen],
                moved=[float(_change(before["output"], one["output"])) for one in seen[1:]],
                gradient=last["gradient"],
                update={stack: metrics[0].layers[stack]["update"] for stack in STACKS},
                starved=last["starved"],
                gain=float(last["gain"]),
            )
        )
        if not all(math.isfinite(loss) for loss in found[-1].loss):
            break
    return found


class Verdict(NamedTuple):
    """What the time lapse says of the run."""

    word: str
    """healthy, vanishing or diverging."""
    reason: str


def judge(points: Sequence[Point]) -> Verdict:
    """The first trouble that a point shows: a loss that is not finite or grew, or layers without a gradient."""
    first = points[0].loss[0]
    for point in points:
        where = f"at update {point.step} (alpha {point.alpha:.2g}, learning rate {point.learning_rate:.2g})"
        if not all(map(math.isfinite, point.loss)) or point.loss[-1] > first:
            return Verdict("diverging", f"{where} the loss goes from {point.loss[0]:.3g} to {point.loss[-1]:.3g}")
        layers = vanishing(point.gradient)
        if layers:
            least = min(float(np.min(values) / np.max(values)) for values in point.gradient.values() if np.max(values))
            return Verdict(
                "vanishing", f"in {layers} {where}: the least gradient is {least:.1g} of the largest of its stack"
            )
    last = points[-1]
    return Verdict("healthy", f"the loss falls from {first:.3g} to {last.loss[-1]:.3g}, and every layer learns")


def to_json(config: Config, verdict: Verdict, points: Sequence[Point]) -> str:
    """preflight.json."""
    m = config.model
    shape = dict(width=m.width, ffn_width=m.ffn_width, heads=m.heads, rows=ROWS, updates_per_point=UPDATES)
    lists = [jax.tree.map(lambda x: np.asarray(x).tolist(), point._asdict()) for point in points]
    finite = jax.tree.map(lambda x: x if math.isfinite(x) else None, lists)
    return json.dumps({**verdict._asdict(), **shape, "points": finite}, indent=1, allow_nan=False) + "\n"


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Gradient, first update and starved share of every layer at each point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    floor = 1e-12
    columns = {"gradient": "gradient by input", "update": "first update / weights", "starved": "share below Adam's eps"}
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
    for row, stack in zip(axes, STACKS, strict=True):
        for axis, (name, text) in zip(row, columns.items(), strict=True):
            for point in points:
                values = getattr(point, name)[stack]
                values = values if name == "starved" else np.maximum(values, floor)
                label = f"update {point.step}, alpha {point.alpha:.2g}"
                axis.plot(np.arange(1, len(values) + 1), values, ".-", linewidth=0.8, markersize=3, label=label)
            axis.set(title=f"{stack}: {text}", xlabel="layer", yscale="linear" if name == "starved" else "log")
            axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes[0, 2].set_ylim(-0.05, 1.05)
    axes[1, 2].set_ylim(-0.05, 1.05)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def format_points(points: Sequence[Point]) -> str:
    """A table, one line per point."""
    lines = [f"{'update':>8}{'alpha':>8}{'rate':>10}{'loss':>20}{'moved':>16}{'gain':>10}  weakest / largest gradient"]
    for p in points:
        with np.errstate(divide="ignore", invalid="ignore"):
            weakest = [f"{np.min(p.gradient[stack]) / np.max(p.gradient[stack]):.1e}" for stack in STACKS]
        loss, moved = (" ".join(f"{x:.3g}" for x in values) for values in (p.loss, p.moved))
        rows = f"{p.step:>8}{p.alpha:>8.3f}{p.learning_rate:>10.1e}{loss:>20}{moved:>16}{p.gain:>10.1e}"
        lines.append(f"{rows}  {' '.join(weakest)}")
    return "\n".join(lines)


def _change(before: np.ndarray, after: np.ndarray) -> float:
    return float(np.linalg.norm(after - before) / np.linalg.norm(before))


def _look(config: Config, model: Transformer, params: Params, batch: Batch, alpha: jax.Array) -> dict[str, Any]:
    """Loss, gradients and the encoder's gain, without dropout."""
    shapes = {
        stack: (layers, *tokens.shape, config.model.width)
        for stack, layers, tokens in zip(STACKS, model.depth, batch, strict=True)
    }

    def loss(params: Params, probes: dict[str, jax.Array]) -> jax.Array:
        sums, _ = loss_sums(model, params, batch, alpha, config.train.label_smoothing, probes=probes)
        return sums.loss / sums.tokens

    probes = {stack: jnp.zeros(shape) for stack, shape in shapes.items()}
    value, (by_params, by_probes) = jax.value_and_grad(loss, argnums=(0, 1))(params, probes)
    rows = (batch.source[:1], jnp.zeros((shapes["encoder"][0], 1, *shapes["encoder"][2:])))
    change = rows[1].at[0].set(jax.random.normal(jax.random.key(0), rows[1].shape[1:]))
    _, at_end = jax.jvp(lambda probe: model.encode(params, rows[0], alpha, probes=probe), (rows[1],), (change,))
    output, _ = model.hidden(params, batch.source, decoder_inputs(batch.target), alpha)
    return {
        "loss": value,
        "output": output,
        "gradient": {stack: _by_layer(lambda g: jnp.square(g).sum(), by_probes[stack]) ** 0.5 for stack in STACKS},
        "starved": {
            stack: _by_layer(lambda g: (jnp.abs(g) < config.train.adam_eps).sum(), by_params[stack])
            / _by_layer(jnp.size, by_params[stack])
            for stack in STACKS
        },
        "gain": jnp.linalg.norm(at_end) / jnp.linalg.norm(change),
    }


def _by_layer(quantity: Callable[[jax.Array], Any], tree: Any) -> jax.Array:
    """Sum over the leaves [L, ...] of a quantity of each layer's part: [L]."""
    parts = [jax.vmap(lambda g: jnp.asarray(quantity(g), jnp.float32))(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(parts).sum(0)

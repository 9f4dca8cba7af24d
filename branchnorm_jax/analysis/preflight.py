"""Preflight check: a time lapse of a deep run at its real depth, with a reduced width and batch.

It makes a few updates at each of several points of the run's schedules: at the start, at the peak learning rate, and
after a tenth, a half and all of the updates until both the peak learning rate and the full alpha are reached. The
updates between the points are skipped. Everything except width and batch is as in the run.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.analysis import figures
from branchnorm_jax.analysis.signal import gradients
from branchnorm_jax.data.batches import BatchPlan, fill_rows, make_plans
from branchnorm_jax.data.packing import Shape
from branchnorm_jax.data.prepare import Corpus
from branchnorm_jax.data.shuffle import shuffled
from branchnorm_jax.model import growth
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.methods import get_recipe
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.training import schedules
from branchnorm_jax.training.network import make_model
from branchnorm_jax.training.optimizer import adam_factors, make_optimizer
from branchnorm_jax.training.state import Batch, first_state, init_params
from branchnorm_jax.training.step import make_train_step
from branchnorm_jax.training.update import norm_by_layer
from branchnorm_jax.training.watch import collapsed, vanishing

WIDTH, ROWS, UPDATES = 64, 8, 10
"""Maximum width, number of sentences per batch, and number of updates at each point."""

POINTS = (0.0, 0.1, 0.5, 1.0)
"""Points as fractions of the updates until both the full alpha and the peak learning rate are reached."""

COLLAPSING = 0.99
"""An encoder or language model with a token similarity above this value will collapse if its branches still grow."""


class Point(NamedTuple):
    """Measurements at one point of the run."""

    step: int
    alpha: float
    """Alpha, averaged over all layers; 1 for methods whose branches do not grow."""
    by_layer: Alpha | None
    """Alpha of each layer; None if all layers have the same alpha."""
    learning_rate: float
    loss: list[float]
    """Loss before the first update at this point, after the first, and after the last."""
    moved: list[float]
    """Relative change of the decoder output after the first update and after the last."""
    gradient: dict[str, np.ndarray]
    """Norm of the gradient with respect to each layer's input after the last update, [L] per stack."""
    update: dict[str, np.ndarray]
    """Size of the first update relative to the parameters of each layer, [L] per stack."""
    similarity: dict[str, np.ndarray]
    """Similarity of the tokens after each layer in the last update, [L] per stack; see `watch.layer_statistics`."""
    starved: dict[str, np.ndarray]
    """Fraction of each layer's gradient that is below Adam's epsilon after the last update, [L] per stack."""
    gain: float
    """Ratio by which the first stack amplifies a random perturbation of its input, after the last update."""


def reduced(config: Config) -> Config:
    """Returns the config of the same run with a narrower model, in float32."""
    m, width = config.model, min(config.model.width, WIDTH)
    heads = max(n for n in range(1, m.heads + 1) if width % n == 0 and (width == m.width or width // n >= 8))
    shape: dict[str, Any] = dict(
        width=width, ffn_width=max(1, m.ffn_width * width // m.width), heads=heads, dtype="float32"
    )
    if m.head_width:
        head_width = max(1, m.heads * m.head_width * width // (m.width * heads))
        # Rotary positions turn pairs of dimensions.
        shape["head_width"] = head_width + head_width % 2 if m.positions == "rotary" else head_width
    # "nested" needs the least memory, and all choices compute the same numbers.
    narrow = dataclasses.replace(m, **shape, remat="nested", group=0)
    # The noam schedule is proportional to D^-1/2, so compensate for the smaller width.
    rate = config.train.learning_rate * ((width / m.width) ** 0.5 if config.train.schedule == "noam" else 1.0)
    simple: dict[str, Any] = dict(accumulation=1, update_in_backward=False, nonfinite="stop", spike="log")
    train = dataclasses.replace(config.train, **simple, watch_every=1, learning_rate=rate)
    return dataclasses.replace(config, model=narrow, train=train)


def points_of(config: Config, total: int) -> list[int]:
    """Returns the updates at which a run of `total` updates is checked."""
    warmup, way = config.train.warmup_steps, max(config.model.alpha_steps, config.train.warmup_steps)
    end = min(way, max(total - UPDATES, 0))
    return sorted({min(warmup, end), *(round(share * end) for share in POINTS)})


def run_preflight(config: Config, corpus: Corpus, progress: Callable[[int, int], Any]) -> tuple[Config, list[Point]]:
    """Runs the preflight check; returns the narrow config and the measurements.

    Args:
      config: the run to check.
      corpus: its data.
      progress: called with (updates made, updates in all).
    """
    narrow = reduced(config)
    plan, _ = make_plans(narrow.data, corpus.train, corpus.valid, narrow.train.batch_tokens, narrow.train.seed)
    batches = batches_of(plan)
    model = make_model(narrow.model, corpus.tokenizer)
    params = init_params(model, narrow.train.seed, batches(0))
    total = schedules.run_length(narrow.train, plan.batches_per_epoch / narrow.data.tokenisations)
    narrow = dataclasses.replace(narrow, train=schedules.with_end(narrow.train, total))
    return narrow, time_lapse(narrow, model, params, batches, points_of(narrow, total), progress)


def batches_of(plan: BatchPlan) -> Callable[[int], Batch]:
    """Returns a function from an update to its batch of `ROWS` sentences, one per row.

    The sentences are sampled from those whose lengths do not exceed the 75 % quantile of the corpus.
    """
    lengths = plan.sentences.lengths
    usual = np.quantile(lengths, 0.75, axis=0, method="higher")
    pool = shuffled(np.flatnonzero((lengths <= usual).all(1)), plan.seed)
    shape = Shape(ROWS, *usual.tolist())

    def batch(step: int) -> Batch:
        rows = [pool[(step * ROWS + row) % len(pool)][None] for row in range(ROWS)]
        return Batch(*map(jnp.asarray, fill_rows(plan.sentences, rows, shape)))

    return batch


def time_lapse(
    config: Config,
    model: Transformer,
    params: Params,
    batches: Callable[[int], Batch],
    points: Sequence[int],
    progress: Callable[[int, int], Any],
) -> list[Point]:
    """Makes the updates at each point and measures the model.

    Measurements always use the same sentences. Ends early if the loss is no longer finite.

    Args:
      config: the config returned by `reduced`.
      model: its network.
      params: initial parameters.
      batches: returns the batch of an update; all batches have the same shape.
      points: first update of each point; `UPDATES` updates are made from there.
      progress: see `run_preflight`.
    """
    alpha, optimizer, probe_batch = growth.alpha(config.model), make_optimizer(config.train, config.model), batches(0)
    step = jax.jit(make_train_step(model, optimizer, config), donate_argnums=0)
    look = jax.jit(lambda params, alpha: _measure(config, model, params, probe_batch, alpha))
    state = jax.jit(lambda params: first_state(params, optimizer))(params)
    grows = get_recipe(config.model.method).grows
    results: list[Point] = []
    for start in points:
        # Copy alpha to the host, because each update donates the arrays of the state.
        alpha_t = jax.device_get(alpha(jnp.int32(start)))
        state = dataclasses.replace(state, step=jnp.int32(start), clock=jnp.int32(start), hold_steps=jnp.int32(0))
        looks = [look(state.params, alpha_t)]
        metrics = []
        for index in range(UPDATES):
            state, step_metrics = step(state, batches(start + index))
            metrics.append(jax.device_get(step_metrics))
            progress(len(results) * UPDATES + index + 1, len(points) * UPDATES)
            if index in (0, UPDATES - 1):
                looks.append(look(state.params, alpha_t))
        looks = jax.device_get(looks)
        before, last = looks[0], looks[-1]
        results.append(
            Point(
                step=start,
                alpha=float(metrics[0].alpha) if grows else 1.0,
                by_layer=None if growth.is_uniform(config.model) else alpha_t,
                learning_rate=float(metrics[0].learning_rate),
                loss=[float(one["loss"]) for one in looks],
                moved=[float(_change(before["output"], one["output"])) for one in looks[1:]],
                gradient=last["gradient"],
                update={stack: values["update"] for stack, values in metrics[0].layers.items()},
                similarity={stack: values["similarity"] for stack, values in metrics[-1].layers.items()},
                starved=last["starved"],
                gain=float(last["gain"]),
            )
        )
        if not all(math.isfinite(loss) for loss in results[-1].loss):
            break
    return results


class Verdict(NamedTuple):
    """Result of the preflight check."""

    word: str
    """"healthy", "vanishing", "collapsing", "diverging" or "still"."""
    reason: str


def judge(points: Sequence[Point]) -> Verdict:
    """Returns the first problem in order of points, or "healthy".

    At the last point only the loss is checked. The time lapse skips most updates, and a model with so little training
    has weak layers at full alpha even if the run is sound, because skip connections then carry little of the gradient.
    """
    first, last = points[0].loss[0], points[-1].loss[-1]
    peak = max(points, key=lambda point: point.learning_rate).step
    for index, point in enumerate(points):
        where = f"at update {point.step} (alpha {point.alpha:.2g}, learning rate {point.learning_rate:.2g})"
        if not np.isfinite([*point.loss, *(values.sum() for values in point.gradient.values())]).all():
            return Verdict("diverging", f"{where} the loss or a gradient is not finite")
        if point.loss[-1] > 1.01 * first:
            return Verdict("diverging", f"{where} the loss is {point.loss[-1]:.3g}, up from {first:.3g} at the start")
        if 0 < index == len(points) - 1:
            break
        layers = vanishing(point.gradient, point.by_layer)
        if layers:
            least = min(float(np.min(values) / np.max(values)) for values in point.gradient.values() if np.max(values))
            return Verdict(
                "vanishing", f"in {layers} {where}: the smallest gradient is {least:.1g} of the largest of its stack"
            )
        # Near the peak of the learning rate, the decoder of a real run begins to read, which keeps the encoder's tokens
        # apart; a time lapse is too short for that. Before it reads, its own tokens are alike in sound runs, too: it
        # predicts the frequencies of words.
        stack = next(stack for stack in STACKS if stack in point.similarity)
        alike = collapsed({stack: {"similarity": point.similarity[stack]}}, COLLAPSING)
        if alike and point.step < peak and point.alpha < points[-1].alpha:
            return Verdict("collapsing", f"{where} all tokens of a row are nearly the same vector after {alike}")
    if last > 0.99 * first:
        return Verdict("still", f"the loss stays at {last:.3g}")
    return Verdict("healthy", f"the loss falls from {first:.3g} to {last:.3g}, and every layer gets a gradient")


def to_json(config: Config, verdict: Verdict, points: Sequence[Point]) -> str:
    """Formats the results as the content of preflight.json."""
    m = config.model
    shape = dict(width=m.width, ffn_width=m.ffn_width, heads=m.heads, rows=ROWS, updates_per_point=UPDATES)
    lists = [jax.tree.map(lambda x: np.asarray(x).tolist(), point._asdict()) for point in points]
    finite = jax.tree.map(lambda x: x if math.isfinite(x) else None, lists)
    return json.dumps({**verdict._asdict(), **shape, "points": finite}, indent=1, allow_nan=False) + "\n"


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Plots gradient, first update, similarity and starved fraction of every layer at each point."""
    pyplot = figures.pyplot()
    from matplotlib import ticker

    floor = 1e-12
    columns = {
        "gradient": "gradient norm (layer input)",
        "update": "relative size of first update",
        "similarity": "token similarity",
        "starved": "gradient share below Adam's eps",
    }
    stacks = list(points[0].gradient)
    figure, axes = pyplot.subplots(len(stacks), 4, figsize=(16, 3 * len(stacks)), layout="constrained", squeeze=False)
    for row, stack in zip(axes, stacks, strict=True):
        for axis, (name, text) in zip(row, columns.items(), strict=True):
            is_log = name in ("gradient", "update")
            for point in points:
                values = getattr(point, name)[stack]
                values = np.maximum(values, floor) if is_log else values
                label = f"update {point.step}, alpha {point.alpha:.2g}"
                axis.plot(np.arange(1, len(values) + 1), values, ".-", linewidth=0.8, markersize=3, label=label)
            axis.set(title=f"{stack}: {text}", xlabel="layer", yscale="log" if is_log else "linear")
            axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            if not is_log:
                axis.set_ylim(-0.05, 1.05)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(points), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def format_points(points: Sequence[Point]) -> str:
    """Formats a table with one line per point; "-" means that a stack has no gradient."""

    def weakest(values: np.ndarray) -> str:
        return f"{values.min() / values.max():.1e}" if values.max() else "-"

    head = ("update", "alpha", "rate", "loss", "moved", "gain", "similarity", "weakest/largest gradient")
    rows = [
        (
            str(p.step),
            f"{p.alpha:.3f}",
            f"{p.learning_rate:.1e}",
            " ".join(f"{x:.3g}" for x in p.loss),
            " ".join(f"{x:.2g}" for x in p.moved),
            f"{p.gain:.1e}",
            " ".join(f"{values[-1]:.4f}" for values in p.similarity.values()),
            ", ".join(f"{stack} {weakest(values)}" for stack, values in p.gradient.items()),
        )
        for p in points
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in (head, *rows))


def _change(before: np.ndarray, after: np.ndarray) -> float:
    return float(np.linalg.norm(after - before) / np.linalg.norm(before))


def _measure(config: Config, model: Transformer, params: Params, batch: Batch, alpha: Alpha) -> dict[str, Any]:
    """Computes loss, output, gradients and the gain of the first stack, without dropout."""
    value, by_params, by_input = gradients(config, model, params, alpha, batch)
    sentence = batch.source[:1]
    change = jax.random.normal(jax.random.key(0), (*sentence.shape, config.model.width))
    unchanged = jnp.zeros_like(change)
    _, at_end = jax.jvp(lambda shift: model.first_stack(params, sentence, alpha, shift), (unchanged,), (change,))
    # The optimiser multiplies the gradients of some methods by a factor, which is the same as a smaller epsilon.
    factors = adam_factors(config.model)
    epsilons = {stack: config.train.adam_eps / factors.get(stack, 1.0) for stack in config.model.stacks}
    output, _ = model.teacher_forced(params, *batch, alpha)
    return {
        "loss": value,
        "output": output,
        "gradient": {stack: norm_by_layer(values) for stack, values in by_input.items()},
        "starved": {
            stack: _by_layer(functools.partial(_below, epsilon=epsilon), by_params[stack])
            / _by_layer(jnp.size, by_params[stack])
            for stack, epsilon in epsilons.items()
        },
        "gain": jnp.linalg.norm(at_end) / jnp.linalg.norm(change),
    }


def _below(gradient: jax.Array, epsilon: float) -> jax.Array:
    """Returns how many entries are smaller than epsilon."""
    return (jnp.abs(gradient) < epsilon).sum()


def _by_layer(quantity: Callable[[jax.Array], Any], tree: Any) -> jax.Array:
    """Sums a quantity of each layer over the leaves [L, ...] of a tree: [L]."""
    parts = [jax.vmap(lambda g: jnp.asarray(quantity(g), jnp.float32))(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(parts).sum(0)

"""Signal propagation by layer: gradient norms, update sizes and Jacobian singular values, as in the papers.

- Gradient norm: |dL/dx_l|, where L is the mean loss per target token of a batch and x_l the input of layer l (Figure 3
  of BranchNorm).
- Update size: |step| / |weights| of each layer for the first optimiser step at the peak learning rate.
- Singular values of the Jacobian dx_N / dx_0 of the encoder (Figure 5 of ReZero): near 1 if the network preserves its
  input, 0 if it loses it.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.analysis import figures
from branchnorm_jax.model.coefficients import Alpha, uniform
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.taps import Taps
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.tokens import PAD
from branchnorm_jax.training import schedules
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch
from branchnorm_jax.training.step import loss_sums
from branchnorm_jax.training.update import norm_by_layer

JACOBIAN_INPUTS = 256
"""Maximum number of input coordinates of the Jacobian: those of the first whole tokens of the first sentence, and at
least of one."""


class Signal(NamedTuple):
    """Measurements of one model on one batch."""

    gradient: dict[str, np.ndarray]
    """Norm of the gradient with respect to each layer's input, [L] per stack."""
    update: dict[str, np.ndarray]
    """Size of the first optimiser step relative to the parameters of each layer, [L] per stack."""
    singular_values: np.ndarray
    """Singular values of the Jacobian of the first stack (the encoder if there is one), descending."""


def measure(config: Config, model: Transformer, params: Params, alpha: Alpha, batch: Batch) -> Signal:
    """Measures the signal propagation of a model, without dropout.

    Args:
      config: specifies the optimiser and the label smoothing.
      model: the network.
      params: its parameters, initial or trained.
      alpha: alpha_t.
      batch: a few sentences.
    """
    optimizer = make_optimizer(config.train, config.model)
    open_branches = uniform(1.0, model.depth)
    peak = jnp.float32(schedules.peak(config.train, config.model.width))
    rates = schedules.rates(config)(jnp.int32(config.train.warmup_steps), open_branches, peak)
    source_length, width = batch.source.shape[1], config.model.width

    @jax.jit
    def backward(params: Params) -> tuple[Any, Any]:
        _, by_params, by_input = gradients(config, model, params, alpha, batch)
        steps, _ = optimizer.update(by_params, optimizer.init(params), params)
        sizes = {stack: rates[stack] * norm_by_layer(steps[stack]) / norm_by_layer(params[stack]) for stack in by_input}
        return {stack: norm_by_layer(by_layer) for stack, by_layer in by_input.items()}, sizes

    tokens = max(1, min(int((batch.source[0] != PAD).sum()), JACOBIAN_INPUTS // width))

    @jax.jit
    def jacobian(params: Params) -> jax.Array:
        def through(change: jax.Array) -> jax.Array:
            shift = jnp.zeros((1, source_length, width)).at[0, :tokens].set(change)
            return model.first_stack(params, batch.source[:1], alpha, shift)[0, :tokens].ravel()

        size = tokens * width
        return jax.jacfwd(through)(jnp.zeros((tokens, width))).reshape(size, size)

    # JAX sorts the stacks by name; the first one is the one of the Jacobian.
    found = jax.tree.map(np.asarray, backward(params))
    gradient, update = ({stack: values[stack] for stack in config.model.stacks} for values in found)
    return Signal(gradient, update, np.linalg.svd(np.asarray(jacobian(params)), compute_uv=False))


def gradients(
    config: Config, model: Transformer, params: Params, alpha: Alpha, batch: Batch
) -> tuple[jax.Array, Params, dict[str, jax.Array]]:
    """Computes the mean loss per target token and its gradients, without dropout.

    The arguments are those of `measure`. Call it inside `jax.jit`.

    Returns:
      The loss [], its gradient with respect to the parameters, and its gradient with respect to the input of each
      layer, stack -> [L, B, T, D].
    """
    probes = {
        stack: jnp.zeros((layers, *tokens.shape, config.model.width))
        for stack, layers, tokens in zip(config.model.stacks, config.model.layers, batch, strict=False)
    }

    def loss(params: Params, probes: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, _ = loss_sums(model, params, batch, alpha, config.train.label_smoothing, taps=Taps(probes))
        return sums.loss, sums.tokens

    # Divide the gradients instead of the loss, to avoid underflow in a float16 stream; see `step.loss_scale`.
    (value, tokens), sums = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, probes)
    by_params, by_input = jax.tree.map(lambda g: g / tokens, sums)
    return value / tokens, by_params, by_input


def to_csv(signals: Mapping[str, Signal]) -> str:
    """Formats signal.csv: method, quantity, stack, index, value.

    The index is the layer, or the rank of the singular value.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("method", "quantity", "stack", "index", "value"))
    for method, signal in signals.items():
        for quantity in ("gradient", "update"):
            for stack, values in getattr(signal, quantity).items():
                writer.writerows((method, quantity, stack, i + 1, f"{value:.6g}") for i, value in enumerate(values))
        values, first = signal.singular_values, next(iter(signal.gradient))
        writer.writerows((method, "singular_value", first, i + 1, f"{value:.6g}") for i, value in enumerate(values))
    return out.getvalue()


def draw(signals: Mapping[str, Signal], path: Path, title: str) -> None:
    """Plots gradient norms, update sizes and singular values of all methods, on logarithmic axes."""
    pyplot = figures.pyplot()
    from matplotlib import ticker

    # Plot zeros at the bottom of the axis instead of omitting them.
    floor = 1e-12
    stacks = list(next(iter(signals.values())).gradient)
    rows = len(stacks)
    figure, axes = pyplot.subplots(rows, 3, figsize=(13, 3 * rows), layout="constrained", squeeze=False)
    for index, (method, signal) in enumerate(signals.items()):
        style = figures.line(index)
        for row, stack in enumerate(stacks):
            for column, quantity in enumerate(("gradient", "update")):
                values = getattr(signal, quantity)[stack]
                axes[row, column].plot(np.arange(1, len(values) + 1), np.maximum(values, floor), **style, label=method)
        values = np.maximum(signal.singular_values, floor)
        axes[0, 2].plot(np.arange(1, len(values) + 1), values, **style)
    for row, stack in enumerate(stacks):
        axes[row, 0].set(title=f"gradient norm, {stack}", xlabel="layer", yscale="log")
        axes[row, 1].set(title=f"relative update, {stack}", xlabel="layer", yscale="log")
    axes[0, 2].set(title=f"singular values, {stacks[0]} Jacobian", xlabel="rank", yscale="log")
    for axis in axes.flat:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    for axis in axes[1:, 2]:
        axis.axis("off")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

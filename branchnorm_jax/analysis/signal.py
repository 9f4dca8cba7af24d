"""How signals pass through a network, layer by layer: the papers' own evidence for or against a method.

- Gradient norm: |dL/dx_l|, L the mean loss per target token of a batch, x_l the input of layer l (Figure 3 of
  BranchNorm).
- Update size: |step| / |weights| of each layer's parameters at the first optimiser step, at the peak learning rate.
- Singular values of the Jacobian dx_N / dx_0 of the encoder (Figure 5 of ReZero): around 1 where the network passes its
  input on, 0 where it forgets.
"""

import csv
import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.model.parameters import STACKS, Params, norm_by_layer
from branchnorm_jax.model.transformer import BranchScale, Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch
from branchnorm_jax.training.step import loss_sums

JACOBIAN_INPUTS = 256
"""Coordinates of the encoder's input that the Jacobian is taken by, at most: whole tokens of the first sentence."""


class Signal(NamedTuple):
    """What one model shows on one batch."""

    gradient: dict[str, np.ndarray]
    """Norm of the loss's gradient by the input of each layer, [L] per stack."""
    update: dict[str, np.ndarray]
    """Relative size of the first optimiser step, [L] per stack."""
    singular_values: np.ndarray
    """Of the encoder's Jacobian, descending."""


def measure(config: Config, model: Transformer, params: Params, branch_scale: BranchScale, batch: Batch) -> Signal:
    """Measures a model as it is, without dropout.

    Args:
      config: for the optimiser and the smoothing.
      model: the network.
      params: its parameters, fresh or trained.
      branch_scale: alpha_t.
      batch: a few sentences.
    """
    optimizer = make_optimizer(config.train)
    source_length, width = batch.source.shape[1], config.model.width

    @jax.jit
    def backward(params: Params) -> tuple[Any, Any]:
        _, by_params, by_input = gradients(config, model, params, branch_scale, batch)
        steps, _ = optimizer.update(by_params, optimizer.init(params), params)
        rate = config.train.learning_rate
        sizes = {stack: rate * norm_by_layer(steps[stack]) / norm_by_layer(params[stack]) for stack in STACKS}
        return {stack: norm_by_layer(by_layer) for stack, by_layer in by_input.items()}, sizes

    tokens = max(1, min(source_length, JACOBIAN_INPUTS // width))

    @jax.jit
    def jacobian(params: Params) -> jax.Array:
        def through(change: jax.Array) -> jax.Array:
            probes = jnp.zeros((model.depth.encoder, 1, source_length, width)).at[0, 0, :tokens].set(change)
            return model.encode(params, batch.source[:1], branch_scale, probes=probes)[0, :tokens].ravel()

        size = tokens * width
        return jax.jacfwd(through)(jnp.zeros((tokens, width))).reshape(size, size)

    gradient, update = jax.tree.map(np.asarray, backward(params))
    return Signal(gradient, update, np.linalg.svd(np.asarray(jacobian(params)), compute_uv=False))


def gradients(
    config: Config, model: Transformer, params: Params, branch_scale: BranchScale, batch: Batch
) -> tuple[jax.Array, Params, dict[str, jax.Array]]:
    """Mean loss per target token, without dropout, and its gradients.

    Arguments as in `measure`; to be traced.

    Returns:
      The loss [], its gradient by the parameters, and that by the input of each layer: stack -> [L, B, T, D].
    """
    probes = {
        stack: jnp.zeros((layers, *tokens.shape, config.model.width))
        for stack, layers, tokens in zip(STACKS, model.depth, batch, strict=True)
    }

    def loss(params: Params, probes: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, _ = loss_sums(model, params, batch, branch_scale, config.train.label_smoothing, probes=probes)
        return sums.loss, sums.tokens

    # Divided afterwards, for a float16 stream: see `step.loss_scale`.
    (value, tokens), found = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, probes)
    by_params, by_input = jax.tree.map(lambda g: g / tokens, found)
    return value / tokens, by_params, by_input


def to_csv(signals: Mapping[str, Signal]) -> str:
    """signal.csv: method, quantity, stack, index (layer, or rank of the singular value), value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("method", "quantity", "stack", "index", "value"))
    for method, signal in signals.items():
        for quantity in ("gradient", "update"):
            for stack, values in getattr(signal, quantity).items():
                writer.writerows((method, quantity, stack, i + 1, f"{value:.6g}") for i, value in enumerate(values))
        values = signal.singular_values
        writer.writerows((method, "singular_value", "encoder", i + 1, f"{value:.6g}") for i, value in enumerate(values))
    return out.getvalue()


def draw(signals: Mapping[str, Signal], path: Path, title: str) -> None:
    """Draws gradient norms, update sizes and singular values of all methods, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    # What vanished is drawn at the foot of the axis rather than left out.
    floor = 1e-12
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 6), layout="constrained")
    # Several methods may draw the same line: each lets the ones below show through.
    for (method, signal), style in zip(signals.items(), itertools.cycle(("-", "--", "-.", ":"))):
        for row, stack in enumerate(STACKS):
            for column, quantity in enumerate(("gradient", "update")):
                values = getattr(signal, quantity)[stack]
                axes[row, column].plot(np.arange(1, len(values) + 1), np.maximum(values, floor), style, label=method)
        values = np.maximum(signal.singular_values, floor)
        axes[0, 2].plot(np.arange(1, len(values) + 1), values, style)
    for row, stack in enumerate(STACKS):
        axes[row, 0].set(title=f"gradient norm, {stack}", xlabel="layer", yscale="log")
        axes[row, 1].set(title=f"relative update, {stack}", xlabel="layer", yscale="log")
    axes[0, 2].set(title="singular values, encoder Jacobian", xlabel="rank", yscale="log")
    for axis in axes.flat:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes[1, 2].axis("off")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[1, 2].legend(handles, labels, loc="center", frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

"""From gradients to new parameters: learning rates, update in the backward pass, moving average, norms by layer."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.model.stack import LayerUpdate, depth_of
from branchnorm_jax.training.optimizer import moments_of, with_moments
from branchnorm_jax.training.state import TrainState

Norms = dict[str, jax.Array]
"""See `norms`."""


class Updated(NamedTuple):
    """Parameters and optimiser state after an update, with norms as in `norms`."""

    params: Params
    opt_state: optax.OptState
    gradient: Norms
    change: Norms
    """Norms of what was subtracted from the parameters."""
    before: Norms
    """Norms of the parameters before the update."""


def moved_average(ema: Params, params: Params, decay: float, step: jax.Array) -> Params:
    """d ema + (1 - d) params with d = min(decay, (1 + t) / (10 + t)), for the parameters that update t = `step` made.

    The average begins with the untrained parameters. As in TensorFlow and Marian, the decay grows, so that the average
    forgets them soon.
    """
    share = jnp.maximum(1 - decay, 9 / (10 + step.astype(jnp.float32)))
    return jax.tree.map(lambda mean, new: mean + share * (new - mean), ema, params)


def loss_scale(tokens: jax.Array) -> jax.Array:
    """The largest power of two up to `tokens`: the loss is multiplied by it, and the gradients are divided by it.

    The loss is a mean, so each token's part of the gradient is divided by the number of tokens. That is too small for a
    float16 stream (smallest number: 6e-8), and the encoder of a deep model would receive no gradient. With the scale,
    gradients have the size of a single token's. Multiplying and dividing by a power of two is exact.
    """
    return jnp.ldexp(1.0, jnp.frexp(tokens)[1] - 1)


def update(
    scaled: Params,
    scale: jax.Array,
    optimizer: optax.GradientTransformation,
    opt_state: Any,
    params: Params,
    rate: jax.Array,
    rates: Mapping[str, jax.Array],
) -> Updated:
    """p - rate x direction for all of `params`; `scaled` is the gradient times `scale`.

    `rates` has the learning rates of the stacks, [] or [L]; `rate` is that of everything else.
    """

    def times(rate: jax.Array, direction: jax.Array) -> jax.Array:
        return rate.reshape(*rate.shape, *(1,) * (direction.ndim - rate.ndim) * bool(rate.ndim)) * direction

    grads = jax.tree.map(lambda g: g * (1 / scale), scaled)
    directions, opt_state = optimizer.update(grads, opt_state, params)
    change = {
        name: jax.tree.map(functools.partial(times, rates.get(name, rate)), part) for name, part in directions.items()
    }
    return Updated(jax.tree.map(jnp.subtract, params, change), opt_state, norms(grads), norms(change), norms(params))


def differentiate_and_update(
    loss: Callable[..., tuple[jax.Array, Any]],
    scale: jax.Array,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    rate: jax.Array,
    rates: Mapping[str, jax.Array],
) -> tuple[tuple[jax.Array, Any], Updated]:
    """`jax.value_and_grad` and `update` in one, layer by layer: see `stack.run_and_update`.

    Args:
      loss: times `scale`, of parameters and, as `updates`, what `Transformer.hidden` takes.
      scale: see `loss_scale`.
      optimizer: one to which every layer is alone.
      state: before the update.
      rate: learning rate.
      rates: those of the stacks, as in `update`.
    """
    depths = {stack: depth_of(state.params[stack]) for stack in STACKS}
    # A layer's learning rate travels with its moments.
    moments = {
        stack: ([tree[stack] for tree in moments_of(state.opt_state)], jnp.broadcast_to(rates[stack], depths[stack]))
        for stack in STACKS
    }
    figures = {stack: [jnp.zeros(depths[stack])] * 3 for stack in STACKS}

    def applied(stack: str) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
        def apply(params: Any, gradient: Any, moments: tuple[list[Any], jax.Array]) -> tuple[Any, Any, Any]:
            trees, own = moments
            opt_state = with_moments(state.opt_state, [{stack: tree} for tree in trees])
            updated = update({stack: gradient}, scale, optimizer, opt_state, {stack: params}, rate, {stack: own})
            after = [tree[stack] for tree in moments_of(updated.opt_state)]
            return updated.params[stack], (after, own), [parts[stack] for parts in updated[2:]]

        return apply

    def with_updates(params: Params, moments: Any, figures: Any) -> tuple[jax.Array, Any]:
        updates = {stack: LayerUpdate(applied(stack), moments[stack], figures[stack]) for stack in STACKS}
        return loss(params, updates=updates)

    # Of the stacks these are no gradients: parameters, moments and norms after the update.
    value, (after, moments, figures) = jax.value_and_grad(with_updates, argnums=(0, 1, 2), has_aux=True)(
        state.params, moments, figures
    )
    grads, params = ({n: part for n, part in tree.items() if n not in STACKS} for tree in (after, state.params))
    rest = with_moments(
        state.opt_state, [{name: tree[name] for name in params} for tree in moments_of(state.opt_state)]
    )
    updated = update(grads, scale, optimizer, rest, params, rate, {})
    trees = moments_of(updated.opt_state)
    whole = [tree | {stack: moments[stack][0][index] for stack in STACKS} for index, tree in enumerate(trees)]
    of_layers = [{stack: figures[stack][index] for stack in STACKS} for index in range(3)]
    return value, Updated(
        updated.params | {stack: after[stack] for stack in STACKS},
        with_moments(updated.opt_state, whole),
        *(rest | layers for rest, layers in zip(updated[2:], of_layers, strict=True)),
    )


def norms(tree: Params) -> Norms:
    """Norm of each layer, [L], of the stacks; of everything else, []."""
    return {name: norm_by_layer(part) if name in STACKS else optax.tree.norm(part) for name, part in tree.items()}


def total_norm(parts: Norms) -> jax.Array:
    """Norm over everything that `parts` holds the norms of."""
    return jnp.sqrt(sum(jnp.square(norm).sum() for norm in parts.values()))


def norm_by_layer(tree: Any) -> jax.Array:
    """Norm over all leaves [L, ...] together, for each layer: [L]."""
    squares = [jnp.square(leaf).reshape(leaf.shape[0], -1).sum(-1) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros(())))

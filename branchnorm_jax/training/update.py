"""The parameter update: learning rates, update in the backward pass, moving average and norms of the layers."""

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
"""The result of `norms`."""


class Updated(NamedTuple):
    """Parameters and optimiser state after an update, and norms in the format of `norms`."""

    params: Params
    opt_state: optax.OptState
    gradient: Norms
    """Norms of the gradient."""
    change: Norms
    """Norms of the update, which is subtracted from the parameters."""
    before: Norms
    """Norms of the parameters before the update."""


def moved_average(ema: Params, params: Params, decay: float, step: jax.Array) -> Params:
    """Returns the moving average after update t = `step`.

        d ema + (1 - d) params,   d = min(decay, (1 + t) / (10 + t))

    `params` are the parameters after that update. The average starts from the untrained parameters. As in TensorFlow
    and Marian, the decay grows over time, so that the average soon forgets the untrained parameters.
    """
    share = jnp.maximum(1 - decay, 9 / (10 + step.astype(jnp.float32)))
    return jax.tree.map(lambda mean, new: mean + share * (new - mean), ema, params)


def loss_scale(tokens: jax.Array) -> jax.Array:
    """Returns the loss scale: the largest power of two that is not larger than `tokens`.

    The loss is multiplied by the scale, and the gradients are divided by it. The loss is a mean, so the contribution of
    each token to the gradient is divided by the number of tokens. Such a contribution is too small for a float16
    residual stream (smallest number: 6e-8), and the encoder of a deep model would receive no gradient. With the scale,
    gradients have the size of a single token's gradient. Multiplication and division by a power of two are exact.
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
    """Updates all `params`: p - rate x direction.

    Args:
      scaled: the gradient multiplied by `scale`.
      scale: see `loss_scale`.
      optimizer: computes the directions.
      opt_state: the optimiser state before the update.
      params: the parameters before the update.
      rate: the learning rate of the parts that are not in `rates`, [].
      rates: learning rates by part, [] each, or [L] for a stack; see `schedules.rates`.
    """

    def times(rate: jax.Array, direction: jax.Array) -> jax.Array:
        return jnp.expand_dims(rate, tuple(range(rate.ndim, direction.ndim))) * direction

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
    """Combines `jax.value_and_grad` and `update`, layer by layer; see `stack.run_and_update`.

    Args:
      loss: the loss multiplied by `scale`, as a function of the parameters and of the keyword argument `updates`, which
        it passes to `Transformer.hidden`.
      scale: see `loss_scale`.
      optimizer: an optimiser that treats every layer independently.
      state: the state before the update.
      rate, rates: as in `update`.
    """
    stacks = [stack for stack in STACKS if stack in state.params]
    depths = {stack: depth_of(state.params[stack]) for stack in stacks}
    # The learning rate of a layer is passed along with the moments of the layer.
    moments = {
        stack: ([tree[stack] for tree in moments_of(state.opt_state)], jnp.broadcast_to(rates[stack], depths[stack]))
        for stack in stacks
    }
    figures = {stack: [jnp.zeros(depths[stack])] * 3 for stack in stacks}

    def applied(stack: str) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
        def apply(params: Any, gradient: Any, moments: tuple[list[Any], jax.Array]) -> tuple[Any, Any, Any]:
            trees, own = moments
            opt_state = with_moments(state.opt_state, [{stack: tree} for tree in trees])
            updated = update({stack: gradient}, scale, optimizer, opt_state, {stack: params}, rate, {stack: own})
            after = [tree[stack] for tree in moments_of(updated.opt_state)]
            return updated.params[stack], (after, own), [parts[stack] for parts in updated[2:]]

        return apply

    def with_updates(params: Params, moments: Any, figures: Any) -> tuple[jax.Array, Any]:
        updates = {stack: LayerUpdate(applied(stack), moments[stack], figures[stack]) for stack in stacks}
        return loss(params, updates=updates)

    # For the stacks, the results are not gradients but the parameters, moments and norms after the update.
    value, (after, moments, figures) = jax.value_and_grad(with_updates, argnums=(0, 1, 2), has_aux=True)(
        state.params, moments, figures
    )
    grads, params = ({n: part for n, part in tree.items() if n not in STACKS} for tree in (after, state.params))
    rest = with_moments(
        state.opt_state, [{name: tree[name] for name in params} for tree in moments_of(state.opt_state)]
    )
    updated = update(grads, scale, optimizer, rest, params, rate, rates)
    trees = moments_of(updated.opt_state)
    whole = [tree | {stack: moments[stack][0][index] for stack in stacks} for index, tree in enumerate(trees)]
    of_layers = [{stack: figures[stack][index] for stack in stacks} for index in range(3)]
    return value, Updated(
        updated.params | {stack: after[stack] for stack in stacks},
        with_moments(updated.opt_state, whole),
        *(rest | layers for rest, layers in zip(updated[2:], of_layers, strict=True)),
    )


def norms(tree: Params) -> Norms:
    """Returns the norms of the parts of `tree`: [L], one per layer, for the stacks; [] for other parts."""
    return {name: norm_by_layer(part) if name in STACKS else optax.tree.norm(part) for name, part in tree.items()}


def total_norm(parts: Norms) -> jax.Array:
    """Returns the norm of the whole tree, given the norms of its parts, float32 []."""
    return jnp.sqrt(sum(jnp.square(norm).sum() for norm in parts.values()))


def norm_by_layer(tree: Any) -> jax.Array:
    """Returns the norm of each layer over all leaves [L, ...] of the tree, [L]."""
    squares = [jnp.square(leaf).sum(range(1, leaf.ndim)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros(())))

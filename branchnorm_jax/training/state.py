"""The train state: everything that changes during training."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from branchnorm_jax.model.admin import profile
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.parallel.mesh import replicated, shard_tree
from branchnorm_jax.training.trouble import RunningStats, initial_stats

INIT_STREAM, DROPOUT_STREAM, PROFILE_STREAM = range(3)
"""Purposes of random numbers. Each constant is folded into the key of the run's seed."""


class Batch(NamedTuple):
    """Token ids, int32 [rows, length] each, as in `data.batches.TextBatch`."""

    source: jax.Array
    target: jax.Array


@flax.struct.dataclass
class TrainState:
    """Everything that changes during training.

    Attributes:
      step: number of completed updates, int32 [].
      params: the parameters.
      opt_state: the optimiser state.
      rate_scale: factor on the scheduled learning rate, float32 []. `val_decay` reduces it.
      clock: number of updates in which alpha has grown, int32 []; see `growth.alpha`.
      hold_steps: number of coming updates during which the clock stands still, int32 []; see `schedules.tick`.
      running_stats: running statistics of losses and updates.
      ema: moving average of the parameters, with the same dtypes; None if `train.ema_decay` is 0.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    rate_scale: jax.Array
    clock: jax.Array
    hold_steps: jax.Array
    running_stats: RunningStats
    ema: Params | None = None

    @property
    def eval_params(self) -> Params:
        """The parameters for validation, translation and export."""
        return self.params if self.ema is None else self.ema


def first_state(params: Params, optimizer: optax.GradientTransformation, ema: bool = False) -> TrainState:
    """Returns the state before the first update of `params`, with a moving average of them if `ema` is True."""
    zero = jnp.zeros((), jnp.int32)
    # Copy the parameters, because an array that is in the state twice cannot be donated to the update.
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(
        step=zero,
        params=params,
        opt_state=optimizer.init(params),
        rate_scale=jnp.ones(()),
        clock=zero,
        hold_steps=zero,
        running_stats=initial_stats(),
        ema=average,
    )


def abstract_params(model: Transformer, mesh: Mesh) -> Params:
    """Returns the shapes, dtypes and shardings of the parameters, without allocating memory."""
    params = model.abstract_params()
    return jax.tree.map(_place, params, shard_tree(mesh, params, model.logical_axes()))


# The return type is Any, because the result takes the place of an array.
def _place(leaf: jax.ShapeDtypeStruct, split: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)


def abstract_state(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh, ema: bool = False
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state, without allocating memory.

    The optimiser's moments and the moving average are sharded like their parameters. All other fields are replicated on
    every device.
    """
    params = abstract_params(model, mesh)
    state = jax.eval_shape(lambda params: first_state(params, optimizer, ema), params)
    whole = replicated(mesh)
    by_param = jax.tree.map(lambda leaf: leaf.sharding, params)
    by_moment = optax.tree.map_params(
        optimizer.init,
        lambda leaf, split: leaf if _is_masked(leaf) else split,
        state.opt_state,
        by_param,
        transform_non_params=lambda _: whole,
        is_leaf=_is_masked,
    )
    splits = jax.tree.map(lambda _: whole, state).replace(
        params=by_param, opt_state=by_moment, ema=by_param if ema else None
    )
    return jax.tree.map(_place, state, splits)


def _is_masked(node: Any) -> bool:
    """Returns whether a place in the moments is empty, because another transformation has that parameter."""
    return isinstance(node, optax.MaskedNode)


def init_params(model: Transformer, seed: int, first: Batch | None) -> Params:
    """Returns the initial parameters of a run with this seed. Only Admin needs the batch `first`, to profile on it."""
    key = jax.random.key(seed)
    params = model.init(jax.random.fold_in(key, INIT_STREAM))
    if model.recipe.profiled:
        assert first is not None
        params = profile(model, params, *first, jax.random.fold_in(key, PROFILE_STREAM))
    return params


def init_on(mesh: Mesh, model: Transformer, seed: int, first: Batch | None = None) -> Params:
    """Returns `init_params`, drawn directly on their devices. The values do not depend on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(model, mesh))
    return jax.jit(functools.partial(init_params, model, seed), out_shardings=shardings)(first)


def init_state(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    first: Batch,
    ema: bool = False,
) -> TrainState:
    """Creates the state at step 0 directly on its devices. The values do not depend on the mesh."""
    return state_from(model, optimizer, mesh, init_on(mesh, model, seed, first), 0, ema)


def state_from(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: Params,
    clock: int,
    ema: bool = False,
) -> TrainState:
    """Creates the state at step 0 with the given parameters and the given clock of alpha. Donates `params`."""

    def create(params: Params) -> TrainState:
        return dataclasses.replace(first_state(params, optimizer, ema), clock=jnp.int32(clock))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh, ema))
    return jax.jit(create, out_shardings=shardings, donate_argnums=0)(params)

"""The train state: all that a checkpoint holds, and digests by which two states can be compared."""

import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from branchnorm_jax.model.admin import profile
from branchnorm_jax.model.axes import logical_axes
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.parallel.mesh import shard_tree, sharding
from branchnorm_jax.training.watch import Usual, nothing_seen

INIT_STREAM, DROPOUT_STREAM, PROFILE_STREAM = range(3)
"""Folded into the run's seed: what a random number is for."""


class Batch(NamedTuple):
    """Token ids int32 [rows, length] each, as in `data.batches.TextBatch`."""

    source: jax.Array
    target: jax.Array


@flax.struct.dataclass
class TrainState:
    """Everything that changes during training.

    Attributes:
      step: completed updates, int32 [].
      params: parameters.
      opt_state: the optimiser's state.
      rate_scale: factor on the scheduled learning rate, float32 []: what `val_decay` made of it.
      clock: updates that BranchNorm's alpha has grown for, int32 []; see `schedules.alpha`.
      held: for how many updates that clock will stand, int32 []; see `schedules.tick`.
      usual: what losses and updates have been of late.
      ema: moving average of the parameters, in their types; None where `train.ema_decay` asks for none.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    rate_scale: jax.Array
    clock: jax.Array
    held: jax.Array
    usual: Usual
    ema: Params | None = None

    @property
    def eval_params(self) -> Params:
        """The parameters that validate, translate and are exported."""
        return self.params if self.ema is None else self.ema


def first_state(params: Params, optimizer: optax.GradientTransformation, ema: bool = False) -> TrainState:
    """The state before the first update of these parameters; `ema`: with a moving average of them."""
    zero = jnp.zeros((), jnp.int32)
    # Copies: an array that is in the state twice could not be given up to the update.
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(zero, params, optimizer.init(params), jnp.ones(()), zero, zero, nothing_seen(), average)


def abstract_params(model: Transformer, mesh: Mesh) -> Params:
    """Shapes, dtypes and shardings of the parameters; nothing is allocated."""
    params = model.abstract_params()
    return jax.tree.map(_place, params, shard_tree(mesh, params, logical_axes(params)))


# Any, for it stands where an array will be.
def _place(leaf: jax.ShapeDtypeStruct, split: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)


def abstract_state(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: Mesh, ema: bool = False
) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated.

    The optimiser's moments and the average are split as the parameters that they belong to; all else is on every
    device.
    """
    params = abstract_params(model, mesh)
    state = jax.eval_shape(lambda params: first_state(params, optimizer, ema), params)
    whole = sharding(mesh)
    by_param = jax.tree.map(lambda leaf: leaf.sharding, params)
    by_moment = optax.tree.map_params(
        optimizer.init, lambda _, split: split, state.opt_state, by_param, transform_non_params=lambda _: whole
    )
    splits = jax.tree.map(lambda _: whole, state).replace(
        params=by_param, opt_state=by_moment, ema=by_param if ema else None
    )
    return jax.tree.map(_place, state, splits)


def init_params(model: Transformer, seed: int, first: Batch) -> Params:
    """The parameters that a run of this seed starts from; `first`, its first batch, is what Admin profiles."""
    key = jax.random.key(seed)
    params = model.init(jax.random.fold_in(key, INIT_STREAM))
    if model.recipe.profiled:
        params = profile(model, params, *first, jax.random.fold_in(key, PROFILE_STREAM))
    return params


def init_state(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    first: Batch,
    ema: bool = False,
) -> TrainState:
    """The state at step 0, made in place on the devices that hold it. The numbers do not depend on the mesh."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_params(model, mesh))
    params = jax.jit(functools.partial(init_params, model, seed), out_shardings=shardings)(first)
    return state_from(model, optimizer, mesh, params, 0, ema)


def state_from(
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    params: Params,
    clock: int,
    ema: bool = False,
) -> TrainState:
    """The state at step 0 with these parameters, which are given up, and alpha's clock there."""

    def create(params: Params) -> TrainState:
        return dataclasses.replace(first_state(params, optimizer, ema), clock=jnp.int32(clock))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer, mesh, ema))
    return jax.jit(create, out_shardings=shardings, donate_argnums=0)(params)


def sha256(state: TrainState) -> str:
    """Hex digest of parameters, optimiser's state and average, leaf by leaf in the order of their sorted paths."""
    digest = hashlib.sha256()
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state, state.ema))
    for path, leaf in sorted((jax.tree_util.keystr(path), leaf) for path, leaf in leaves):
        digest.update(path.encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).tobytes())
    return digest.hexdigest()


@jax.jit
def checksums(state: Any) -> jax.Array:
    """uint32 [leaves]: a weighted sum modulo 2^32 of each leaf's bits, in the order of the tree.

    Weights are odd and differ from element to element, so any single flipped bit changes the sum. Integer addition is
    exact in any order: the sums do not depend on how the state is split over devices, and cost one pass on the device.
    """

    def checksum(leaf: jax.Array) -> jax.Array:
        if leaf.dtype.itemsize == 4:
            words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
        else:
            words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        weights = jnp.uint32(1)
        for axis, multiplier in zip(range(leaf.ndim), (0x9E3779B2, 0x85EBCA6A, 0xC2B2AE36, 0x27D4EB2E), strict=False):
            weights = weights + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(multiplier)
        return jnp.sum(words * (weights | 1), dtype=jnp.uint32)

    return jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(state)])

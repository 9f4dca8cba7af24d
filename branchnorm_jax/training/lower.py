"""The update of a run on a mesh, lowered for the compiler. Training and `plan.compile` compile the same program."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from branchnorm_jax.data.packing import Shape
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.parallel.mesh import by_device, by_rows, replicated
from branchnorm_jax.training.state import Batch, TrainState
from branchnorm_jax.training.step import Metrics, make_train_step


def lower_update(
    config: Config,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state: TrainState,
    shape: Shape,
) -> jax.stages.Lowered:
    """Lowers (state, batch, signals) -> (state, metrics, largest signal). The state is donated.

    Args:
      config: the run.
      model: its network.
      optimizer: its optimiser.
      mesh: the devices. They may be absent.
      state: shapes, dtypes and shardings of the state.
      shape: number of rows, and row length of each side, for all devices together.
    """
    train_step = make_train_step(model, optimizer, config)

    # The update also reduces the signals of the processes, one number per device: so all of them know when to stop.
    def step(state: TrainState, batch: Batch, signals: jax.Array) -> tuple[TrainState, Metrics, jax.Array]:
        return *train_step(state, batch), signals.max()

    def integers(sharding: jax.sharding.NamedSharding, *sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=sharding)

    splits, whole = jax.tree.map(lambda leaf: leaf.sharding, state), replicated(mesh)
    tokens = Batch(*(integers(by_rows(mesh), shape.rows, length) for length in (shape.source, shape.target)))
    update = jax.jit(step, donate_argnums=0, out_shardings=(splits, whole, whole))
    with jax.set_mesh(mesh):
        return update.lower(state, tokens, integers(by_device(mesh), mesh.size))

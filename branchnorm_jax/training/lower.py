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


def allocated_bytes(compiled: jax.stages.Compiled) -> float:
    """Returns the memory that a program needs on each device, as reported by its compiler.

    It holds the arguments, the results that do not replace an argument, and everything in between. For TPUs, the sum of
    these parts is more than the compiler allocates, because its size of temporary values is too large.
    """
    memory: Any = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    parts = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    return float(getattr(memory, "total_allocation_bytes", 0) or parts)

"""Measures the memory of one update of a fully connected ReZero network of 10,000 layers, by optimiser and remat.

    python -m benchmarks.deep_mlp_memory

The compiler reports the memory, so nothing of this size is allocated. Takes about 20 seconds.
"""

import jax
import jax.numpy as jnp

from benchmarks.measure import save
from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.training.lower import allocated_bytes
from experiments.cifar import CHANNELS, SIDE, Split
from experiments.deep_mlp import OPTIMIZERS, Run, make_update

DEPTH, WIDTHS, BATCH = 10_000, (64, 256), 50


def peak(run: Run) -> int:
    """Returns the bytes of parameters, optimiser state, gradients and temporary arrays of one update."""
    initial, update = make_update(run, SIDE * SIDE * CHANNELS)
    images = jax.ShapeDtypeStruct((run.batch, SIDE, SIDE, CHANNELS), jnp.float32)
    batch = Split(images, jax.ShapeDtypeStruct((run.batch,), jnp.int32))  # type: ignore[arg-type]
    state = jax.eval_shape(initial, jax.random.key(0))
    return int(allocated_bytes(jax.jit(update, donate_argnums=0).lower(state, batch).compile()))


def main() -> None:
    """Saves one value per width, optimiser and remat."""
    runs = {
        f"width_{width}_{optimizer}_{remat}": Run(
            depth=DEPTH, width=width, optimizer=optimizer, remat=remat, batch=BATCH
        )
        for width in WIDTHS
        for optimizer in OPTIMIZERS
        for remat in REMAT
    }
    save("deep_mlp_memory", {name: peak(run) for name, run in runs.items()})


if __name__ == "__main__":
    main()

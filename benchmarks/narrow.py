"""Measures the update of deep, narrow models on a CPU for every `model.remat`.

    taskset -c 0 python -m benchmarks.narrow

At these widths memory traffic costs more than arithmetic, so computing activations again can be faster than storing
them. Takes about five minutes on one core.
"""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.depth import VOCABULARY, update
from benchmarks.measure import in_turn, save
from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.training.state import Batch

ROWS, LENGTH = 16, 64
ROUNDS = 5
SHAPES = {"18L-18L, width 64": (18, 64), "500L-500L, width 32": (500, 32), "4L-4L, width 128": (4, 128)}


def one_update(layers: int, width: int, remat: str, batch: Batch) -> Callable[[], Any]:
    """Returns a function that runs a compiled update, always from the same state."""
    shape: dict[str, Any] = dict(width=width, ffn_width=2 * width, heads=max(2, width // 16), dropout=0.0)
    config = ModelConfig(encoder_layers=layers, decoder_layers=layers, remat=remat, **shape)
    step, state = update(Transformer(config, VOCABULARY, VOCABULARY), batch)
    program = step.lower(state, batch).compile()
    return lambda: program(state, batch)


def main() -> None:
    """Measures the seconds per update: the median over rounds in which the choices alternate."""
    words = np.random.default_rng(0).integers(3, VOCABULARY, (2, ROWS, LENGTH))
    batch = Batch(*jnp.asarray(words, jnp.int32))
    results: dict[str, Any] = {"positions": ROWS * LENGTH}
    for name, (layers, width) in SHAPES.items():
        times = in_turn([one_update(layers, width, remat, batch) for remat in REMAT], ROUNDS)
        results[name] = {remat: statistics.median(seconds) for remat, seconds in zip(REMAT, times, strict=True)}
        jax.clear_caches()
    save("narrow", results)


if __name__ == "__main__":
    main()

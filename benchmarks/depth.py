"""Measures the cost of depth: compilation, program size, memory and update time.

    python -m benchmarks.depth

Measures models of 500L-500L, and the time that each part of an update adds. Takes about twenty minutes on two cores.
The widths are small, so only the ratios are meaningful.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import alternate, save
from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import make_mesh, replicated
from branchnorm_jax.training.lower import allocated_bytes
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, TrainState, init_state
from branchnorm_jax.training.step import loss_sums, make_train_step

VOCABULARY = 800
DEEP, SHALLOW = 500, 6


def model(layers: int, **changes: Any) -> Transformer:
    """Returns a BranchNorm model with the proportions of the papers: F = 4 D, at most D scores per token."""
    base = ModelConfig(encoder_layers=layers, decoder_layers=layers, width=32, ffn_width=128, heads=1)
    return Transformer(dataclasses.replace(base, **changes), VOCABULARY, VOCABULARY)


def batch(rows: int) -> Batch:
    """Returns sentences of 32 random words."""
    words = jax.random.randint(jax.random.key(1), (2, rows, 32), 3, VOCABULARY)
    return Batch(words[0], words[1])


def update(network: Transformer, data: Batch, **train: Any) -> tuple[Any, TrainState]:
    """Returns the jitted update and the initial state."""
    config = dataclasses.replace(Config(), model=network.config, train=TrainConfig(**train))
    optimizer, mesh = make_optimizer(config.train, config.model), make_mesh(config.parallel)
    state = init_state(network, optimizer, mesh, 0, data)
    # As in the training loop: the new state has the same shardings as the old one.
    splits = jax.tree.map(lambda leaf: leaf.sharding, state), replicated(mesh)
    return jax.jit(make_train_step(network, optimizer, config), out_shardings=splits), state


def compilation(pairs: int) -> dict[str, Any]:
    """Compares compile time (with tracing) and program length of a deep and a shallow update."""
    data, programs = batch(8), {}
    states = {layers: update(model(layers), data)[1] for layers in (DEEP, SHALLOW)}

    def compile_it(layers: int) -> None:
        # A new function each time, so that nothing is cached.
        network = model(layers)
        config = dataclasses.replace(Config(), model=network.config)
        step = jax.jit(make_train_step(network, make_optimizer(config.train, config.model), config))
        program: Any = step.lower(states[layers], data).compile()
        programs[layers] = program.as_text().count(" = ")

    times = alternate(lambda: compile_it(DEEP), lambda: compile_it(SHALLOW), pairs)
    return {"compile_deep_over_shallow": times, "program_deep_over_shallow": programs[DEEP] / programs[SHALLOW]}


def memory(pairs: int) -> dict[str, Any]:
    """Measures temporary memory at 500L-500L and 4096 tokens by remat, and the time of `nested`."""
    data = batch(128)

    def gradient(network: Transformer) -> Any:
        def loss(params: Any) -> jax.Array:
            return loss_sums(network, params, data, jnp.float32(0.5), 0.1, jax.random.key(0))[0].loss

        return jax.jit(jax.grad(loss)).lower(network.abstract_params()).compile()

    def temporary(program: Any) -> int:
        return program.memory_analysis().temp_size_in_bytes

    compiled = {remat: gradient(model(DEEP, remat=remat)) for remat in REMAT}
    sizes: dict[str, Any] = {f"temporary_bytes_{remat}": temporary(compiled[remat]) for remat in REMAT}
    carry = 4 * 32 * data.source.size
    workspace = temporary(gradient(model(2, remat="full"))) - 4 * carry
    bound = 2 * DEEP * carry + workspace
    params = model(DEEP).init(jax.random.key(0))
    return sizes | {
        "full_over_carries_and_workspace": sizes["temporary_bytes_full"] / bound,
        "none_over_full": sizes["temporary_bytes_none"] / sizes["temporary_bytes_full"],
        "full_over_nested": sizes["temporary_bytes_full"] / sizes["temporary_bytes_nested"],
        "time_nested_over_full": alternate(lambda: compiled["nested"](params), lambda: compiled["full"](params), pairs),
    }


def step_time(first: dict[str, Any], second: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Compares the update times of two 18L-18L models of width 64, with 1024 tokens.

    `first` and `second` have model options, and optionally the training option `watch_every`.
    """
    data = batch(32)
    wide: dict[str, Any] = dict(width=64, ffn_width=256, heads=2)

    def made(changes: dict[str, Any]) -> tuple[Any, TrainState]:
        watch = {name: changes.pop(name) for name in ("watch_every",) if name in changes}
        return update(model(18, **wide, **changes), data, **watch)

    (ours, our_state), (theirs, their_state) = made(first), made(second)
    return alternate(lambda: ours(our_state, data), lambda: theirs(their_state, data), pairs)


def in_backward(remat: str) -> dict[str, Any]:
    """Compares `train.update_in_backward` with plain updates: peak memory and parameters after 20 updates.

    The model is 100L-100L of width 64, with 256 tokens, so parameters, moments and gradients use most of the memory.
    """
    data, peaks, params = batch(8), {}, {}
    network = model(100, width=64, ffn_width=256, heads=2, remat=remat)
    for backward in (True, False):
        step, state = update(network, data, update_in_backward=backward, warmup_steps=5)
        program: Any = jax.jit(step, donate_argnums=0).lower(state, data).compile()
        peaks[backward] = allocated_bytes(program)
        for _ in range(20):
            state, _ = program(state, data)
        params[backward] = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(state.params))])
    difference = np.abs(params[True] - params[False])
    return {
        f"in_backward_peak_{remat}": peaks[True] / peaks[False],
        f"in_backward_largest_difference_{remat}": float(difference.max()),
        f"in_backward_within_1_ulp_{remat}": float((difference <= np.spacing(np.abs(params[False]))).mean()),
    }


def recompilations() -> int:
    """Counts the recompilations in 4000 updates with growing alpha."""
    data = batch(1)
    step, state = update(model(1), data)
    for _ in range(4000):
        state, _ = step(state, data)
    return step._cache_size() - 1


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of each measurement")
    pairs = parser.parse_args().pairs
    save(
        "depth",
        compilation(pairs)
        | memory(pairs)
        | {
            "time_branchnorm_over_post_ln": step_time(dict(method="branchnorm"), dict(method="post_ln"), 3 * pairs),
            "time_dropout_over_none": step_time(dict(dropout=0.1), dict(dropout=0.0), 3 * pairs),
            "time_watched_over_not": step_time(dict(watch_every=100), dict(watch_every=0), 3 * pairs),
        },
    )
    save("depth_recompilations", {"recompilations": recompilations()})
    save("in_backward", in_backward("full") | in_backward("nested"))


if __name__ == "__main__":
    main()

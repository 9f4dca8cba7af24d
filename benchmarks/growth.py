"""Measures layers that start one after the other: time saved and change of the output.

    python -m benchmarks.growth

Runs a 50L-50L model at several points of its T, with every `model.alpha_order`. One program multiplies the branches
that have not started by 0; the other does not compute them. Takes ten minutes on two cores.
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.depth import VOCABULARY, batch, update
from benchmarks.measure import alternate, save
from branchnorm_jax.analysis.estimate import forward_flops
from branchnorm_jax.model import growth
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.training.state import Batch

MODEL = ModelConfig(encoder_layers=50, decoder_layers=50, width=64, ffn_width=256, heads=2, alpha_steps=1000)
POINTS = (("bottom_up", 0), ("bottom_up", 250), ("top_down", 250), ("progressive", 250), ("bottom_up", 1000))
"""Orders, and points among the 1000 updates of T."""


def network(order: str, **changes: Any) -> Transformer:
    """Returns the model with this order of layers."""
    return Transformer(dataclasses.replace(MODEL, alpha_order=order, **changes), VOCABULARY, VOCABULARY)


def open_share(model: ModelConfig, clocks: jax.Array) -> float:
    """Returns the fraction of branch operations that are computed at these points of T."""
    by_part = forward_flops(dataclasses.replace(Config(), model=model), 32, 32, VOCABULARY)
    scales: Any = jax.vmap(growth.alpha(model))(clocks)
    computed = sum(by_part[stack] * float((values > 0).mean()) for stack, values in scales.items())
    return computed / sum(by_part[stack] for stack in scales)


def difference(order: str, clock: int, data: Batch) -> float:
    """Returns the relative change of the decoder's output if branches with alpha 0 are left out."""
    alpha = growth.alpha(network(order).config)(jnp.int32(clock))
    params = network(order).init(jax.random.key(0))

    def output(order: str) -> jax.Array:
        run = functools.partial(network(order, dropout=0.0).hidden, params, data.source, decoder_inputs(data.target))
        return jax.jit(lambda: run(alpha)[0])()

    left_out, computed = output(order), output("equal")
    return float(jnp.abs(left_out - computed).max() / jnp.abs(computed).max())


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of each measurement")
    pairs = parser.parse_args().pairs
    data = batch(16)
    results: dict[str, Any] = {}
    for stagger in (0.5, 0.8):
        model = dataclasses.replace(MODEL, alpha_order="bottom_up", alpha_stagger=stagger)
        results[f"operations_of_first_T_updates_stagger_{stagger}"] = open_share(model, jnp.arange(model.alpha_steps))
    whole, state = update(network("equal"), data)
    for order, clock in POINTS:
        growing, _ = update(network(order), data)
        at = dataclasses.replace(state, clock=jnp.int32(clock))
        ours, theirs = (functools.partial(program, at, data) for program in (growing, whole))
        results[f"{order}_at_{clock}"] = {
            "operations": open_share(network(order).config, jnp.array([clock])),
            "output_difference": difference(order, clock, data),
        } | alternate(ours, theirs, pairs)
    save("growth", results)


if __name__ == "__main__":
    main()

"""Layers that begin one after the other: operations and time saved, and what it changes in the output.

    python -m benchmarks.growth

A 50L-50L model at several points of its T, with every `model.alpha_order`: branches that are still closed are
multiplied by 0 in one program and not computed in the other. Ten minutes on two cores.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.depth import VOCABULARY, batch, update
from benchmarks.measure import alternate, save
from branchnorm_jax.analysis.plan import forward_flops
from branchnorm_jax.model.transformer import Transformer, decoder_inputs
from branchnorm_jax.options import Config, ModelConfig
from branchnorm_jax.training import schedules

MODEL = ModelConfig(encoder_layers=50, decoder_layers=50, width=64, ffn_width=256, heads=2, alpha_steps=1000)
ORDERS = ("bottom_up", "top_down", "progressive")


def share_computed(model: ModelConfig) -> float:
    """Operations of the layers' branches in the first T updates, over those of all layers in all of them."""
    by_part = forward_flops(dataclasses.replace(Config(), model=model), 32, 32, VOCABULARY)
    begun = jax.vmap(schedules.alpha(model))(jnp.arange(model.alpha_steps))
    open_share: dict[str, Any] = {stack: float((np.asarray(values) > 0).mean()) for stack, values in begun.items()}
    return sum(open_share[stack] * by_part[stack] for stack in open_share) / sum(by_part[stack] for stack in open_share)


def difference(model: ModelConfig, clock: int) -> float:
    """Largest difference of the decoder's output between the two programs, over its largest value."""
    alpha = schedules.alpha(model)(jnp.int32(clock))
    data = batch(8)
    outputs = []
    for order in (model.alpha_order, "uniform"):
        network = Transformer(dataclasses.replace(model, alpha_order=order, dropout=0.0), VOCABULARY, VOCABULARY)
        params = jax.jit(network.init)(jax.random.key(0))
        run = jax.jit(lambda params, network=network: network.hidden(params, *data_inputs(data), alpha)[0])
        outputs.append(run(params))
    return float(jnp.abs(outputs[0] - outputs[1]).max() / jnp.abs(outputs[1]).max())


def data_inputs(data: Any) -> tuple[jax.Array, jax.Array]:
    """Source and decoder inputs."""
    return data.source, decoder_inputs(data.target)


def main() -> None:
    """All figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of each measurement")
    pairs = parser.parse_args().pairs
    data, results = batch(16), {}
    for stagger in (0.5, 0.8):
        model = dataclasses.replace(MODEL, alpha_order="bottom_up", alpha_stagger=stagger)
        results[f"flops_first_T_updates_stagger_{stagger}"] = share_computed(model)
    for order in ORDERS:
        results[f"output_difference_{order}"] = difference(dataclasses.replace(MODEL, alpha_order=order), 250)
    whole, state = update(Transformer(MODEL, VOCABULARY, VOCABULARY), data)
    for clock in (0, 250, 1000):
        for order in ORDERS if clock == 250 else ORDERS[:1]:
            grown, _ = update(Transformer(dataclasses.replace(MODEL, alpha_order=order), VOCABULARY, VOCABULARY), data)
            at = dataclasses.replace(state, clock=jnp.int32(clock))
            open_layers = np.mean(
                [
                    leaf > 0
                    for leaf in schedules.alpha(dataclasses.replace(MODEL, alpha_order=order))(
                        jnp.int32(clock)
                    ).values()
                ]
            )
            results[f"time_{order}_at_{clock}_of_1000"] = {"layers_begun": float(open_layers)} | alternate(
                lambda grown=grown, at=at: grown(at, data), lambda at=at: whole(at, data), pairs
            )
    save("growth", results)


if __name__ == "__main__":
    main()

"""Compares the plan's predictions of memory and time with this machine.

    python -m benchmarks.plan memory    compiles random runs without running them
    python -m benchmarks.plan time      times a few runs; needs an otherwise idle machine

Each part takes about ten minutes on two cores.
"""

import argparse
import dataclasses
import random
import statistics
from typing import Any

import jax

from benchmarks.measure import save
from branchnorm_jax.analysis import devices, estimate
from branchnorm_jax.model.stack import REMAT
from branchnorm_jax.options import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

METHODS = ("branchnorm", "post_ln", "pre_ln", "deepnorm", "rezero", "sub_ln", "admin", "t_fixup", "residual_dual")


def draw(rng: random.Random) -> tuple[Config, int, int]:
    """Draws a random run in float32, and the rows and length of its batch."""
    width = rng.choice((32, 64, 128, 256))
    model = ModelConfig(
        method=rng.choice(METHODS),
        encoder_layers=rng.choice((2, 6, 18, 50, 100)),
        decoder_layers=rng.choice((2, 6, 18, 50, 100)),
        width=width,
        ffn_width=rng.choice((2, 4)) * width,
        heads=rng.choice((1, 2, 4, 8)),
        remat=rng.choice(REMAT),
        dropout=rng.choice((0.0, 0.1)),
        carry_dtype=rng.choice(("float32", "float16")),
        shared_embeddings=rng.choice(("all", "decoder", "none")),
        logits_mb=rng.choice((4, 16, 128)),
    )
    train = TrainConfig(
        accumulation=rng.choice((1, 1, 1, 2, 4)),
        watch_every=rng.choice((0, 100)),
        optimizer=rng.choice(("adamw", "adamw", "adam", "lamb", "radam")),
        clip_norm=rng.choice((0.0, 1.0)),
        nonfinite=rng.choice(("stop", "skip")),
    )
    data = DataConfig(vocab_size=rng.choice((800, 4000, 16_000)))
    return Config(model=model, train=train, data=data), 8 * rng.choice((1, 2, 4, 8, 16)), rng.choice((16, 32, 64))


def memory(count: int) -> dict[str, Any]:
    """Compares predicted and compiled peak bytes of `count` random runs that fit on this machine."""
    rng = random.Random(0)
    ratios: list[float] = []
    while len(ratios) < count:
        config, rows, length = draw(rng)
        predicted = estimate.update_costs(config, rows, length).peak
        if predicted > devices.host_memory() / 4:
            continue
        ratios.append(predicted / estimate.compiled_update_bytes(config, rows, length))
        jax.clear_caches()
        print(f"{len(ratios)}/{count}: {ratios[-1]:.3f}", flush=True)
    return {
        "memory_median": statistics.median(ratios),
        "memory_smallest": min(ratios),
        "memory_largest": max(ratios),
        "memory_within_5_percent": sum(abs(ratio - 1) <= 0.05 for ratio in ratios) / count,
        "memory_within_10_percent": sum(abs(ratio - 1) <= 0.10 for ratio in ratios) / count,
        "memory_ratios": sorted(ratios),
    }


def times() -> dict[str, Any]:
    """Compares predicted and measured seconds per update, after calibration with shallow models."""
    runs = (
        dict(encoder_layers=18, decoder_layers=18, width=64, ffn_width=256, heads=2),
        dict(encoder_layers=50, decoder_layers=6, width=64, ffn_width=256, heads=2, remat="full"),
        dict(encoder_layers=12, decoder_layers=12, width=128, ffn_width=512, heads=4, remat="save_branches"),
        dict(encoder_layers=6, decoder_layers=6, width=256, ffn_width=1024, heads=4),
        dict(encoder_layers=100, decoder_layers=100, width=32, ffn_width=128, heads=1, remat="full"),
        dict(encoder_layers=30, decoder_layers=30, width=64, ffn_width=256, heads=4, remat="nested"),
    )
    ratios = {}
    for changes in runs:
        config = Config(
            model=dataclasses.replace(ModelConfig(), **changes),
            data=DataConfig(vocab_size=4000),
            train=TrainConfig(batch_tokens=1024),
            plan=PlanConfig(sentence_length=32),
        )
        on_device = estimate.calibrate(config)
        length = estimate.lengths(config)[0]
        rows = estimate.rows_of(config, length, 1)
        predicted = on_device(estimate.seconds(config, devices.find(""), estimate.update_costs(config, rows, length)))
        measured = estimate.measured_seconds(config, rows, length)
        ratios[" ".join(f"{key}={value}" for key, value in changes.items())] = predicted / measured
        jax.clear_caches()
        print(f"{predicted:.3f} s predicted, {measured:.3f} s measured: {changes}", flush=True)
    return {"time_ratios": ratios}


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("memory", "time"))
    parser.add_argument("--count", type=int, default=50, help="number of random runs to compile")
    arguments = parser.parse_args()
    save(f"plan_{arguments.part}", times() if arguments.part == "time" else memory(arguments.count))


if __name__ == "__main__":
    main()

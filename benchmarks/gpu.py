"""Measures the kernels of one GPU at width 512, and the MFU of deep training.

    python -m benchmarks.gpu --part=shapes      matrix products, norm and attention, in bfloat16
    python -m benchmarks.gpu --part=6L          30 updates of a 6L-6L model, 65,536 tokens each; also 100L and 500L
    python -m benchmarks.gpu --part=6L --toy    the same code at a size for a CPU; its results are meaningless

For each depth it reports whether the loss falls, the seconds per update, the MFU (operations of the model without
recomputation, divided by the device's specification), and the peak memory with the plan's prediction. It uses bfloat16
products, float32 Adam, a float16 stream and 32,000 words. --plain measures without remat and with whole logits, if they
fit. --in-backward updates layer by layer (`train.update_in_backward`), for which 500L needs no groups. Each part is one
process, so that it starts with an empty device. There are no measurements yet.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import save
from branchnorm_jax.analysis import devices, estimate, plan
from branchnorm_jax.model.norms import apply_norm, declare_norm
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DataConfig, ModelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import local_mesh
from branchnorm_jax.tokens import UNK
from branchnorm_jax.training.logs import peak_memory_bytes
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, first_state

LENGTH, UPDATES = 32, 30


def timed(function: Callable[..., Any], *arguments: Any, repetitions: int = 20) -> float:
    """Returns the seconds per call, the mean of consecutive calls."""
    run = jax.jit(function)
    jax.block_until_ready(run(*arguments))
    begin = time.perf_counter()
    for _ in range(repetitions):
        result = run(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / repetitions


def shapes(toy: bool) -> dict[str, Any]:
    """Measures TFLOP/s of matrix products and attention and GB/s of a norm, for several numbers of tokens."""
    results: dict[str, Any] = {}
    for tokens in (256,) if toy else (4096, 16_384, 65_536):
        for k, n in ((512, 512), (512, 1536), (512, 2048), (2048, 512), (512, 32_000)):
            x, w = jnp.ones((tokens, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)
            results[f"matrix {tokens}x{k}x{n}, TFLOP/s"] = 2e-12 * tokens * k * n / timed(jnp.matmul, x, w)
        x = jnp.ones((tokens, 512), jnp.float16)
        norm = nn.meta.unbox(declare_norm("layer_norm", 512))
        seconds = timed(lambda x, norm=norm: apply_norm("layer_norm", norm, x), x)
        results[f"layer norm {tokens}x512, GB/s"] = 1e-9 * 2 * x.nbytes / seconds
        for length in (32, 128):
            q = jnp.ones((tokens // length, length, 8, 64), jnp.bfloat16)
            seconds = timed(lambda q: jax.nn.dot_product_attention(q, q, q), q)
            results[f"attention {tokens} tokens of sentences of {length}, TFLOP/s"] = 4e-12 * q.size * length / seconds
    return results


def base(layers: int, toy: bool, **changes: Any) -> Config:
    """Returns a config with the width of the papers, or with a small one for a test."""
    size = dict(width=32, ffn_width=64, heads=2) if toy else dict(width=512, ffn_width=2048, heads=8)
    deep = dict(method="branchnorm", encoder_layers=layers, decoder_layers=layers, alpha_steps=4000, remat="auto")
    model: dict[str, Any] = dict(dtype="bfloat16", carry_dtype="float16", dropout=0.1) | size | deep | changes
    return Config(
        model=ModelConfig(**model),
        data=DataConfig(vocab_size=300 if toy else 32_000, max_length=LENGTH, power_of_two_rows=True),
        train=TrainConfig(batch_tokens=256 if toy else 65_536, warmup_steps=20, learning_rate=1e-3, adam_b2=0.98),
    )


def train(config: Config) -> dict[str, Any]:
    """Measures `UPDATES` updates on random words with a power-law distribution."""
    config = plan.resolve_remat(config, devices.memory())
    rows, vocabulary = estimate.rows_of(config, LENGTH, 1), config.data.vocab_size
    step, _, _ = estimate.update(config, rows, LENGTH)
    model, optimizer = Transformer(config.model, vocabulary, vocabulary), make_optimizer(config.train, config.model)
    state = jax.jit(lambda: first_state(model.init(jax.random.key(0)), optimizer))()
    run, rng = jax.jit(step, donate_argnums=0), np.random.default_rng(0)
    weights = 1 / np.arange(1, vocabulary - UNK)
    losses, times = [], []
    # The program chooses its kernels by the mesh, as in training.
    with jax.set_mesh(local_mesh()):
        for _ in range(UPDATES):
            words = rng.choice(np.arange(UNK + 1, vocabulary), (2, rows, LENGTH), p=weights / weights.sum())
            batch = Batch(*jnp.asarray(words, jnp.int32))
            begin = time.perf_counter()
            state, metrics = run(state, batch)
            losses.append(float(metrics.nll))
            times.append(time.perf_counter() - begin)
    seconds = float(np.median(times[3:]))
    flops = 3 * sum(estimate.forward_flops(config, LENGTH, LENGTH, vocabulary).values())
    return {
        "remat": config.model.remat,
        "losses": losses,
        "seconds_per_update": seconds,
        "target_tokens_per_second": rows * LENGTH / seconds,
        "mfu": flops * rows * LENGTH / seconds / devices.find("").matrix,
        "peak_bytes": peak_memory_bytes(),
        "planned_bytes": estimate.update_costs(config, rows, LENGTH).peak,
    }


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("shapes", "6L", "100L", "500L"), required=True)
    parser.add_argument("--plain", action="store_true", help="without remat, whole logits")
    parser.add_argument("--in-backward", action="store_true", help="update layers in the backward pass")
    parser.add_argument("--toy", action="store_true", help="small, to try the code")
    arguments = parser.parse_args()
    name = f"gpu_{arguments.part}" + "".join(
        f"_{flag}" for flag in ("plain", "in_backward", "toy") if getattr(arguments, flag)
    )
    if arguments.part == "shapes":
        save(name, shapes(arguments.toy))
        return
    config = base(2 if arguments.toy else int(arguments.part[:-1]), arguments.toy)
    if arguments.plain:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="none", logits_mb=10**6))
    train_config = dataclasses.replace(config.train, update_in_backward=arguments.in_backward)
    save(name, train(dataclasses.replace(config, train=train_config)))


if __name__ == "__main__":
    main()

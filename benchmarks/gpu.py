"""Measures one GPU: the kernels, training of deep models of width 512, the beam search, and PyTorch beside it.

    bash benchmarks/gpu.sh [FOLDER]             all parts, one after the other; the logs go to FOLDER
    python -m benchmarks.gpu --part=kernels     our Pallas kernels: errors and times, beside plain JAX
    python -m benchmarks.gpu --part=shapes      matrix products, norm and attention, in bfloat16
    python -m benchmarks.gpu --part=6L          updates of a 6L-6L model, 65,536 tokens each; also 100L and 500L
    python -m benchmarks.gpu --part=beam        beam search, 6L-6L and 100L-100L, 512 sentences at once
    python -m benchmarks.gpu --part=pytorch     the 6L-6L model from PyTorch's own layers (--compile: torch.compile)
    python -m benchmarks.gpu --part=6L --toy    the same code at a size for a CPU; its results are meaningless

For each depth it reports whether the loss falls, the seconds per update, the MFU (operations of the model without
recomputation, divided by the device's specification), and the peak memory with the plan's prediction. It uses bfloat16
products, float32 Adam, a float16 stream and 32,000 words. --kernels=plain measures without the Pallas kernels, --plain
without remat and with whole logits, if they fit. --in-backward updates layer by layer (`train.update_in_backward`), for
which 500L needs no groups. PyTorch computes the same model with autocast to bfloat16 and fused AdamW. Each part is one
process, so that it starts with an empty device.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import save, seconds, write
from branchnorm_jax.analysis import devices, estimate, plan
from branchnorm_jax.decoding.engine import Engine, Query
from branchnorm_jax.model.attention import attend
from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.fused_attention import fused_attend
from branchnorm_jax.model.fused_residual import Weights, fused_residual
from branchnorm_jax.model.norms import apply_norm, declare_norm, layer_norm
from branchnorm_jax.model.segments import causal_mask
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig
from branchnorm_jax.parallel.mesh import local_mesh
from branchnorm_jax.tokens import EOS, UNK
from branchnorm_jax.training.logs import peak_memory_bytes
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import Batch, first_state

LENGTH, UPDATES, RATE, HEADS, COPIES, SENTENCES = 32, 30, 0.1, 8, 8, 512

PROFILED = 3
"""Updates of a profile."""

Measured = Iterator[tuple[str, Any]]
"""Names and values, as they become known."""


def timed(run: Callable[..., Any], *arguments: Any, repetitions: int = 20) -> float:
    """Returns the seconds per call of a program (`jax.jit`), the mean of consecutive calls."""
    jax.block_until_ready(run(*arguments))
    begin = time.perf_counter()
    for _ in range(repetitions):
        result = run(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / repetitions


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns standard normal numbers: products of constants draw less power, and a GPU computes them faster."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def shapes(toy: bool) -> Measured:
    """Measures TFLOP/s of matrix products and attention and GB/s of a norm."""
    tokens = 256 if toy else 65_536
    products = jax.jit(lambda x, matrices: [x @ w for w in matrices])
    for k, n in ((512, 512), (512, 1536), (512, 2048), (2048, 512), (512, 32_000)):
        # Several products a call, so that a call takes longer than its start.
        copies = COPIES if n <= 2048 else 1
        x, matrices = normal(0, (tokens, k), jnp.bfloat16), list(normal(1, (copies, k, n), jnp.bfloat16))
        duration = timed(products, x, matrices) / copies
        yield f"matrix {tokens}x{k}x{n}, TFLOP/s", 2e-12 * tokens * k * n / duration
    x = normal(0, (tokens, 512), jnp.float16)
    norm = nn.meta.unbox(declare_norm("layer_norm", 512))
    normalise = jax.jit(lambda x: apply_norm("layer_norm", norm, x))
    yield f"layer norm {tokens}x512, GB/s", 2e-9 * x.nbytes / timed(normalise, x)
    copied = normal(0, (1024 if toy else 2**30,), jnp.bfloat16)
    yield "copy of 2 GB, GB/s", 2e-9 * copied.nbytes / timed(jax.jit(jnp.negative), copied)
    for length in (32, 128):
        q = normal(0, (tokens // length, length, HEADS, 64), jnp.bfloat16)
        duration = timed(jax.jit(lambda q: jax.nn.dot_product_attention(q, q, q)), q)
        yield f"attention {tokens} tokens of sentences of {length}, TFLOP/s", 4e-12 * q.size * length / duration


def difference(results: Any, exact: Any) -> float:
    """Returns the largest relative error of the arrays, |a - b| / |b| in the Euclidean norm."""

    def error(a: jax.Array, b: jax.Array) -> float:
        # Norms of float16 arrays overflow in their own type.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))

    return max(jax.tree.leaves(jax.tree.map(error, results, exact)))


def compare(kernel: Callable[..., Any], twin: Callable[..., Any], inputs: Any, dy: jax.Array) -> dict[str, Any]:
    """Compares a kernel with its twin in plain JAX: times, and errors against the twin in float32.

    Both map `inputs` to one array; `dy` is its gradient.
    """

    def both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(inputs: Any, dy: jax.Array) -> Any:
            y, backward = jax.vjp(lambda inputs: function(*inputs), inputs)
            return y, backward(dy.astype(y.dtype))

        return run

    wide = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(both_ways(twin))(wide, dy.astype(jnp.float32))
    found: dict[str, Any] = {}
    for name, function in (("kernel", kernel), ("plain", twin)):
        run = jax.jit(both_ways(function))
        found[f"{name}_error"] = difference(run(inputs, dy), exact)
        found[f"{name}_both_ms"] = 1e3 * timed(run, inputs, dy)
        found[f"{name}_forward_ms"] = 1e3 * timed(jax.jit(function), *inputs)
    return found


def kernels(toy: bool) -> Measured:
    """Compares the attention and the residual kernel with plain JAX, with dropout, at 65,536 tokens."""
    tokens, key, interpret = (512 if toy else 65_536), jax.random.key(7), jax.default_backend() == "cpu"
    for length in (32, 128, 256):
        rows = tokens // length
        q_k_v, dy = (normal(seed, (rows, length, *n, HEADS, 64), jnp.bfloat16) for seed, n in ((0, (3,)), (1, ())))
        mask = causal_mask(length)
        yield (
            f"attention, rows of {length}",
            compare(
                lambda x, mask=mask: fused_attend((x,), mask, RATE, key, interpret),
                lambda x, mask=mask: attend(x[:, :, 0], x[:, :, 1], x[:, :, 2], mask, RATE, key),
                (q_k_v,),
                dy,
            ),
        )

    def plain(x: jax.Array, h: jax.Array, weights: Weights) -> jax.Array:
        s = weights.skip * x.astype(jnp.float32) + weights.branch * dropout(h.astype(jnp.float32), RATE, key)
        return layer_norm(s, weights.scale, weights.bias).astype(x.dtype)

    shape = tokens // LENGTH, LENGTH, 512
    x, h, dy = (normal(seed, shape, dtype) for seed, dtype in enumerate((jnp.float16, jnp.bfloat16, jnp.float16)))
    scale, bias = normal(3, (512,), jnp.float32), normal(4, (512,), jnp.float32)
    weights = Weights(jnp.float32(0.7), jnp.float32(1.3), scale, bias)
    kernel = functools.partial(fused_residual, jax.default_backend(), rate=RATE, key=key)
    yield "residual addition", compare(kernel, plain, (x, h, weights), dy)


def base(layers: int, toy: bool, **changes: Any) -> Config:
    """Returns a config with the width of the papers, or with a small one for a test."""
    size = dict(width=32, ffn_width=64, heads=2) if toy else dict(width=512, ffn_width=2048, heads=HEADS)
    deep = dict(method="branchnorm", encoder_layers=layers, decoder_layers=layers, alpha_steps=4000, remat="auto")
    model: dict[str, Any] = dict(dtype="bfloat16", carry_dtype="float16", dropout=RATE) | size | deep | changes
    return Config(
        model=ModelConfig(**model),
        data=DataConfig(vocab_size=300 if toy else 32_000, max_length=LENGTH, power_of_two_rows=True),
        train=TrainConfig(batch_tokens=256 if toy else 65_536, warmup_steps=20, learning_rate=1e-3, adam_b2=0.98),
    )


def random_words(vocabulary: int, rows: int) -> Callable[[], np.ndarray]:
    """Returns a function that draws words [2, rows, LENGTH] with a power-law distribution."""
    rng, weights = np.random.default_rng(0), 1 / np.arange(1, vocabulary - UNK)
    words = np.arange(UNK + 1, vocabulary)
    return lambda: rng.choice(words, (2, rows, LENGTH), p=weights / weights.sum()).astype(np.int32)


def speed(config: Config, times: list[float]) -> dict[str, Any]:
    """Returns the speed of updates that took these times; the first ones, which compile, do not count."""
    taken, tokens = statistics.median(times[min(3, len(times) // 2) :]), config.train.batch_tokens
    flops = 3 * sum(estimate.forward_flops(config, LENGTH, LENGTH, config.data.vocab_size).values())
    return {
        "seconds": times,
        "seconds_per_update": taken,
        "target_tokens_per_second": tokens / taken,
        "mfu": flops * tokens / taken / devices.find("").matrix,
    }


def train(config: Config, updates: int, trace: str = "") -> dict[str, Any]:
    """Measures updates on random words. With `trace`, `PROFILED` more are profiled into this folder."""
    config = plan.resolve_remat(config, devices.memory())
    rows, vocabulary = estimate.rows_of(config, LENGTH, 1), config.data.vocab_size
    model, optimizer = Transformer(config.model, vocabulary, vocabulary), make_optimizer(config.train, config.model)
    draw, losses, times = random_words(vocabulary, rows), [], []
    # The program chooses its kernels by the mesh, as in training.
    with jax.set_mesh(local_mesh()):
        state = jax.jit(lambda: first_state(model.init(jax.random.key(0)), optimizer))()
        step, _, _ = estimate.update(config, rows, LENGTH)
        run = jax.jit(step, donate_argnums=0)
        for _ in range(updates):
            batch = Batch(*jnp.asarray(draw()))
            begin = time.perf_counter()
            state, metrics = run(state, batch)
            losses.append(float(metrics.nll))
            times.append(time.perf_counter() - begin)
        with jax.profiler.trace(trace) if trace else contextlib.nullcontext():
            for _ in range(PROFILED if trace else 0):
                state, metrics = run(state, Batch(*jnp.asarray(draw())))
            jax.block_until_ready(state)
    return {
        "remat": {name: getattr(config.model, name) for name in ("remat", "group", "unroll")},
        "kernels": config.model.kernels,
        "losses": losses,
        **speed(config, times),
        "peak_bytes": peak_memory_bytes(),
        "planned_bytes": estimate.update_costs(config, rows, LENGTH).peak,
    }


def train_in_pytorch(config: Config, updates: int, compiled: bool) -> dict[str, Any]:
    """Measures updates of the same model from PyTorch's own layers, with autocast to bfloat16 and fused AdamW."""
    import torch

    from benchmarks.torch_model import Network

    device = "cuda" if torch.cuda.is_available() else "cpu"
    c, rows = config.train, config.train.batch_tokens // LENGTH
    network = Network(config.model, config.data.vocab_size).to(device).train()
    adam = torch.optim.AdamW(network.parameters(), c.learning_rate, (c.adam_b1, c.adam_b2), c.adam_eps, fused=True)
    loss_of = torch.compile(network.loss) if compiled else network.loss
    draw, losses, times = random_words(config.data.vocab_size, rows), [], []
    for _ in range(updates):
        source, target = torch.from_numpy(draw()).long().to(device)
        begin = time.perf_counter()
        adam.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(source, target, c.label_smoothing, padded=False)
        loss.backward()
        adam.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    return {
        "torch": torch.__version__,
        "compiled": compiled,
        "losses": losses,
        **speed(config, times),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }


def beam(toy: bool) -> Measured:
    """Measures target tokens per second of a beam of 4, on untrained models whose translations have 30 tokens."""
    vocabulary, sentences, length = (300, 4, 30) if toy else (32_000, SENTENCES, 30)
    rng = np.random.default_rng(0)
    queries = [Query([*rng.integers(UNK + 1, vocabulary, length - 1).tolist(), EOS], n) for n in range(sentences)]
    decode = DecodeConfig(
        beam_size=4, max_length_a=0.0, max_length_b=length, min_length=length, batch_tokens=sentences * 4 * 32
    )
    for layers in (2,) if toy else (6, 100):
        model = Transformer(base(layers, toy, dropout=0.0, shared_embeddings="none").model, vocabulary, vocabulary)
        weights = ((jax.jit(model.init)(jax.random.key(0)), jnp.float32(1)),)
        search = functools.partial(Engine((model,), decode).search, weights, queries)
        times = [seconds(lambda: list(search())) for _ in range(4)]  # noqa: B023 (called at once)
        taken = statistics.median(times[1:])
        speed = {"seconds": times, "tokens_per_second": sentences * (length + 1) / taken}
        yield f"{layers}L-{layers}L", speed | {"peak_bytes": peak_memory_bytes()}


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("kernels", "shapes", "6L", "100L", "500L", "beam", "pytorch")
    parser.add_argument("--part", choices=parts, required=True)
    parser.add_argument("--updates", type=int, default=UPDATES, help="of a depth or PyTorch")
    parser.add_argument("--kernels", choices=("auto", "plain"), default="auto", help="model.kernels")
    parser.add_argument("--plain", action="store_true", help="without remat, whole logits")
    parser.add_argument("--in-backward", action="store_true", help="update layers in the backward pass")
    parser.add_argument("--compile", action="store_true", help="PyTorch: with torch.compile")
    parser.add_argument("--trace", default="", metavar="FOLDER", help="of a depth: profile three more updates")
    parser.add_argument("--toy", action="store_true", help="small, to try the code")
    arguments = parser.parse_args()
    flags = [flag for flag in ("plain", "in_backward", "compile", "toy") if getattr(arguments, flag)]
    if arguments.kernels == "plain":
        flags.insert(0, "plain_kernels")
    name = "_".join((f"gpu_{arguments.part}", *flags))
    whole = {"kernels": kernels, "shapes": shapes, "beam": beam}
    if arguments.part in whole:
        results: dict[str, Any] = {}
        for key, value in whole[arguments.part](arguments.toy):
            results[key] = value
            print(f"{key}: {value}", flush=True)
            # Each is saved at once, because the time on a GPU may be limited.
            write(name, results)
        return
    if arguments.part == "pytorch":
        config = base(2 if arguments.toy else 6, arguments.toy)
        save(name, train_in_pytorch(config, arguments.updates, arguments.compile))
        return
    config = base(2 if arguments.toy else int(arguments.part[:-1]), arguments.toy, kernels=arguments.kernels)
    if arguments.plain:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, remat="none", logits_mb=10**6))
    train_config = dataclasses.replace(config.train, update_in_backward=arguments.in_backward)
    save(name, train(dataclasses.replace(config, train=train_config), arguments.updates, arguments.trace))


if __name__ == "__main__":
    main()

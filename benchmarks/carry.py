"""Measures rounding errors over depth for each data type of products and stream.

    python -m benchmarks.carry [workdir ...]

Compares each `model.dtype` and `model.carry_dtype` with float64 at the same weights. Untrained models of 10 to 500
layers per stack read random words. The checkpoint of a workdir reads validation sentences. There is no dropout, and
padding does not count. Values that are not finite are null.

The results contain:

- all models: |y - y64| / |y64| of the encoder's output, and of the decoder's output in `dtype`, which the output layer
  reads,
- checkpoints: mean and root mean square of the difference between the nll and the nll in float64, in nats per token,
- checkpoints and models of 500 layers: relative error of the gradient with respect to the parameters of a stack's
  layers, from 8 sentences.

By default the gradient has the scale of one token's loss, as in an update (see `step.loss_scale`). With `--tokens=n` it
is the gradient of a loss that is divided by n and not scaled.
"""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import save
from branchnorm_jax import config as configs
from branchnorm_jax.data.corpus import read_pairs
from branchnorm_jax.decoding.translate import pad
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.recipe import STACKS
from branchnorm_jax.model.segments import decoder_inputs
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.modes.common import load
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.tokens import PAD
from branchnorm_jax.training.state import Batch
from branchnorm_jax.training.step import loss_sums
from branchnorm_jax.workdir import Workdir

Types = tuple[str, str]
"""dtype, carry_dtype."""

EXACT: Types = ("float64", "float64")
TYPES: list[Types] = list(itertools.product(("float32", "bfloat16"), ("float32", "float16", "bfloat16")))
STRENGTHS = {"branchnorm": (0.1, 1.0), "deepnorm": (1.0,), "post_ln": (1.0,), "pre_ln": (1.0,), "rezero": (0.0, 0.02)}
"""Branch strengths of the untrained models: alpha for BranchNorm, the learned weights for ReZero, which start at 0."""

DEPTHS, VOCABULARY, SENTENCES = (10, 50, 100, 250, 500), 800, 8


@functools.lru_cache(maxsize=16)
def programs(model: Transformer, types: Types) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns two jitted functions: outputs by stack and nll by token, and gradients by stack."""
    config = dataclasses.replace(model.config, dtype=types[0], carry_dtype=types[1], dropout=0.0, remat="full")
    model = dataclasses.replace(model, config=config)

    def outputs(params: Params, alpha: Any, batch: Batch) -> Any:
        memory = model.encode(params, batch.source, alpha)
        inputs = decoder_inputs(batch.target)
        x = model.decode(params, memory, batch.source, inputs, alpha).astype(config.dtype)
        return (memory, x), model.output(params).nll(model.logits(params, x), batch.target)[0]

    def loss(layers: Params, params: Params, alpha: Any, batch: Batch, tokens: jax.Array) -> jax.Array:
        return loss_sums(model, params | layers, batch, alpha, 0.1)[0].loss / tokens

    return jax.jit(outputs), jax.jit(jax.grad(loss))


def measure(
    model: Transformer, params: Params, alpha: Any, batch: Batch, tokens: int, types: Types
) -> dict[str, np.ndarray]:
    """Returns the values to compare, by name, as float64 NumPy arrays, without gradients if `tokens` is 0."""
    with jax.enable_x64(types == EXACT):
        alpha = jax.tree.map(jnp.float32, alpha)
        outputs, gradient = programs(model, types)
        params = jax.tree.map(lambda leaf: np.asarray(leaf, "float64" if types == EXACT else "float32"), params)
        by_stack, nll = jax.device_get(outputs(params, alpha, batch))
        reals = [np.asarray(side) != PAD for side in batch]
        values = {stack: y[real] for stack, y, real in zip(STACKS, by_stack, reals, strict=True)}
        values["nll"] = nll[reals[1]]
        if tokens:
            layers, few = {stack: params[stack] for stack in STACKS}, Batch(*(side[:SENTENCES] for side in batch))
            grads = jax.device_get(gradient(layers, params, alpha, few, jnp.float32(tokens)))
            for stack in STACKS:
                values[f"{stack}_gradient"] = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads[stack])])
    return {name: np.asarray(value, np.float64) for name, value in values.items()}


def errors(name: dict[str, Any], found_by: Callable[[Types], dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Returns one row for each pair of types. `found_by` calls `measure` for one case."""
    exact, rows = found_by(EXACT), []
    for types in TYPES:
        rounded = found_by(types)
        error = {key: rounded[key] - exact[key] for key in exact}
        row = {key: np.linalg.norm(error[key]) / np.linalg.norm(exact[key]) for key in exact if exact[key].any()}
        del row["nll"]
        if "step" in name:
            row |= {"nll_more": error["nll"].mean(), "nll_rms": np.sqrt(np.square(error["nll"]).mean())}
        figures = {key: float(f"{value:.3g}") if np.isfinite(value) else None for key, value in row.items()}
        rows.append({**name, "dtype": types[0], "carry_dtype": types[1], **figures})
        print(rows[-1], flush=True)
    return rows


def untrained(method: str, layers: int, tokens: int) -> list[dict[str, Any]]:
    """Measures untrained models of width 64 on sentences of 16 random words on each side."""
    config = ModelConfig(method=method, encoder_layers=layers, decoder_layers=layers, width=64, ffn_width=128, heads=2)
    model = Transformer(config, VOCABULARY, VOCABULARY)
    params, rows = jax.device_get(jax.jit(model.init)(jax.random.key(0))), []
    batch = Batch(*jax.random.randint(jax.random.key(1), (2, SENTENCES, 16), 3, VOCABULARY))
    for strength in STRENGTHS[method]:
        for stack in STACKS if method == "rezero" else ():
            params[stack]["branch"] = np.full_like(params[stack]["branch"], strength)
        name = {"method": method, "strength": strength, "layers": layers}
        case = model, params, strength, batch, tokens if layers == max(DEPTHS) else 0
        rows += errors(name, functools.partial(measure, *case))
    jax.clear_caches()
    return rows


def trained(folder: Path, tokens: int) -> list[dict[str, Any]]:
    """Measures the best checkpoint of a run on its first 64 validation sentences."""
    workdir = Workdir(folder)
    config = configs.load(workdir / "config.json")
    translator, params, alpha, step = load(config, workdir)
    sources, targets = zip(*itertools.islice(read_pairs(config.data, "valid"), 64), strict=True)
    ids = translator.tokenizer.encode_source(list(sources)), translator.tokenizer.encode_target(list(targets))
    batch = Batch(*(jnp.asarray(pad(side, len(side), max(map(len, side)))) for side in ids))
    m, strength = config.model, jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), alpha)
    name = {"run": folder.name, "step": step, "method": m.method, "strength": strength, "layers": m.encoder_layers}
    case = translator.model, jax.device_get(params), alpha, batch, tokens
    rows = errors(name, functools.partial(measure, *case))
    jax.clear_caches()
    return rows


def main() -> None:
    """Measures all untrained models and the given runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdirs", nargs="*", type=Path, help="runs that have a checkpoint")
    parser.add_argument("--tokens", type=int, default=1, help="target tokens that share an unscaled loss")
    arguments = parser.parse_args()
    fresh = [row for case in itertools.product(STRENGTHS, DEPTHS) for row in untrained(*case, arguments.tokens)]
    runs = [row for folder in arguments.workdirs for row in trained(folder, arguments.tokens)]
    save(
        "carry" if arguments.tokens == 1 else "carry_unscaled",
        {"tokens": arguments.tokens, "untrained": fresh, "trained": runs},
    )


if __name__ == "__main__":
    main()

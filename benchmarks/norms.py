"""Measures the update of a Pre-LN Transformer with RMSNorm and ScaleNorm, relative to LayerNorm.

    taskset -c 0 python -m benchmarks.norms
    taskset -c 0 python -m benchmarks.norms --width 64 --rounds 3

"Transformers without Tears" reports that training with ScaleNorm is around 5 % faster on its GPU. The default is the
paper's base model with a small batch; it takes about ten minutes on one core. The machine must be idle: a ratio of a
few percent is smaller than the noise of a shared core. For GPUs and TPUs that are absent, the compiled instrument
compares kernels and traffic:

    python -m benchmarks.compiled h200:1 6L-6L:none --state=norms --config.model.method=pre_ln \
        --config.model.kernels=plain --config.model.norm=scale_norm
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.depth import VOCABULARY, update
from benchmarks.measure import in_turn, save
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.training.state import Batch

NORMS = ("layer_norm", "rms_norm", "scale_norm", "scale_norm_fixed", "none")
LAYERS, ROWS, LENGTH = 6, 16, 32


def one_update(norm: str, width: int, batch: Batch) -> Callable[[], Any]:
    """Returns a function that runs a compiled update, always from the same state."""
    shape: dict[str, Any] = dict(encoder_layers=LAYERS, decoder_layers=LAYERS, width=width, ffn_width=4 * width)
    config = ModelConfig(method="pre_ln", norm=norm, heads=max(2, width // 64), remat="none", **shape)
    step, state = update(Transformer(config, VOCABULARY, VOCABULARY), batch, watch_every=0)
    program = step.lower(state, batch).compile()
    return lambda: program(state, batch)


def main() -> None:
    """Measures the seconds per update; ratios are medians over rounds in which the norms alternate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    words = np.random.default_rng(0).integers(3, VOCABULARY, (2, ROWS, LENGTH))
    batch = Batch(*jnp.asarray(words, jnp.int32))
    first, *others = in_turn([one_update(norm, arguments.width, batch) for norm in NORMS], arguments.rounds)
    results: dict[str, Any] = {
        norm: {
            "ratio": statistics.median(a / b for a, b in zip(times, first, strict=True)),
            "quartiles": statistics.quantiles((a / b for a, b in zip(times, first, strict=True)), n=4)[::2],
        }
        for norm, times in zip(NORMS[1:], others, strict=True)
    }
    shape = {"layers": f"{LAYERS}L-{LAYERS}L", "width": arguments.width, "tokens": ROWS * LENGTH}
    save(f"norms_{arguments.width}", {**shape, "rounds": arguments.rounds, "layer_norm_seconds": first, **results})


if __name__ == "__main__":
    main()

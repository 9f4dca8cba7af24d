"""The type of the matrices while a text is translated.

bfloat16 has half the bytes of float32, and 8 significant bits instead of 24. Products of bfloat16 matrices have float32
results here, and everything else stays in the model's types.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from branchnorm_jax.model.parameters import Params
from branchnorm_jax.options import DecodeConfig, ModelConfig

SMALLEST_WIDTH, SMALLEST_BATCH = 128, 64
"""Narrower models, and steps of fewer hypotheses, are not faster with bfloat16."""


def narrows(decode: DecodeConfig, model: ModelConfig, hypotheses: int) -> bool:
    """Returns whether a search multiplies bfloat16 matrices, see `decode.dtype`.

    `hypotheses` is the number of hypotheses that a step computes at once.
    """
    if decode.dtype != "auto":
        return decode.dtype == "bfloat16"
    if decode.temperature:
        return False  # A sample must not depend on how many others are drawn at once.
    large = model.width >= SMALLEST_WIDTH and hypotheses >= SMALLEST_BATCH
    return large and jax.default_backend() == "cpu" and native_bfloat16()


@functools.cache
def native_bfloat16() -> bool:
    """Returns whether this CPU has instructions for products of bfloat16 matrices.

    Returns False if there is no /proc/cpuinfo.
    """
    path = Path("/proc/cpuinfo")
    flags = path.read_text(encoding="utf-8").split() if path.exists() else []
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


@jax.jit
def narrowed(params: Params) -> Params:
    """Returns parameters whose matrices are bfloat16. Embeddings, biases and norms stay as they are."""

    def narrow(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.bfloat16) if path[-1].key == "kernel" else leaf

    return jax.tree_util.tree_map_with_path(narrow, params)

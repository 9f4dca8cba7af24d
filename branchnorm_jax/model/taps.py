"""Taps: what a forward pass injects into its layers and records of them, beside its output."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from branchnorm_jax.model.stack import LayerUpdate


class Taps(NamedTuple):
    """All off by default. Mappings are by stack; a stack that is not in one has none."""

    probes: Mapping[str, jax.Array] = {}
    """Added to the layers' inputs, [L, B, T, D]: with zeros, the gradient by them is that by the residual stream."""
    record: str = ""
    """What the layers return: "watch", see `blocks.watched`; "profile", the spread before each sub-layer, see
    `admin.py`."""
    updates: Mapping[str, LayerUpdate] = {}
    """Updates of the layers' parameters in the backward pass: see `stack.run_and_update`."""
    attention: jax.Array | None = None
    """Weights of the decoder's layers, [M]: it returns `Transformer.attention` instead."""

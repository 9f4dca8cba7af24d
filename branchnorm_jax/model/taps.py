"""Taps: values that a forward pass adds to its layers or records from them."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from branchnorm_jax.model.stack import LayerUpdate


class Taps(NamedTuple):
    """All taps are off by default. Mappings are by stack, and may leave a stack out."""

    probes: Mapping[str, jax.Array] = {}
    """Added to the layers' inputs, [L, B, T, D]. The gradient by zeros is that by the residual stream."""
    record: str = ""
    """What the layers return: "watch", the statistics of `blocks.watched`, or "profile", the spread before each
    sub-layer (see `admin.py`)."""
    updates: Mapping[str, LayerUpdate] = {}
    """Updates the layers' parameters in the backward pass, see `stack.run_and_update`."""
    attention: jax.Array | None = None
    """Weights of the decoder's layers, [M]. The decoder then returns their attention, see `Transformer.attention`."""

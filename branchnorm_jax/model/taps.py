"""Taps: values that a forward pass adds to its layers or records from them."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from branchnorm_jax.axes import row_shards
from branchnorm_jax.model.stack import LayerUpdate


class Taps(NamedTuple):
    """The taps of a forward pass; all are off by default. Mappings are by stack and may omit a stack."""

    probes: Mapping[str, jax.Array] = {}
    """Values added to the layers' inputs, [L, B, T, D].

    The gradient with respect to zero probes is the gradient with respect to the residual stream.
    """
    inputs: Mapping[str, jax.Array] = {}
    """Values added to the embeddings, [B, T, D]. Unlike a probe of the first layer, they reach all layers that read the
    embeddings."""
    record: str = ""
    """What the layers return: "" the blocks' outputs, "watch" the statistics of `blocks.watched`, "profile" r before
    each sub-layer (see `admin.py`), "cache" the keys and values of self-attention."""
    updates: Mapping[str, LayerUpdate] = {}
    """Updates the layers' parameters in the backward pass, see `stack.run_and_update`."""
    attention: jax.Array | None = None
    """Weights of the decoder's layers, [M]. If set, the decoder also returns the weighted sum of their attention
    weights, see `Transformer.attention`."""


WATCHED_ROWS = 64
"""Number of rows of a batch from which the statistics of layers are computed. With all rows, they would take 8 % of the
time of an update at 6L-6L, by the roofline of an H200."""


def watched_rows(x: jax.Array) -> jax.Array:
    """Returns the first rows of [B, ...] on each device; all rows if there are at most `WATCHED_ROWS`.

    They are `WATCHED_ROWS` in all, or in each replica if the devices have replicas of the parameters (`parallel.data`).
    """
    shards = row_shards()
    each = max(1, WATCHED_ROWS // shards)
    if len(x) <= each * shards:
        return x
    return x.reshape(shards, -1, *x.shape[1:])[:, :each].reshape(-1, *x.shape[1:])

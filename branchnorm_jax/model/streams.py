"""Residual streams: what a layer passes to the next one, and how a sub-layer reads and writes it.

A sub-layer reads a skip input x and a branch input u from the stream, and `blocks.py` computes x' = P(a x + b h) with
h = Dropout(G(F(c Q(u)))). Most methods have one stream: x = u, and x' is all that the next sub-layer gets. The other
kinds are the classes below `Single`; `Recipe.stream` selects one by its key in `KINDS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from branchnorm_jax.options import ModelConfig


class Stream(NamedTuple):
    """The carry of the stack: what a layer passes to the next one."""

    x: jax.Array
    """The residual stream, [B, T, D]."""
    more: jax.Array | None = None
    """What a kind of stream has besides x, see its class; None if it has nothing else."""
    spread: jax.Array | None = None
    """r_k of Admin's profiling pass (see `admin.py`), float32 []; None otherwise."""
    attention: jax.Array | None = None
    """Weighted sum of the cross-attention weights of the layers so far, float32 [B, T, S]; None if not recorded."""


def exact(x: jax.Array) -> jax.Array:
    """Returns x in float32; float64 stays float64."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Single(nn.Module):
    """One residual stream. A module of this class connects one sub-layer with the streams."""

    config: ModelConfig

    @staticmethod
    def start(x: jax.Array, layers: int) -> Stream:
        """Returns the input of the first of `layers` layers, for embeddings x [B, T, D]."""
        return Stream(x)

    def read(self, stream: Stream) -> tuple[Stream, jax.Array]:
        """Returns the stream with the skip input as its x, and the branch input u."""
        return stream, stream.x

    def write(self, stream: Stream, h: jax.Array) -> Stream:
        """Returns the stream after a branch h, without x'."""
        return stream

    @staticmethod
    def declare_end(config: ModelConfig) -> dict[str, Any]:
        """Declares the parameters of `end`."""
        return {}

    @staticmethod
    def end(
        config: ModelConfig, params: dict[str, Any], stream: Stream, final: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Returns the output of a stack. `final` is what the recipe has after the last layer, such as a norm."""
        return final(stream.x)


class Dual(Single):
    """ResiDual: `more` is the sum of the embedding and of all branches, in float32. The output is x + LN(sum)."""

    @staticmethod
    def start(x: jax.Array, layers: int) -> Stream:
        """See `Single`."""
        return Stream(x, exact(x))

    def write(self, stream: Stream, h: jax.Array) -> Stream:
        """See `Single`."""
        assert stream.more is not None
        return stream._replace(more=stream.more + h)

    @staticmethod
    def end(
        config: ModelConfig, params: dict[str, Any], stream: Stream, final: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """See `Single`."""
        assert stream.more is not None
        return stream.x + final(stream.more)


KINDS: dict[str, type[Single]] = {
    **dict.fromkeys(("plain", "bottom_to_top", "combination", "combination_post"), Single),
    "dual": Dual,
}
"""`Recipe.stream` -> its class. `combination.py` wraps the layers of a single stream."""

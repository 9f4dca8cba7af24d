"""Residual streams: what a layer passes to the next one, and how a sub-layer reads and writes it.

A sub-layer reads a skip input x and a branch input u from the stream, and `blocks.py` computes x' = P(a x + b E(h))
with h = Dropout(G(F(c Q(u)))). Most methods have one stream: x = u, E is the identity, and x' is all that the next
sub-layer gets. The other kinds are the classes below `Single`; `Recipe.stream` selects one by its key in `KINDS`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.model.declared import Declared, declared
from branchnorm_jax.model.linear import product
from branchnorm_jax.model.norms import Norm, apply_norm, declare_norm, exact, rms_norm
from branchnorm_jax.model.segments import MASKED
from branchnorm_jax.model.stack import recomputes
from branchnorm_jax.options import ModelConfig


class Stream(NamedTuple):
    """The carry of the stack: what a layer passes to the next one."""

    x: jax.Array
    """The residual stream, [B, T, D]; k streams are one of width k D."""
    more: jax.Array | None = None
    """Further state of the stream, described in its class; None for a single stream."""
    spread: jax.Array | None = None
    """r_k of Admin's profiling pass (see `admin.py`), float32 []; None otherwise."""
    attention: jax.Array | None = None
    """Weighted sum of the cross-attention weights of the layers so far, float32 [B, T, S]; None if not recorded."""
    values: jax.Array | None = None
    """The values of the first layer's self-attention, [B, T, H, K]; None without `model.value_residual`."""


def no_values(config: ModelConfig, x: jax.Array) -> jax.Array | None:
    """Returns `Stream.values` before the first layer, for embeddings x [B, T, D]."""
    if not config.value_residual:
        return None
    return jnp.zeros((*x.shape[:2], config.heads, config.key_width), config.dtype)


def _unchanged(h: jax.Array) -> jax.Array:
    return h


Enter = Callable[[jax.Array], jax.Array]
"""E: what a branch h [B, T, D] adds to x."""


class Single(nn.Module):
    """One residual stream. A module of this class connects one sub-layer with the streams."""

    config: ModelConfig
    sublayer: str

    @staticmethod
    def start(x: jax.Array, layers: int) -> Stream:
        """Returns the input of the first of `layers` layers, for embeddings x [B, T, D]."""
        return Stream(x)

    @staticmethod
    def by_layer(layers: int) -> Any:
        """Returns what `read` needs to know about a layer, a tree of [L, ...] leaves."""
        return None

    def read(self, stream: Stream, layer: Any) -> tuple[Stream, jax.Array, Enter]:
        """Returns the stream with the skip input as its x, the branch input u, and E. `layer` is of `by_layer`."""
        return stream, stream.x, _unchanged

    def write(self, stream: Stream, h: jax.Array) -> Stream:
        """Returns the stream after a branch h, without x'."""
        return stream

    @staticmethod
    def declare_end(config: ModelConfig) -> dict[str, Any]:
        """Declares the parameters of `end`."""
        return {}

    @staticmethod
    def end(config: ModelConfig, params: dict[str, Any], stream: Stream, final: Enter) -> jax.Array:
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
    def end(config: ModelConfig, params: dict[str, Any], stream: Stream, final: Enter) -> jax.Array:
        """See `Single`."""
        assert stream.more is not None
        return stream.x + final(stream.more)


class Siamese(Dual):
    """SiameseNorm: x is normalised by every sub-layer that reads it, and `more` (y in the paper) is that of `Dual`.

    x <- LN(x), u = x + LN(y)
    """

    @nn.compact
    def read(self, stream: Stream, layer: Any) -> tuple[Stream, jax.Array, Enter]:
        """See `Single`."""
        assert stream.more is not None
        x = Norm(self.config.norm, name="x_norm")(stream.x)
        return stream._replace(x=x), x + Norm(self.config.norm, name="y_norm")(stream.more), _unchanged

    @staticmethod
    def declare_end(config: ModelConfig) -> dict[str, Any]:
        """See `Single`."""
        return {name: declare_norm(config.norm, config.width) for name in ("x_norm", "y_norm")}

    @staticmethod
    def end(config: ModelConfig, params: dict[str, Any], stream: Stream, final: Enter) -> jax.Array:
        """See `Single`."""
        assert stream.more is not None
        x = apply_norm(config.norm, params["x_norm"], stream.x)
        return final(x + apply_norm(config.norm, params["y_norm"], stream.more))


COPIES = 4
"""k, the number of streams of `Hyper`."""

SINKHORN = 20
"""Iterations of `doubly_stochastic`."""


class Hyper(Single):
    """Manifold-constrained hyper-connections: x has k streams X_i, which start as copies of the embedding.

        u = sum_i pre_i X_i,   X_i' = sum_j R_ij X_j + post_i h,   pre = sigmoid(p), post = 2 sigmoid(q)

    R is a doubly stochastic matrix. p, q and its logits are s r W + b, with r = RMSNorm(X) over all k D features and
    one learned scalar s each. The output is the sum of the streams.
    """

    @staticmethod
    def start(x: jax.Array, layers: int) -> Stream:
        """See `Single`."""
        return Stream(jnp.tile(x, COPIES))

    @nn.compact
    def read(self, stream: Stream, layer: Any) -> tuple[Stream, jax.Array, Enter]:
        """See `Single`."""
        x_BTX, k = exact(stream.x), COPIES
        width, count = x_BTX.shape[-1], k * (k + 2)
        draw = nn.initializers.normal(width**-0.5)
        mapping = self.param("mapping", declared(draw, "embed", "streams"), (width, count))
        bias = self.param("bias", declared(nn.initializers.zeros, "streams"), (count,))
        scale = self.param("scale", declared(nn.initializers.constant(0.01), "streams"), (3,))
        scales = jnp.repeat(scale, jnp.array((k, k, k * k)), total_repeat_length=count)
        again, normed_BTX = not recomputes(self.config.remat), rms_norm(x_BTX, jnp.ones(()))
        logits = scales * product(normed_BTX, (mapping,), ("embed", "streams"), again) + bias
        pre_BTk, post_BTk = jax.nn.sigmoid(logits[..., :k]), 2 * jax.nn.sigmoid(logits[..., k : 2 * k])
        mixing_BTkk = doubly_stochastic(logits[..., 2 * k :].reshape(*logits.shape[:-1], k, k))
        x_BTkD = x_BTX.reshape(*x_BTX.shape[:-1], k, -1)
        mixed = jnp.einsum("btij,btjd->btid", mixing_BTkk, x_BTkD).reshape(x_BTX.shape)

        def enter(h: jax.Array) -> jax.Array:
            return jnp.einsum("bti,btd->btid", post_BTk, h).reshape(x_BTX.shape)

        return stream._replace(x=mixed), jnp.einsum("bti,btid->btd", pre_BTk, x_BTkD), enter

    @staticmethod
    def end(config: ModelConfig, params: dict[str, Any], stream: Stream, final: Enter) -> jax.Array:
        """See `Single`."""
        return final(exact(stream.x).reshape(*stream.x.shape[:-1], COPIES, -1).sum(-2))


@jax.checkpoint
def doubly_stochastic(logits: jax.Array) -> jax.Array:
    """Returns the matrices e^logits [..., k, k] with rows and columns divided by their sums, in turns (Sinkhorn, 1964).

    After `SINKHORN` iterations all rows and, up to a small error, all columns have the sum 1. The backward pass
    computes the iterations again.

    >>> doubly_stochastic(jnp.log(jnp.array([[1.0, 2.0], [3.0, 6.0]]))).round(3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """

    def normalise(_: Any, logits: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(jax.nn.log_softmax(logits, -2), -1)

    return jnp.exp(jax.lax.fori_loop(0, SINKHORN, normalise, logits))


BLOCKS = 8
"""Number of blocks of `Blocks`, or of layers if the stack has fewer."""


class Blocks(Single):
    """Block attention residuals: x is the sum of the branches of the current block of layers.

    `more` [S, B, T, D] holds the sums v of the blocks so far; the first is the embedding. Every sub-layer reads

        u = sum_i p_i v_i,   p = softmax_i(w . RMSNorm(v_i)),   w [D] learned from 0

    over the stored v and x. Where a block begins, the first sub-layer stores x after it was read, and x restarts at 0.
    """

    @staticmethod
    def start(x: jax.Array, layers: int) -> Stream:
        """See `Single`."""
        return Stream(x, jnp.zeros((min(BLOCKS, layers), *x.shape), x.dtype))

    @staticmethod
    def by_layer(layers: int) -> Any:
        """Returns the number of blocks before the layer's block, and whether the layer begins a block."""
        block = np.arange(layers) * min(BLOCKS, layers) // layers
        return jnp.asarray(block), jnp.asarray(np.diff(block, prepend=-1) > 0)

    @nn.compact
    def read(self, stream: Stream, layer: Any) -> tuple[Stream, jax.Array, Enter]:
        """See `Single`."""
        assert stream.more is not None
        query = self.param("query", declared(nn.initializers.zeros, "embed"), (self.config.width,))
        block, begins = layer
        begins = begins & (self.sublayer == "self")
        u = attended(query, stream, block + 1 - begins)
        own = jnp.arange(len(stream.more))[:, None, None, None] == block
        more = jnp.where(own & begins, stream.x, stream.more)
        return stream._replace(x=jnp.where(begins, 0.0, stream.x), more=more), u, _unchanged

    @staticmethod
    def declare_end(config: ModelConfig) -> dict[str, Any]:
        """See `Single`."""
        return {"query": Declared(jnp.zeros(config.width), ("embed",))}

    @staticmethod
    def end(config: ModelConfig, params: dict[str, Any], stream: Stream, final: Enter) -> jax.Array:
        """See `Single`."""
        assert stream.more is not None
        return final(attended(params["query"], stream, len(stream.more)))


def attended(query: jax.Array, stream: Stream, stored: jax.Array | int) -> jax.Array:
    """Returns u of `Blocks`, [B, T, D], for w = `query` and the first `stored` sums of `stream.more`."""
    assert stream.more is not None
    v = exact(jnp.concatenate([stream.more, stream.x[None]]))
    scores = jnp.einsum("sbtd,d->sbt", rms_norm(v, jnp.ones(())), query)
    known = (jnp.arange(len(v)) < stored) | (jnp.arange(len(v)) == len(v) - 1)
    return jnp.einsum("sbt,sbtd->btd", jax.nn.softmax(jnp.where(known[:, None, None], scores, MASKED), axis=0), v)


KINDS: dict[str, type[Single]] = {
    **dict.fromkeys(("plain", "bottom_to_top", "combination", "combination_post"), Single),
    "dual": Dual,
    "siamese": Siamese,
    "hyper": Hyper,
    "blocks": Blocks,
}
"""`Recipe.stream` -> its class. `combination.py` wraps the layers of a single stream."""

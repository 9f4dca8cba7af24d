"""Our Post-LN Transformer with shared embeddings, built from Flax's own layers.

The layers run in a Python loop. Positions are sinusoids.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from branchnorm_jax.model.embedding import embed, sinusoids
from branchnorm_jax.model.segments import (
    Segments,
    causal_mask,
    decoder_inputs,
    same_sentence,
    source_segments,
    target_segments,
)
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.tokens import PAD

EPSILON = 1e-5


class Layer(nn.Module):
    """Self-attention, cross-attention (decoder only) and feed-forward, each with dropout, residual sum and norm."""

    config: ModelConfig
    train: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array, memory: jax.Array | None = None, cross_mask: jax.Array | None = None
    ) -> jax.Array:
        """Runs one layer: x, memory [B, T, D]; masks [B, T, S], True where a query attends to a key."""
        c = self.config

        def add(name: str, branch: jax.Array) -> jax.Array:
            dropped = nn.Dropout(c.dropout, deterministic=not self.train)(branch)
            return nn.LayerNorm(EPSILON, name=f"{name}_post_norm")(x + dropped)

        def attend(name: str, keys: jax.Array, mask: jax.Array) -> jax.Array:
            attention = nn.MultiHeadDotProductAttention(
                c.heads, dropout_rate=c.attention_dropout, deterministic=not self.train, name=name
            )
            return attention(x, keys, mask=mask[:, None])

        x = add("self", attend("self", x, mask))
        if memory is not None and cross_mask is not None:
            x = add("cross", attend("cross", memory, cross_mask))
        hidden = nn.relu(nn.Dense(c.ffn_width, name="fc1")(x))
        hidden = nn.Dropout(c.activation_dropout, deterministic=not self.train)(hidden)
        return add("ffn", nn.Dense(c.width, name="fc2")(hidden))


class Network(nn.Module):
    """Logits of target words given the source and the previous words, as `Transformer.__call__` with alpha = 1."""

    config: ModelConfig
    vocabulary: int
    train: bool

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        """Token ids [B, S], [B, T], rows of one or several sentences -> logits [B, T, V]."""
        c = self.config
        table = self.param("table", nn.initializers.normal(c.width**-0.5), (self.vocabulary, c.width))

        def embedded(tokens: jax.Array, segments: Segments) -> jax.Array:
            positions = jnp.asarray(sinusoids(tokens.shape[1], c.width, c.positions))[segments.positions]
            return nn.Dropout(c.dropout, deterministic=not self.train)(embed(tokens, table, positions))

        inputs = decoder_inputs(target)
        segments, target_side = source_segments(source), target_segments(inputs)
        x, mask = embedded(source, segments), same_sentence(segments, segments)
        for index in range(c.encoder_layers):
            x = Layer(c, self.train, name=f"encoder_{index}")(x, mask)
        memory, x = x, embedded(inputs, target_side)
        mask = same_sentence(target_side, target_side) & causal_mask(inputs.shape[1])
        for index in range(c.decoder_layers):
            layer = Layer(c, self.train, name=f"decoder_{index}")
            x = layer(x, mask, memory, same_sentence(target_side, segments))
        return x @ table.T


def loss(
    network: Network, params: Any, source: jax.Array, target: jax.Array, smoothing: float, key: jax.Array
) -> jax.Array:
    """Returns the mean loss over real target tokens in nats, from whole logits and one-hot targets.

    optax spreads eps over all V tokens, we over V - 1, so eps is scaled by V / (V - 1).
    """
    logits = network.apply({"params": params}, source, target, rngs={"dropout": key})
    words, real = network.vocabulary, target != PAD
    wanted = optax.smooth_labels(jax.nn.one_hot(target, words), smoothing * words / (words - 1))
    return (optax.softmax_cross_entropy(logits, wanted) * real).sum() / real.sum()


def converted(params: Mapping[str, Any], heads: int) -> dict[str, Any]:
    """Converts parameters of a Post-LN or BranchNorm `Transformer` with shared embeddings for `Network`."""

    def attention(linears: Mapping[str, Any]) -> dict[str, Any]:
        """Splits features into heads, as Flax does: kernels [D, H, K], and [H, K, D] for the output."""
        names = {"q": "query", "k": "key", "v": "value"}

        def split(array: jax.Array) -> jax.Array:
            return array.reshape(*array.shape[:-1], heads, -1)

        kernel, bias = linears["o"]["kernel"], linears["o"]["bias"]
        out = {"kernel": kernel.reshape(heads, -1, kernel.shape[-1]), "bias": bias}
        return {theirs: jax.tree.map(split, dict(linears[ours])) for ours, theirs in names.items()} | {"out": out}

    def layer(stacked: Mapping[str, Any], index: int) -> dict[str, Any]:
        ours: dict[str, Any] = jax.tree.map(lambda leaf: leaf[index], dict(stacked))
        attentions = {name: attention(ours[name]) for name in ("self", "cross") if name in ours}
        norms = {name: norm for name, norm in ours.items() if name.endswith("_norm")}
        return attentions | norms | ours["ffn"]

    layers = {
        f"{stack}_{index}": layer(params[stack], index)
        for stack in ("encoder", "decoder")
        for index in range(len(params[stack]["ffn"]["fc1"]["bias"]))
    }
    return {"table": params["embedding"]["shared"]} | layers

"""Encoder and decoder layers. One residual function serves all methods: it reads the recipe, never a method's name."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from branchnorm_jax.axes import kernels
from branchnorm_jax.model.attention import Attention, KeysValues, Mix
from branchnorm_jax.model.cache import Cache
from branchnorm_jax.model.coefficients import Coefficients, learned_name
from branchnorm_jax.model.declared import declared
from branchnorm_jax.model.dropout import Site, dropout, site_key
from branchnorm_jax.model.feedforward import FeedForward
from branchnorm_jax.model.fused_residual import Weights, fused_residual, supported
from branchnorm_jax.model.norms import Norm, apply_norm, exact
from branchnorm_jax.model.recipe import Recipe, Weight
from branchnorm_jax.model.relative import NO_RELATIVE, Relative
from branchnorm_jax.model.streams import KINDS, Stream
from branchnorm_jax.model.taps import watched_rows
from branchnorm_jax.options import ModelConfig


class LayerInput(NamedTuple):
    """Inputs that differ between the layers of a stack. The stack scans over a leading axis L."""

    coefficients: Coefficients
    key: jax.Array | None = None
    """Dropout key [] (in the stack [L]); None switches dropout off."""
    probe: jax.Array | None = None
    """Added to the layer's input, [B, T, D] (in the stack [L, B, T, D])."""
    attention_weight: jax.Array | None = None
    """Weight of the layer in `Stream.attention`: float32 [] (in the stack [L])."""
    first: jax.Array | None = None
    """Whether the layer is the first of its stack, bool [] (in the stack [L]); only with `Stream.values`."""
    streams: Any = None
    """What the kind of stream needs to know about the layer, see `streams.Single.by_layer`."""


class Block(nn.Module):
    """The residual algebra, shared by encoder and decoder layers.

    `inactive` is for layers with b = 0: the branches are not computed. The result is the same.
    """

    config: ModelConfig
    recipe: Recipe
    inactive: bool = False

    def _residual(
        self,
        name: str,
        stream: Stream,
        branch: Callable[[jax.Array], jax.Array],
        layer: LayerInput,
        site: Site,
        bottom: jax.Array | None = None,
    ) -> Stream:
        """x' = P(a x + b E(Dropout(G(F(c Q(u))))) + bottom), computed in float32 and returned in the stream's type."""
        recipe, streams = self.recipe, KINDS[self.recipe.stream](self.config, name, name=f"{name}_streams")
        stream, u, enter = streams.read(stream, layer.streams)
        x = exact(stream.x)
        if recipe.post_layers is None:
            z = self._norm(f"{name}_pre_norm", u) if recipe.pre else u
        else:
            norm = Norm(self.config.norm, name=f"{name}_norm")
            z = jnp.where(layer.coefficients.post, u, norm(u))
        if recipe.pre_scale is not None:
            z = z * layer.coefficients.pre_scale
        if recipe.shifts:
            z = z - self.param(f"{name}_shift", declared(nn.initializers.zeros), ())
        if self.inactive and name in recipe.branch.on:
            h = jnp.zeros_like(x)
        else:
            h = checkpoint_name(branch(z), "branch")
            h = self._norm(f"{name}_branch_norm", h) if name in recipe.branch_norm else h
        given, key = h, site_key(layer.key, site)
        a = self._weight("skip", name, layer.coefficients.skip) if stream.spread is None else stream.spread
        b = self._weight("branch", name, layer.coefficients.branch)
        h = dropout(h.astype(x.dtype), self.config.dropout, key)
        stream, h = streams.write(stream, h), b * enter(h)
        y = a * x + h if bottom is None else a * x + h + bottom
        if recipe.post_layers is not None:
            y = jnp.where(layer.coefficients.post, norm(y), y)
        elif recipe.post:
            params = Norm(self.config.norm, name=f"{name}_post_norm").parameters(self.config.width)
            normed = apply_norm(self.config.norm, params, y)
            if bottom is None and self.config.norm == "layer_norm":
                platform, weights = kernels(self.config.kernels), Weights(a, b, **params)
                if supported(platform, stream.x, weights):
                    # Equal to the operations above, which XLA then drops.
                    normed = fused_residual(platform, stream.x, given, weights, self.config.dropout, key)
            y = normed if recipe.post_first is None or name != "self" else jnp.where(layer.coefficients.post, normed, y)
        if recipe.damped:
            gate = self.param(f"{name}_gate", declared(nn.initializers.zeros), ())
            y = y - jax.nn.silu(gate) * jax.lax.stop_gradient(y)
        if self.is_mutable_collection("watch"):
            self.sow("watch", "branch", mean_square(h))
            self.sow("watch", "skip", mean_square(a * x))
        if stream.spread is not None:
            self.sow("profile", f"{name}_skip", stream.spread)
            stream = stream._replace(spread=jnp.sqrt(jnp.var(a * x) + jnp.var(h)))
        return stream._replace(x=y.astype(self.config.carry_dtype))

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return Norm(self.config.norm, name=name)(x)

    def _weight(self, which: str, sublayer: str, constant: jax.Array) -> jax.Array:
        """Returns a ("skip") or b ("branch") of a sub-layer."""
        weight: Weight = getattr(self.recipe, which)
        if sublayer not in weight.on:
            return jnp.ones(())
        if weight.learned in ("", "layer"):
            return constant
        return self._learned(learned_name(weight, which, sublayer), weight)

    def _learned(self, name: str, weight: Weight) -> jax.Array:
        axes, shape = (("embed",), (self.config.width,)) if weight.learned == "vector" else ((), ())
        return self.param(name, declared(nn.initializers.ones, *axes, gain=weight.start), shape)

    def _begin(self, stream: Stream, layer: LayerInput) -> tuple[Stream, LayerInput, jax.Array | None]:
        """Returns the inputs of the first sub-layer, and the term `bottom` of the last one (or None)."""
        if layer.probe is not None:
            copies = stream.x.shape[-1] // self.config.width
            stream = stream._replace(x=stream.x + jnp.tile(layer.probe, copies))
        # The sub-layers of a layer share this parameter.
        weights = {"skip": self.recipe.skip, "branch": self.recipe.branch}
        shared = {which: self._learned(which, weight) for which, weight in weights.items() if weight.learned == "layer"}
        layer = layer._replace(coefficients=layer.coefficients._replace(**shared))
        return stream, layer, stream.x if self.recipe.stream == "bottom_to_top" else None

    def _value_residual(self, stream: Stream, layer: LayerInput) -> tuple[Mix | None, list[jax.Array]]:
        """Returns the function v -> s_1 v_1 + s_2 v, and a list that it fills with v_1; v_1 is the first layer's v.

        The function leaves v_1 as it is. It is None without `model.value_residual`.
        """
        first, values = layer.first, stream.values
        kept: list[jax.Array] = []
        if first is None or values is None:
            return None, kept
        shares = self.param("value_shares", declared(nn.initializers.constant(0.5), "streams"), (2,))

        def mix(v: jax.Array) -> jax.Array:
            kept.append(jnp.where(first, v, values))
            return jnp.where(first, v, shares[0] * values + shares[1] * v).astype(v.dtype)

        return mix, kept


class EncoderBlock(Block):
    """Self-attention, then feed-forward."""

    @nn.compact
    def __call__(
        self, stream: Stream, layer: LayerInput, mask_BTS: jax.Array, relative: Relative = NO_RELATIVE
    ) -> tuple[Stream, None]:
        """Runs one layer. mask_BTS [B, S, S] is True where a query attends: at the real tokens of its sentence."""
        stream, layer, bottom = self._begin(stream, layer)
        attention = Attention(self.config, self.recipe, name="self")
        feed_forward = FeedForward(self.config, self.recipe, name="ffn")
        mix, kept = self._value_residual(stream, layer)

        def self_attention(z: jax.Array) -> jax.Array:
            key = site_key(layer.key, Site.SELF_PROBABILITIES)
            return attention(z, z, mask_BTS, key, relative, mix)

        stream = self._residual("self", stream, self_attention, layer, Site.SELF_BRANCH)
        stream = stream._replace(values=kept[0] if kept else None)
        ffn_key = site_key(layer.key, Site.FFN_ACTIVATION)
        return self._residual("ffn", stream, lambda z: feed_forward(z, ffn_key), layer, Site.FFN_BRANCH, bottom), None


class DecoderBlock(Block):
    """Masked self-attention, cross-attention, feed-forward. A decoder-only model has no cross-attention."""

    @nn.compact
    def __call__(
        self,
        stream: Stream,
        layer: LayerInput,
        memory_BSD: jax.Array | None,
        self_mask: jax.Array,
        cross_mask: jax.Array | None,
        relative: Relative = NO_RELATIVE,
        cache: Cache | None = None,
        return_cache: bool = False,
    ) -> tuple[Stream, KeysValues | None]:
        """Runs one layer on whole targets (`cache` is None), or on one step of several hypotheses per sentence.

        Args:
          stream: x [B, T, D] of whole targets, or [B, Q, D] of the current tokens of Q hypotheses.
          layer: this layer's coefficients and dropout key.
          memory_BSD: the encoder's output; None with a cache, and in a decoder-only model.
          self_mask: True where a query attends to a target token, [B, T, T], or to a slot of the cache, [B, Q, N].
          cross_mask: True where a query attends to a source token, [B, T, S] or [B, 1, S]; None without an encoder.
          relative: positions inside self-attention.
          cache: this layer's `Cache`, without the current tokens.
          return_cache: whether to return keys and values of whole targets too.

        Returns:
          The layer's output, and with a cache or `return_cache` the self-attention's keys and values of x, which the
          caller writes to a cache.
        """
        stream, layer, bottom = self._begin(stream, layer)
        self_attention = Attention(self.config, self.recipe, name="self")
        cross_attention = Attention(self.config, self.recipe, name="cross")
        feed_forward = FeedForward(self.config, self.recipe, name="ffn")
        new: list[KeysValues] = []
        probabilities: list[jax.Array] = []
        mix, kept = self._value_residual(stream, layer)

        def attend_self(z: jax.Array) -> jax.Array:
            if return_cache or cache is not None:
                new.append(self_attention.keys_values(z, relative.rotation, mix))
            if cache is None:
                return self_attention(z, z, self_mask, site_key(layer.key, Site.SELF_PROBABILITIES), relative, mix)
            return self_attention.decode(z, cache.self, self_mask, new[0], relative)

        def attend_cross(z: jax.Array) -> jax.Array:
            assert cross_mask is not None
            if cache is not None:
                assert cache.cross is not None
                return cross_attention.decode(z, cache.cross, cross_mask)
            assert memory_BSD is not None
            if stream.attention is not None:
                k_BSHK, _ = cross_attention.keys_values(memory_BSD)
                probabilities.append(cross_attention.probabilities(z, k_BSHK, cross_mask))
            return cross_attention(z, memory_BSD, cross_mask, site_key(layer.key, Site.CROSS_PROBABILITIES))

        stream = self._residual("self", stream, attend_self, layer, Site.SELF_BRANCH)
        stream = stream._replace(values=kept[0] if kept else None)
        if "encoder" in self.config.stacks:
            stream = self._residual("cross", stream, attend_cross, layer, Site.CROSS_BRANCH)
        if stream.attention is not None and layer.attention_weight is not None:
            stream = stream._replace(attention=stream.attention + layer.attention_weight * probabilities[0])
        ffn_key = site_key(layer.key, Site.FFN_ACTIVATION)
        stream = self._residual("ffn", stream, lambda z: feed_forward(z, ffn_key), layer, Site.FFN_BRANCH, bottom)
        if cache is None and not return_cache:
            return stream, None
        c, (rows, length, _) = self.config, stream.x.shape
        return stream, new[0] if new else (jnp.zeros((rows, length, c.heads, c.key_width), c.dtype),) * 2


def make_block(config: ModelConfig, recipe: Recipe, stack: str, inactive: bool = False) -> EncoderBlock | DecoderBlock:
    """Creates one layer of a stack."""
    return (EncoderBlock if stack == "encoder" else DecoderBlock)(config, recipe, inactive)


def mean_square(x: jax.Array) -> jax.Array:
    """Returns the mean square of each of the `watched_rows` of [B, T, D], float32 [B'].

    The mean over rows is taken once per update, because rows may be on different devices.
    """
    return jnp.square(watched_rows(x).astype(jnp.float32)).mean((1, 2))


def watched(
    before: jax.Array, after: jax.Array, mask: jax.Array, intermediates: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Computes the statistics of one layer for each of the `watched_rows`; see `training/watch.py`.

    Args:
      before: the layer's input, [B, T, D].
      after: the layer's output.
      mask: the mask of the layer's self-attention, [B, T, T].
      intermediates: the values that the layer's modules sowed into the collection "watch".

    Returns:
      branch, skip: mean squares of b F and a x, [sub-layers, B]; cosine: of input and output, [B]; sparsity: share of
      hidden feed-forward units that are 0, [B], 0 if none was computed; similarity, pairs: see `similarity`, [B].
    """
    before, after, mask = map(watched_rows, (before, after, mask))
    x, y = before.astype(jnp.float32), after.astype(jnp.float32)
    squares = jnp.square(x).sum(-1) * jnp.square(y).sum(-1)
    return {
        "branch": jnp.stack(intermediates["branch"]),
        "skip": jnp.stack(intermediates["skip"]),
        "cosine": ((x * y).sum(-1) * jax.lax.rsqrt(squares + 1e-20)).mean(1),
        "sparsity": intermediates["ffn"]["sparsity"][0] if "ffn" in intermediates else jnp.zeros(len(x)),
        **similarity(y, mask),
    }


def similarity(x: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """Sums the cosines of all pairs of different tokens of a sentence, and counts the pairs, [B] each.

    `mask` [B, T, T] is True at pairs of tokens of the same sentence, in one order (causal) or both, and
    on the diagonal at real tokens.
    """
    unit = x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-20)
    real = jnp.diagonal(mask, axis1=1, axis2=2)
    pairs = (mask & real[:, :, None]).astype(unit.dtype)
    cosines = (unit * jnp.einsum("bts,bsd->btd", pairs, unit)).sum((1, 2))
    return {"similarity": cosines - real.sum(1), "pairs": pairs.sum((1, 2)) - real.sum(1)}

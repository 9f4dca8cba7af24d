"""The encoder-decoder Transformer: pure functions of a parameter tree.

Parameters:

    embedding/{shared | source, target[, output]}   [V, D]
    encoder/{self/{q,k,v,o}, ffn/{fc1,fc2}, ...}     [L, ...] per leaf: axis 0 is the layer
    decoder/{self, cross, ffn, ...}                  [L, ...]
    {encoder,decoder}_norm                           [D], if the method ends its stacks with a norm
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.config import PAD, ModelConfig
from branchnorm_jax.model.blocks import (
    Block,
    Cache,
    DecoderBlock,
    EncoderBlock,
    LayerInput,
    make_attention,
    write_cache,
)
from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.embedding import embed, init_table, sinusoids
from branchnorm_jax.model.initializers import get_base
from branchnorm_jax.model.methods import Depth, PerStack, Recipe, get_recipe
from branchnorm_jax.model.norms import layer_norm
from branchnorm_jax.model.stack import run_stack

Params = dict[str, Any]
STACKS = ("encoder", "decoder")


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A Transformer of any depth and method.

    `branch_scale` of the methods below is alpha_t: a traced float32 scalar, or one value per layer [L] of the stack it
    goes to. Methods without a schedule ignore it.

    Attributes:
      config: the network's options.
      source_vocab: rows of the source embedding.
      target_vocab: rows of the target embedding.
    """

    config: ModelConfig
    source_vocab: int
    target_vocab: int

    @property
    def recipe(self) -> Recipe:
        """The method's row of `methods.METHODS`."""
        return get_recipe(self.config.method)

    @property
    def init_base(self) -> str:
        """Name of the base distribution of the weights."""
        return self.config.init or self.recipe.init

    @property
    def depth(self) -> Depth:
        """Layers of both stacks."""
        return Depth(self.config.encoder_layers, self.config.decoder_layers)

    # Parameters

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters; layer l of a stack depends on (key, stack, l) alone."""
        get_base(self.init_base)
        tables = {
            "all": {"shared": self.source_vocab},
            "decoder": {"source": self.source_vocab, "target": self.target_vocab},
            "none": {"source": self.source_vocab, "target": self.target_vocab, "output": self.target_vocab},
        }[self.config.shared_embeddings]
        embedding_key, *stack_keys = (jax.random.fold_in(key, index) for index in range(3))
        params: Params = {
            "embedding": {
                name: init_table(jax.random.fold_in(embedding_key, index), rows, self.config.width)
                for index, (name, rows) in enumerate(tables.items())
            }
        }
        for stack, stack_key, layers in zip(STACKS, stack_keys, self.depth, strict=True):
            params[stack] = self._init_stack(stack, stack_key, layers)
            if self.recipe.final:
                width = (self.config.width,)
                params[f"{stack}_norm"] = {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
        return params

    def _init_stack(self, stack: str, key: jax.Array, layers: int) -> Params:
        x = jnp.zeros((1, 1, self.config.width), self.config.carry_dtype)
        mask = jnp.ones((1, 1, 1), bool)
        inputs = (LayerInput(jnp.ones(()), jnp.ones(()), None), *((mask,) if stack == "encoder" else (x, mask, mask)))

        def init_layer(layer_key: jax.Array) -> Params:
            return self._block(stack).init(layer_key, x, *inputs)["params"]

        keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(layers))
        return self._with_gains(stack, jax.vmap(init_layer)(keys))

    def _with_gains(self, stack: str, params: Params) -> Params:
        """Multiplies each kernel by the recipe's gain for its sub-layer and matrix."""

        def gain(sublayer: str, matrix: str) -> float:
            gains = self.recipe.gain
            rule = gains.get(f"{sublayer}/{matrix}", gains.get("fc1" if matrix == "gate" else matrix))
            return getattr(rule(self.depth), stack) if rule else 1.0

        return {
            sublayer: {
                matrix: leaf | {"kernel": leaf["kernel"] * gain(sublayer, matrix)} if "kernel" in leaf else leaf
                for matrix, leaf in group.items()
            }
            if not sublayer.endswith("_norm")
            else group
            for sublayer, group in params.items()
        }

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters; nothing is allocated."""
        return jax.eval_shape(self.init, jax.random.key(0))

    # Forward

    def encode(
        self, params: Params, source_BS: jax.Array, branch_scale: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Memory [B, S, D] of source token ids [B, S]; `key` switches dropout on."""
        key = _fold(key, 0)
        x_BSD = self._embed(params, "source", source_BS, self._positions(source_BS.shape[1]), key)
        mask_B1S = source_mask(source_BS)
        block = self._block("encoder")

        def layer(x: jax.Array, inputs: tuple[Params, LayerInput]) -> tuple[Any, None]:
            layer_params, layer_input = inputs
            return block.apply({"params": layer_params}, x, layer_input, mask_B1S), None

        per_layer = (params["encoder"], self._layer_inputs("encoder", branch_scale, key))
        x_BSD, _ = run_stack(layer, x_BSD, per_layer, scan=self.config.scan, remat=self.config.remat)
        return self._final_norm(params, "encoder", x_BSD)

    def decode(
        self,
        params: Params,
        memory_BSD: jax.Array,
        mask_B1S: jax.Array,
        inputs_BT: jax.Array,
        branch_scale: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Decoder output [B, T, D] for given decoder inputs (EOS, then the target without its last token)."""
        key = _fold(key, 1)
        length = inputs_BT.shape[1]
        x_BTD = self._embed(params, "target", inputs_BT, self._positions(length), key)
        causal_1TT = jnp.tri(length, dtype=bool)[None]
        block = self._block("decoder")

        def layer(x: jax.Array, inputs: tuple[Params, LayerInput]) -> tuple[jax.Array, None]:
            layer_params, layer_input = inputs
            x, _ = block.apply({"params": layer_params}, x, layer_input, memory_BSD, causal_1TT, mask_B1S)
            return x, None

        per_layer = (params["decoder"], self._layer_inputs("decoder", branch_scale, key))
        x_BTD, _ = run_stack(layer, x_BTD, per_layer, scan=self.config.scan, remat=self.config.remat)
        return self._final_norm(params, "decoder", x_BTD)

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Scores of the target vocabulary, float32: [..., D] -> [..., V]."""
        table_VD = self._table(params, "output").astype(self.config.dtype)
        return jnp.einsum("...d,vd->...v", x.astype(self.config.dtype), table_VD, preferred_element_type=jnp.float32)

    def __call__(
        self,
        params: Params,
        source_BS: jax.Array,
        inputs_BT: jax.Array,
        branch_scale: jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits [B, T, V] float32 of the next target tokens (teacher forcing)."""
        memory_BSD = self.encode(params, source_BS, branch_scale, key)
        x_BTD = self.decode(params, memory_BSD, source_mask(source_BS), inputs_BT, branch_scale, key)
        return self.logits(params, x_BTD)

    # Decoding, one token at a time

    def start_cache(self, params: Params, memory_BSD: jax.Array, rows: int, capacity: int) -> Cache:
        """Empty self-attention caches [L, rows, capacity, H, K] and the source's keys and values [L, B, S, H, K]."""
        c = self.config
        attention = make_attention(c, self.init_base)

        def keys_values(cross_params: Params) -> Any:
            return attention.apply({"params": cross_params}, memory_BSD, method="keys_values")

        cross = jax.vmap(keys_values)(params["decoder"]["cross"])
        empty = jnp.zeros((c.decoder_layers, rows, capacity, c.heads, c.width // c.heads), c.dtype)
        return Cache(self=(empty, empty), cross=cross)

    def step(
        self,
        params: Params,
        cache: Cache,
        mask_B1S: jax.Array,
        tokens_N: jax.Array,
        position: jax.Array,
        branch_scale: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Logits [N, V] of the tokens at `position` + 1, given those at `position`; N is a multiple of B."""
        capacity = cache.self[0].shape[2]
        positions_1D = jax.lax.dynamic_slice_in_dim(self._positions(capacity), position, 1)
        x_N1D = self._embed(params, "target", tokens_N[:, None], positions_1D, None)
        seen_11T = (jnp.arange(capacity) <= position)[None, None]
        block = self._block("decoder")

        def layer(x: jax.Array, inputs: tuple[Params, LayerInput, Cache]) -> tuple[jax.Array, Any]:
            layer_params, layer_input, layer_cache = inputs
            arguments = (x, layer_input, None, seen_11T, mask_B1S, layer_cache, position)
            return block.apply({"params": layer_params}, *arguments)

        per_layer = (params["decoder"], self._layer_inputs("decoder", branch_scale, None), cache)
        x_N1D, new = run_stack(layer, x_N1D, per_layer, scan=self.config.scan, remat=False)
        x_ND = self._final_norm(params, "decoder", x_N1D)[:, 0]
        return self.logits(params, x_ND), cache._replace(self=write_cache(cache.self, new, position))

    # Parts

    def _block(self, stack: str) -> Block:
        kind = EncoderBlock if stack == "encoder" else DecoderBlock
        return kind(self.config, self.recipe, self.init_base)

    def _table(self, params: Params, side: str) -> jax.Array:
        tables = params["embedding"]
        return tables.get("shared", tables.get(side, tables.get("target")))

    def _positions(self, length: int) -> jax.Array:
        return jnp.asarray(sinusoids(length, self.config.width, self.config.positions))

    def _embed(
        self, params: Params, side: str, tokens_BT: jax.Array, positions_TD: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        x_BTD = embed(tokens_BT, self._table(params, side), positions_TD)
        return dropout(x_BTD, self.config.dropout, _fold(key, 0)).astype(self.config.carry_dtype)

    def _layer_inputs(self, stack: str, branch_scale: jax.Array, key: jax.Array | None) -> LayerInput:
        """Coefficients and keys of a stack's layers, [L] each. Key 0 of a stack is the embedding's."""
        layers: int = getattr(self.depth, stack)
        skip: PerStack = self.recipe.skip(self.depth)
        branch = jnp.asarray(branch_scale, jnp.float32) if self.recipe.scheduled else jnp.float32(1.0)
        keys = None if key is None else jax.vmap(functools.partial(jax.random.fold_in, key))(1 + jnp.arange(layers))
        return LayerInput(
            skip=jnp.full(layers, getattr(skip, stack), jnp.float32), branch=jnp.broadcast_to(branch, layers), key=keys
        )

    def _final_norm(self, params: Params, stack: str, x: jax.Array) -> jax.Array:
        return layer_norm(x, **params[f"{stack}_norm"]) if self.recipe.final else x


def source_mask(source_BS: jax.Array) -> jax.Array:
    """[B, 1, S], True at real tokens."""
    return (source_BS != PAD)[:, None, :]


def _fold(key: jax.Array | None, index: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, index)

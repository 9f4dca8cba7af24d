"""The Transformer, encoder-decoder or decoder-only: pure functions of a parameter tree (see `parameters.py`)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.axes import gather
from branchnorm_jax.model import relative
from branchnorm_jax.model.blocks import Block, LayerInput, make_block, watched
from branchnorm_jax.model.coefficients import Alpha, resolve
from branchnorm_jax.model.combination import combined
from branchnorm_jax.model.declared import map_declared
from branchnorm_jax.model.dropout import dropout
from branchnorm_jax.model.embedding import STARTS, TABLE_AXES, drop_words, embed, fix_norm, sinusoids
from branchnorm_jax.model.growth import starts_closed
from branchnorm_jax.model.methods import recipe_of
from branchnorm_jax.model.norms import apply_norm, final_kind
from branchnorm_jax.model.output import Output
from branchnorm_jax.model.parameters import Params, declare_parameters
from branchnorm_jax.model.recipe import STACKS, Depth, Recipe
from branchnorm_jax.model.segments import (
    Segments,
    causal_mask,
    decoder_inputs,
    same_sentence,
    source_segments,
    target_segments,
)
from branchnorm_jax.model.stack import Layer, rematerialised, run_and_update, run_stack, unstack
from branchnorm_jax.model.streams import KINDS, Stream, no_values
from branchnorm_jax.model.taps import Taps
from branchnorm_jax.options import ModelConfig
from branchnorm_jax.tokens import EOS


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A Transformer of any depth and method: encoder and decoder, or a decoder alone (`model.family`).

    A decoder alone is a language model; its vocabulary is that of the target. `alpha` is given by stack and layer, or
    as one number for all layers. Recipes without a growing branch ignore it.

    Attributes:
      config: the network's options.
      source_vocab: rows of the source embedding.
      target_vocab: rows of the target embedding.
      unused: ids of the target tokens with probability 0.
      tags: number of language tags, whose ids follow UNK.
    """

    config: ModelConfig
    source_vocab: int
    target_vocab: int
    unused: tuple[int, ...] = ()
    tags: int = 0

    @property
    def recipe(self) -> Recipe:
        """The method's row of `methods.METHODS`, with the options of the config that add to it."""
        return recipe_of(self.config)

    @property
    def depth(self) -> Depth:
        """Number of layers of each stack."""
        return Depth(self.config.encoder_layers, self.config.decoder_layers)

    # Parameters

    def init(self, key: jax.Array) -> Params:
        """Draws float32 parameters. Layer l of a stack depends only on (key, stack, l)."""
        return nn.meta.unbox(self._declare(key))

    def abstract_params(self) -> Params:
        """Returns the shapes and dtypes of the parameters, without allocating them."""
        return nn.meta.unbox(self._declared())

    def logical_axes(self) -> Any:
        """Returns the parameter tree with a tuple of logical axis names at each leaf."""
        return map_declared(lambda leaf: leaf.axes, self._declared())

    def gather_tables(self, params: Params) -> Params:
        """Returns the parameters with embedding tables that are whole along fsdp; see `axes.gather`.

        The uses of a table add up their gradients before they are summed over the devices.
        """
        tables = {
            name: gather(leaf, *TABLE_AXES) if leaf.ndim == len(TABLE_AXES) else leaf
            for name, leaf in params["embedding"].items()
        }
        return params | {"embedding": tables}

    def _declare(self, key: jax.Array) -> Any:
        return declare_parameters(self.config, self.recipe, self.source_vocab, self.target_vocab, key)

    def _declared(self) -> Any:
        # Models that differ only in what the parameters do not depend on share a declaration.
        config = dataclasses.replace(self.config, remat="none", kernels="plain")
        return _declaration(Transformer(config, self.source_vocab, self.target_vocab))

    # Forward

    def encode(
        self,
        params: Params,
        source_BS: jax.Array,
        alpha: Alpha | jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the encoder's output (the memory), [B, S, D], for source token ids [B, S].

        Args:
          params: the parameters.
          source_BS: token ids.
          alpha: alpha_t.
          key: random key of dropout; None switches dropout off.
        """
        return self.run_tokens(params, "encoder", source_BS, source_segments(source_BS), None, alpha, key)[0]

    def first_stack(
        self, params: Params, source_BS: jax.Array, alpha: Alpha | jax.Array, change_BSD: jax.Array
    ) -> jax.Array:
        """Returns the output of the first stack, [B, S, D], for the source of a batch.

        That stack is the encoder, or the decoder of a language model. The change is added to the embeddings.
        """
        stack = self.config.stacks[0]
        segments = (source_segments if stack == "encoder" else target_segments)(source_BS)
        taps = Taps(inputs={stack: change_BSD})
        return self.run_tokens(params, stack, source_BS, segments, None, alpha, taps=taps)[0]

    def decode(
        self,
        params: Params,
        memory_BSD: jax.Array,
        source_BS: jax.Array,
        inputs_BT: jax.Array,
        alpha: Alpha | jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the decoder's output [B, T, D] for decoder inputs (EOS, then the target without its last token)."""
        memory = memory_BSD, source_segments(source_BS)
        return self.run_tokens(params, "decoder", inputs_BT, target_segments(inputs_BT), memory, alpha, key)[0]

    def run_tokens(
        self,
        params: Params,
        stack: str,
        tokens_BT: jax.Array,
        segments: Segments,
        memory: tuple[jax.Array, Segments] | None,
        alpha: Alpha | jax.Array,
        key: jax.Array | None = None,
        taps: Taps = Taps(),
    ) -> tuple[jax.Array, Any]:
        """Runs token ids through a stack; returns the output [B, T, D] and the records of `taps`.

        The records are stacked over layers. A token attends to the tokens of its own sentence, in the decoder only up
        to itself. `memory` is the encoder's output with the source segments; None for the encoder, and without one.
        """
        key, length = _fold(key, STACKS.index(stack)), tokens_BT.shape[1]
        positions_BTP = self.positions(params, stack, length)[segments.positions]
        mask_BTT, places = same_sentence(segments, segments), relative.NO_RELATIVE
        if self.config.positions == "relative":
            table = params[relative.table_name(stack)]
            places = relative.Relative(bias=relative.bias(self.config, table, stack, length))
        elif self.config.positions == "rotary":
            places = relative.Relative(rotation=positions_BTP)
        arguments: tuple[Any, ...] = (mask_BTT, places)
        if stack == "decoder":
            memory_BSD, cross_mask = (None, None) if memory is None else (memory[0], same_sentence(segments, memory[1]))
            arguments = memory_BSD, mask_BTT & causal_mask(length), cross_mask, places
        x_BTD = self.embed_tokens(params, stack, tokens_BT, positions_BTP, key)
        if stack in taps.inputs:
            x_BTD += taps.inputs[stack].astype(x_BTD.dtype)
        inputs = self.layer_inputs(stack, alpha, key, taps)
        return self.run_layers(params, stack, x_BTD, inputs, lambda _: arguments, taps=taps)

    def output(self, params: Params) -> Output:
        """Returns the output layer, from decoder output to logits."""
        used = np.ones(self.target_vocab, bool)
        used[list(self.unused)] = False
        return Output(self._table(params, "output"), params["embedding"].get("bias"), jnp.asarray(used))

    def logits(self, params: Params, x: jax.Array) -> jax.Array:
        """Computes the logits of the target vocabulary, float32: [..., D] -> [..., V]."""
        return self.output(params).logits(x.astype(self.config.dtype))

    def teacher_forced(
        self,
        params: Params,
        source_BS: jax.Array,
        target_BT: jax.Array,
        alpha: Alpha | jax.Array,
        key: jax.Array | None = None,
        taps: Taps = Taps(),
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the decoder's output before each token of a batch's target; see `hidden`.

        In a batch of a language model, `source_BS` holds the inputs: at each position the token before the target's.
        """
        inputs_BT = decoder_inputs(target_BT) if "encoder" in self.config.stacks else source_BS
        return self.hidden(params, source_BS, inputs_BT, alpha, key, taps)

    def hidden(
        self,
        params: Params,
        source_BS: jax.Array,
        inputs_BT: jax.Array,
        alpha: Alpha | jax.Array,
        key: jax.Array | None = None,
        taps: Taps = Taps(),
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Returns the decoder's output for the given inputs, and the records of `taps` by stack.

        The output is [B, T, D] in the compute type. Without an encoder, `source_BS` is not used.
        """
        memory, records = None, {}
        if "encoder" in self.config.stacks:
            segments = source_segments(source_BS)
            memory_BSD, records["encoder"] = self.run_tokens(
                params, "encoder", source_BS, segments, None, alpha, key, taps
            )
            memory = memory_BSD, segments
        target = target_segments(inputs_BT)
        x_BTD, records["decoder"] = self.run_tokens(params, "decoder", inputs_BT, target, memory, alpha, key, taps)
        return x_BTD.astype(self.config.dtype), records if taps.record else {}

    def __call__(
        self,
        params: Params,
        source_BS: jax.Array,
        inputs_BT: jax.Array,
        alpha: Alpha | jax.Array,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits of the next target tokens under teacher forcing, float32 [B, T, V]."""
        return self.logits(params, self.hidden(params, source_BS, inputs_BT, alpha, key)[0])

    def attention(
        self, params: Params, source_BS: jax.Array, inputs_BT: jax.Array, alpha: Alpha | jax.Array, weights_M: jax.Array
    ) -> jax.Array:
        """Returns the decoder's attention weights on the source tokens under teacher forcing, float32 [B, T, S].

            sum over layers l of weights_l mean over heads h of softmax(q_lh k_lh^T / sqrt(K))

        Row t belongs to the prediction of target token t. It sums to the sum of `weights_M` and is 0 at padding. Memory
        does not grow with depth, because the layers pass on one running sum.
        """
        memory = self.encode(params, source_BS, alpha), source_segments(source_BS)
        target = target_segments(inputs_BT)
        return self.run_tokens(params, "decoder", inputs_BT, target, memory, alpha, taps=Taps(attention=weights_M))[1]

    def positions(self, params: Params, stack: str, length: int) -> jax.Array:
        """Returns the position embeddings of a stack, float32 [length, D]; zeros if positions are relative.

        If they are rotary, returns the rotations of queries and keys, [length, K]. There are at most `config.longest`.
        Only padding can lie beyond this length; JAX clamps its index to the last row.
        """
        if self.config.positions == "learned":
            return params["embedding"][f"{stack}_positions"][:length]
        if self.config.positions == "relative":
            return jnp.zeros((length, self.config.width))
        if self.config.positions == "rotary":
            return jnp.asarray(relative.rotations(length, self.config.key_width))
        return jnp.asarray(sinusoids(length, self.config.width, self.config.positions))

    # Parts

    def run_layers(
        self,
        params: Params,
        stack: str,
        x: jax.Array,
        inputs: LayerInput,
        arguments: Callable[[Any], tuple[Any, ...]],
        per_layer: Any = None,
        taps: Taps = Taps(),
    ) -> tuple[jax.Array, Any]:
        """Runs embeddings x [B, T, D] through the layers of a stack and its final norm.

        `arguments` maps a layer's entry of `per_layer` to its block's arguments after stream and `LayerInput`. Returns
        the stack's output, and the records of `taps` or the blocks' outputs, stacked over layers.
        """
        c, recipe, update = self.config, self.recipe, taps.updates.get(stack)
        layer = self._layer(stack, arguments, taps)
        scanned: Any = (params[stack], inputs, per_layer)
        if isinstance(params[stack], list):
            extra = per_layer or [None] * len(params[stack])
            scanned = list(zip(params[stack], unstack(inputs), extra, strict=True))
        remat = c.remat if per_layer is None else "none"
        run = functools.partial(run_stack, remat=remat, group=c.group, unroll=c.unroll)
        attention = None if taps.attention is None else jnp.zeros(arguments(per_layer)[2].shape)
        start = KINDS[recipe.stream].start(x, getattr(self.depth, stack))
        start = start._replace(attention=attention, values=no_values(c, x))
        if recipe.combines:
            assert update is None, "layers that read the outputs of all earlier layers cannot be updated one by one"
            # Rematerialise each layer alone. The sums over layers are linear, so the backward pass does not need them.
            looped = (c.unroll or 1) < getattr(self.depth, stack)
            checkpointed = rematerialised(layer, "full" if remat == "nested" else remat, looped)
            run = functools.partial(run, remat="none")
            combine, carry, inputs = combined(
                checkpointed,
                params[f"{stack}_combination"],
                start,
                scanned,
                norm=c.norm,
                post=recipe.stream == "combination_post",
            )
            (stream, _), outputs = run(combine, carry, inputs)
        else:
            start = start._replace(spread=jnp.ones(()) if taps.record == "profile" else None)
            if update is None:
                stream, outputs = run(layer, start, scanned)
            else:
                stream, outputs = run_and_update(
                    layer, start, params[stack], scanned[1:], update, remat=remat, group=c.group
                )
        return self._end(params, stack, stream), outputs if attention is None else stream.attention

    def _layer(self, stack: str, arguments: Callable[[Any], tuple[Any, ...]], taps: Taps) -> Layer:
        """Returns one layer as a function for `run_stack`. The arguments are as in `run_layers`."""
        record = taps.record

        def apply(block: Block, stream: Stream, scanned: tuple[Params, LayerInput, Any]) -> tuple[Stream, Any]:
            layer_params, layer_input, extra = scanned
            variables, given = {"params": layer_params}, arguments(extra)
            if not record:
                return block.apply(variables, stream, layer_input, *given)
            if record == "cache":
                return block.apply(variables, stream, layer_input, *given, return_cache=True)
            (after, _), sown = block.apply(variables, stream, layer_input, *given, mutable=[record])
            # The self-attention mask is the first argument of an encoder layer, and follows the memory in the decoder.
            mask = given[STACKS.index(stack)]
            return after, watched(stream.x, after.x, mask, sown[record]) if record == "watch" else sown[record]

        active: Layer = functools.partial(apply, self._block(stack))
        if self.recipe.branch.end is None or taps.attention is not None or not starts_closed(self.config):
            return active
        if self.config.value_residual:
            return active  # The later layers need the values of the first one.
        # A branch with b = 0 does not change the output and has no gradient, so it need not be computed.
        inactive = functools.partial(apply, self._block(stack, inactive=True))

        def either(stream: Stream, scanned: tuple[Params, LayerInput, Any]) -> tuple[Stream, Any]:
            return jax.lax.cond(scanned[1].coefficients.branch != 0, active, inactive, stream, scanned)

        return either

    def _end(self, params: Params, stack: str, stream: Stream) -> jax.Array:
        """Returns the output of a stack: its stream after what the recipe has behind the last layer."""
        recipe, end = self.recipe, params.get(f"{stack}_norm", {})

        def final(x: jax.Array) -> jax.Array:
            if recipe.final == "shift":
                return (x - end["shift"]) * end.get("scale", 1.0)
            kind = final_kind(self.config.norm, stack)
            return apply_norm(kind, end, x, recipe.final_epsilon) if recipe.final else x

        return KINDS[recipe.stream].end(self.config, params.get(f"{stack}_streams", {}), stream, final)

    def layer_inputs(
        self,
        stack: str,
        alpha: Alpha | jax.Array,
        key: jax.Array | None = None,
        taps: Taps = Taps(),
    ) -> LayerInput:
        """Returns the coefficients, keys and taps of a stack's layers. Key 0 of a stack is for the embedding."""
        exact = jnp.promote_types(self.config.carry_dtype, jnp.float32)  # float64 if the stream is float64
        numbers = 1 + jnp.arange(getattr(self.depth, stack))
        return LayerInput(
            resolve(self.recipe, self.depth, stack, alpha, exact),
            key=None if key is None else jax.vmap(functools.partial(jax.random.fold_in, key))(numbers),
            probe=taps.probes.get(stack),
            attention_weight=taps.attention,
            first=numbers == 1 if self.config.value_residual else None,
            streams=KINDS[self.recipe.stream].by_layer(getattr(self.depth, stack)),
        )

    def _block(self, stack: str, inactive: bool = False) -> Block:
        return make_block(self.config, self.recipe, stack, inactive)

    def _table(self, params: Params, side: str) -> jax.Array:
        tables = params["embedding"]
        table = tables.get(side, tables.get("shared", tables.get("target")))
        return fix_norm(table) if self.config.embedding == "fixnorm" else table

    def embed_tokens(
        self, params: Params, stack: str, tokens_BT: jax.Array, positions: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns the input of a stack's first layer, [B, T, D], from token ids and rows of `positions`.

        Rotary positions are not added to the embeddings.
        """
        positions = jnp.zeros(()) if self.config.positions == "rotary" else positions
        c, side = self.config, "source" if stack == "encoder" else "target"
        key = _fold(key, 0)
        tokens_BT = drop_words(tokens_BT, c.word_dropout, _fold(key, 1), self.tags)
        if stack == "decoder" and c.decoder_start in STARTS:
            tokens_BT = jnp.where(tokens_BT == EOS, STARTS[c.decoder_start], tokens_BT)
        x_BTD = embed(tokens_BT, self._table(params, side), positions)
        if stack == "decoder" and c.decoder_start == "zero":
            x_BTD = jnp.where((tokens_BT == EOS)[..., None], positions, x_BTD)
        if self.recipe.embedding_norm:
            x_BTD = apply_norm(c.norm, params[f"{stack}_embedding_norm"], x_BTD)
        return dropout(x_BTD, c.dropout, key).astype(c.carry_dtype)


def _fold(key: jax.Array | None, index: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, index)


@functools.lru_cache
def _declaration(model: Transformer) -> Any:
    """Returns the shapes and axes of a model's parameters. JAX alone would trace them again for every mesh."""
    return jax.eval_shape(model._declare, jax.random.key(0))

"""The parameter tree of a Transformer:

    embedding/{shared | source, target}[, output]   [V, D]
    embedding/bias                                   [V], added to the logits if model.output_bias is set
    embedding/{encoder,decoder}_positions            [P, D], if model.positions=learned
    encoder/{self/{q,k,v,o}, ffn/{fc1,fc2}, ...}     [L, ...] per leaf: axis 0 is the layer
    decoder/{self, cross, ffn, ...}                  [L, ...]
    {encoder,decoder}_norm                           [D], if the method ends its stacks with a norm; Fixup: scalars
    {encoder,decoder}_{embedding_norm,combination}   only in a few methods, or with model.embedding_norm
    {encoder,decoder}_streams                        only in methods with several streams, for their end
    {encoder,decoder}_relative                       [buckets, H], if model.positions=relative

The recipe scales the base distribution of the matrices by a gain, and sets the initial values of learned weights.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.model.blocks import LayerInput, make_block
from branchnorm_jax.model.coefficients import Coefficients, by_layer
from branchnorm_jax.model.combination import declare_combination
from branchnorm_jax.model.declared import Declared, map_declared
from branchnorm_jax.model.embedding import TABLE_AXES, draw_positions, draw_table
from branchnorm_jax.model.norms import declare_norm, final_kind
from branchnorm_jax.model.recipe import ONE, STACKS, Depth, Recipe
from branchnorm_jax.model.relative import declare_table, table_name
from branchnorm_jax.model.streams import KINDS, no_values
from branchnorm_jax.options import ModelConfig

Params = dict[str, Any]


def declare_parameters(
    config: ModelConfig, recipe: Recipe, source_vocab: int, target_vocab: int, key: jax.Array
) -> dict[str, Any]:
    """Returns the parameter tree. Each leaf is a `Declared` with the initial value after the gain."""
    depth = Depth(config.encoder_layers, config.decoder_layers)
    embedding_key, *keys = (jax.random.fold_in(key, index) for index in range(5))
    params: dict[str, Any] = {"embedding": declare_embedding(config, recipe, source_vocab, target_vocab, embedding_key)}
    for stack, stack_key, table_key, layers in zip(STACKS, keys[:2], keys[2:], depth, strict=True):
        if stack not in config.stacks:
            continue
        params[stack] = declare_stack(config, recipe, depth, stack, stack_key)
        if config.positions == "relative":
            params[table_name(stack)] = declare_table(config, table_key)
        if recipe.embedding_norm:
            params[f"{stack}_embedding_norm"] = declare_norm(config.norm, config.width)
        if recipe.combines:
            params[f"{stack}_combination"] = declare_combination(layers, config.width, config.norm)
        if end := KINDS[recipe.stream].declare_end(config):
            params[f"{stack}_streams"] = end
        if recipe.final == "norm":
            params[f"{stack}_norm"] = declare_norm(final_kind(config.norm, stack), config.width)
        elif recipe.final == "shift":
            scale = {"scale": Declared(jnp.ones(()), ())} if stack == "encoder" else {}
            params[f"{stack}_norm"] = {"shift": Declared(jnp.zeros(()), ())} | scale
    return params


def declare_embedding(
    config: ModelConfig, recipe: Recipe, source_vocab: int, target_vocab: int, key: jax.Array
) -> dict[str, Declared]:
    """Declares the embedding tables, the bias of the logits, and learned positions."""
    rows = {
        "all": {"shared": source_vocab},
        "decoder": {"source": source_vocab, "target": target_vocab},
        "inputs": {"shared": source_vocab, "output": target_vocab},
        "none": {"source": source_vocab, "target": target_vocab, "output": target_vocab},
    }[config.shared_embeddings]
    if "encoder" not in config.stacks:
        rows.pop("source", None)
    tables = {}
    for index, name in enumerate(rows):
        table_key, starts = jax.random.fold_in(key, index), config.decoder_start == "pad"
        table = draw_table(table_key, rows[name], config.width, config.embedding, starts)
        gain = recipe.gain.get(f"embedding/{name}", ONE)(Depth(config.encoder_layers, config.decoder_layers))
        first = config.stacks[0]
        factor = getattr(gain, first) if name in ("source", "shared") else gain.decoder
        tables[name] = Declared(table * factor, TABLE_AXES)
    if config.output_bias:
        tables["bias"] = Declared(jnp.zeros(target_vocab), ("vocab",))
    if config.positions == "learned":
        for index, stack in enumerate(config.stacks, start=len(rows)):
            table = draw_positions(jax.random.fold_in(key, index), config.max_positions, config.width)
            tables[f"{stack}_positions"] = Declared(table, TABLE_AXES)
    return tables


def declare_stack(config: ModelConfig, recipe: Recipe, depth: Depth, stack: str, key: jax.Array) -> dict[str, Any]:
    """Declares the parameters of a stack's layers, [L, ...] each. Layer l depends only on (key, l)."""
    # Flax finds a module's parameters by running it, here on one token.
    x, layers = jnp.zeros((1, 1, config.width), config.carry_dtype), getattr(depth, stack)
    kind = KINDS[recipe.stream]
    stream, first = kind.start(x, layers), jax.tree.map(lambda leaf: leaf[0], kind.by_layer(layers))
    stream = stream._replace(values=no_values(config, x))
    mask, one = jnp.ones((1, 1, 1), bool), jnp.ones(())
    layer = LayerInput(Coefficients(one, one, one, one > 0), first=one > 0, streams=first)
    inputs = (layer, *((mask,) if stack == "encoder" else (x, mask, mask)))
    block = make_block(config, recipe, stack)

    def one_layer(layer_key: jax.Array) -> dict[str, Any]:
        return block.init(layer_key, stream, *inputs)["params"]

    def stacked(leaf: Declared) -> Declared:
        leaf = leaf.add_axis(0, {})
        if leaf.gain is None:
            return leaf
        gain_L = jnp.asarray(by_layer(leaf.gain, depth, stack), jnp.float32)
        return leaf.replace_boxed(leaf.value * gain_L.reshape(-1, *(1,) * (leaf.value.ndim - 1)))

    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(layers))
    return map_declared(stacked, jax.vmap(one_layer)(keys))

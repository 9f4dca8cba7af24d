"""Initialisation of a Transformer's parameters, a tree:

    embedding/{shared | source, target[, output]}   [V, D]
    embedding/bias                                   [V], of the logits, with model.output_bias
    encoder/{self/{q,k,v,o}, ffn/{fc1,fc2}, ...}     [L, ...] per leaf: axis 0 is the layer
    decoder/{self, cross, ffn, ...}                  [L, ...]
    {encoder,decoder}_norm                           [D], if the method ends its stacks with a norm
    {encoder,decoder}_{embedding_norm,combination}   of a few methods

The recipe multiplies the base distribution of matrices by a gain, and learned weights by their initial value.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.model.blocks import LayerInput, Stream, make_block
from branchnorm_jax.model.coefficients import Coefficients, by_layer
from branchnorm_jax.model.combination import init_combination
from branchnorm_jax.model.embedding import init_table
from branchnorm_jax.model.norms import final_kind, init_norm
from branchnorm_jax.model.recipe import ONE, STACKS, Depth, Recipe, Rule
from branchnorm_jax.options import ModelConfig

Params = dict[str, Any]


def init_parameters(
    config: ModelConfig, recipe: Recipe, source_vocab: int, target_vocab: int, key: jax.Array
) -> Params:
    """Fresh float32 parameters; layer l of a stack depends on (key, stack, l) alone."""
    tables = {
        "all": {"shared": source_vocab},
        "decoder": {"source": source_vocab, "target": target_vocab},
        "none": {"source": source_vocab, "target": target_vocab, "output": target_vocab},
    }[config.shared_embeddings]
    embedding_key, *stack_keys = (jax.random.fold_in(key, index) for index in range(3))
    depth = Depth(config.encoder_layers, config.decoder_layers)
    params: Params = {"embedding": {}}
    for index, (name, rows) in enumerate(tables.items()):
        table = init_table(jax.random.fold_in(embedding_key, index), rows, config.width, config.embedding)
        gain = recipe.gain.get(f"embedding/{name}", ONE)(depth)
        params["embedding"][name] = table * (gain.encoder if name in ("source", "shared") else gain.decoder)
    if config.output_bias:
        params["embedding"]["bias"] = jnp.zeros(target_vocab)
    for stack, stack_key, layers in zip(STACKS, stack_keys, depth, strict=True):
        params[stack] = init_stack(config, recipe, depth, stack, stack_key)
        if recipe.embedding_norm:
            params[f"{stack}_embedding_norm"] = init_norm(config.norm, config.width)
        if recipe.combines:
            params[f"{stack}_combination"] = init_combination(layers, config.width, config.norm)
        if recipe.final == "norm":
            params[f"{stack}_norm"] = init_norm(final_kind(config.norm, stack), config.width)
        elif recipe.final == "shift":
            scale = {"scale": jnp.ones(())} if stack == "encoder" else {}
            params[f"{stack}_norm"] = {"shift": jnp.zeros(())} | scale
    return params


def init_stack(config: ModelConfig, recipe: Recipe, depth: Depth, stack: str, key: jax.Array) -> Params:
    """The parameters of a stack's layers, [L, ...] each."""
    stream = Stream(jnp.zeros((1, 1, config.width), config.carry_dtype))
    mask, one = jnp.ones((1, 1, 1), bool), jnp.ones(())
    layer = LayerInput(Coefficients(one, one, one, one > 0))
    inputs = (layer, *((mask,) if stack == "encoder" else (stream.x, mask, mask)))
    block = make_block(config, recipe, stack)

    def init_layer(layer_key: jax.Array) -> Params:
        return block.init(layer_key, stream, *inputs)["params"]

    def scaled(path: Any, leaf: jax.Array) -> jax.Array:
        rule = start_rule(recipe, [entry.key for entry in path])
        if rule is None:
            return leaf
        factors_L = jnp.asarray(by_layer(rule, depth, stack), jnp.float32)
        return leaf * factors_L.reshape(-1, *(1,) * (leaf.ndim - 1))

    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(getattr(depth, stack)))
    return jax.tree_util.tree_map_with_path(scaled, jax.vmap(init_layer)(keys))


def start_rule(recipe: Recipe, names: list[str]) -> Rule | None:
    """What the leaf of a stack at this path is multiplied by at the start; None: nothing."""
    sublayer, matrix = names[0], names[1] if len(names) > 1 else ""
    if sublayer.endswith("skip"):
        return recipe.skip.start
    if sublayer.endswith("branch"):
        return recipe.branch.start
    if names[-1] not in ("kernel", "bias"):
        return None
    return recipe.gain.get(f"{sublayer}/{matrix}", recipe.gain.get("fc1" if matrix == "gate" else matrix))

"""Incremental decoding: one decoder step for the current token of each hypothesis, with a cache of keys and values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from branchnorm_jax.model import relative
from branchnorm_jax.model.attention import BITS, Attention, KVCache
from branchnorm_jax.model.cache import Cache, Caches, empty, to_cache, write_prompts, write_tokens
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.segments import target_segments
from branchnorm_jax.model.stack import depth_of, unstack
from branchnorm_jax.model.taps import Taps
from branchnorm_jax.model.transformer import Transformer


class CurrentTokens(NamedTuple):
    """The current token of each of the Q hypotheses of each sentence.

    The hypotheses of a sentence share its cache slots, so no keys or values move when a hypothesis branches.
    """

    ids_BQ: jax.Array
    """Token ids."""
    positions_B1P: jax.Array
    """Rows of `Transformer.positions`."""
    seen_BQN: jax.Array
    """True at the slots that hold the earlier tokens of each hypothesis."""
    slot: jax.Array
    """The current tokens are written to Q consecutive slots, starting here.

    The slots are a ring: each step writes the Q slots after those of the step before."""


def unstack_decoder(model: Transformer, params: Params) -> Params:
    """Returns parameters for `start_cache` and `step` in which the decoder layers are a list.

    The caches are then also a list. Steps are faster (see `stack.unstack`), but compile time grows with the depth of
    the decoder. The decoder of methods that combine layers stays stacked.
    """
    if model.recipe.combines:
        return params
    stacked = params["decoder"]
    # One program for all layers would take longer to compile, and slicing leaf by leaf longer to run.
    return params | {"decoder": [_layer(stacked, jnp.int32(index)) for index in range(depth_of(stacked))]}


@jax.jit
def _layer(stacked: Params, index: jax.Array) -> Params:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def start_cache(model: Transformer, params: Params, memory_BSD: jax.Array, slots: int) -> Caches:
    """Returns a cache with `slots` empty slots for each sentence, and with the keys and values of the source.

    In a decoder-only model, only the number of rows of `memory_BSD` matters.

    In a loop over layers with bfloat16 matrices, a cache of float32 numbers would take more time than the products, so
    it holds bfloat16 numbers.
    """
    layers, dtype = params["decoder"], jnp.dtype(model.config.dtype)
    if not isinstance(layers, list) and layers["self"]["k"]["kernel"].dtype.itemsize < dtype.itemsize:
        dtype = BITS
    empty_slots = empty(model.config, dtype, len(memory_BSD), slots)
    attention = Attention(model.config, model.recipe, name="cross")

    def cross(layer: Params) -> KVCache | None:
        if "cross" not in layer:
            return None
        keys_values: Any = attention.apply({"params": layer["cross"]}, memory_BSD, method="keys_values")
        return to_cache(keys_values, dtype)

    if isinstance(layers, list):
        return [Cache(own, cross(layer)) for own, layer in zip(unstack(empty_slots), layers, strict=True)]
    return Cache(empty_slots, jax.vmap(cross)(layers))


def empty_caches(model: Transformer, params: Params, rows: int, source: int, slots: int) -> Caches:
    """Returns the caches of `start_cache`, with zeros instead of the keys and values of `source` source tokens."""
    memory = jax.ShapeDtypeStruct((rows, source, model.config.width), model.config.carry_dtype)
    shapes = jax.eval_shape(lambda params, memory: start_cache(model, params, memory, slots), params, memory)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def prefill(
    model: Transformer, params: Params, caches: Caches, inputs_BP: jax.Array, hypotheses: int, alpha: Alpha | jax.Array
) -> Caches:
    """Returns the caches of a decoder-only model as P steps with one hypothesis per row would leave them.

    One pass of the model computes them.

    Args:
      model: the model.
      params: its parameters, or the result of `unstack_decoder`.
      caches: empty caches. The last P steps of their rings are filled.
      inputs_BP: the inputs of the steps: EOS and tokens, padded on the left.
      hypotheses: number of slots of each step.
      alpha: alpha_t.
    """
    taps = Taps(record="cache")
    _, new = model.run_tokens(params, "decoder", inputs_BP, target_segments(inputs_BP), None, alpha, taps=taps)
    return write_prompts(caches, new, hypotheses)


def step(
    model: Transformer,
    params: Params,
    caches: Caches,
    source_mask_B1S: jax.Array | None,
    current: CurrentTokens,
    alpha: Alpha | jax.Array,
) -> tuple[jax.Array, Caches]:
    """Runs one decoder step. Returns the logits [B, Q, V] of the next tokens, and the updated caches.

    Args:
      model: the model.
      params: its parameters, or the result of `unstack_decoder`.
      caches: the caches of `start_cache` or of the previous step.
      source_mask_B1S: True at real source tokens; None in a decoder-only model.
      current: the current tokens.
      alpha: alpha_t.
    """
    x_BQD = model.embed_tokens(params, "decoder", current.ids_BQ, current.positions_B1P)
    bias = None
    if model.config.positions == "relative":
        sizes = current.seen_BQN.shape[-1], current.ids_BQ.shape[1]
        bias = relative.cached_bias(model.config, params[relative.table_name("decoder")], *sizes, current.slot)
    rotation = current.positions_B1P if model.config.positions == "rotary" else None

    def arguments(layer_cache: Cache) -> tuple[Any, ...]:
        return None, current.seen_BQN, source_mask_B1S, relative.Relative(bias, rotation), layer_cache

    inputs = model.layer_inputs("decoder", alpha)
    x_BQD, new = model.run_layers(params, "decoder", x_BQD, inputs, arguments, caches)
    slot = _ready_after(x_BQD, current.slot)
    return model.logits(params, x_BQD), write_tokens(caches, new, slot)


def _ready_after(x: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns `slot` with an artificial dependency on `x`.

    XLA then writes the caches after all layers have read them. Without the dependency it copies every cache of
    unstacked layers twice at each step.
    """
    return jnp.minimum(slot, slot + (x[0, 0, 0] > 0))

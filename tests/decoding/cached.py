"""Decodes token by token with a cache; the logits must equal those of teacher forcing."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from branchnorm_jax.model.incremental import CurrentTokens, start_cache, step
from branchnorm_jax.model.segments import source_mask
from branchnorm_jax.model.transformer import Transformer


@functools.partial(jax.jit, static_argnums=(0, 5))
def cached_logits(
    model: Transformer, params: Any, source_BS: jax.Array, inputs_BT: jax.Array, alpha: Any, hypotheses: int = 1
) -> jax.Array:
    """Returns the logits [B, Q, T, V] of Q equal hypotheses, each of which attends to its own slots."""
    batch, length = inputs_BT.shape
    seq2seq = "encoder" in model.config.stacks
    memory = model.encode(params, source_BS, alpha) if seq2seq else jnp.zeros((batch, 0, model.config.width))
    table = model.positions(params, "decoder", length)
    slot, own = jnp.arange(length * hypotheses), jnp.arange(hypotheses)[:, None]

    def one(cache: Any, position: jax.Array) -> tuple[Any, jax.Array]:
        tokens = jnp.repeat(inputs_BT[:, position, None], hypotheses, axis=1)
        seen = (slot // hypotheses < position) & (slot % hypotheses == own)
        logits, cache = step(
            model,
            params,
            cache,
            source_mask(source_BS) if seq2seq else None,
            CurrentTokens(
                tokens,
                jnp.broadcast_to(table[position], (batch, 1, table.shape[1])),
                jnp.broadcast_to(seen, (batch, *seen.shape)),
                position * hypotheses,
            ),
            alpha,
        )
        return cache, logits

    start = start_cache(model, params, memory, length * hypotheses)
    return jnp.moveaxis(jax.lax.scan(one, start, jnp.arange(length))[1], 0, 2)

"""Token embeddings and positions."""

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.model.dropout import dropped
from branchnorm_jax.tokens import PAD, UNK

TABLE_AXES = ("vocab", "embed")
"""Logical names of the axes of an embedding table; see `axes.RULES`."""


def sinusoids(length: int, width: int, layout: str = "marian") -> np.ndarray:
    """Returns the table of sinusoidal positions, concat[sin(p f_j), cos(p f_j)] over j < width/2.

    Args:
      length: rows.
      width: columns, even.
      layout: "marian": f_j = 10000^(-2j/width), rows are positions 0, 1, ... (Hugging Face's Marian computes the same
        table, so nothing needs to be exported); "tensor2tensor": f_j = 10000^(-j/(width/2 - 1)) (Marian itself
        computes this table, too); "fairseq": the same, but the first token has position 2 (fairseq's padding id
        plus one).

    Returns:
      float32 [length, width].
    """
    half = width // 2
    j = np.arange(half, dtype=np.float64)
    if layout == "marian":
        frequencies, first = 10000 ** (-2 * j / width), 0
    elif layout in ("tensor2tensor", "fairseq"):
        frequencies, first = 10000 ** (-j / max(half - 1, 1)), 2 if layout == "fairseq" else 0
    else:
        raise ValueError(f"unknown layout {layout!r}")
    angles = np.arange(first, first + length, dtype=np.float64)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def draw_table(key: jax.Array, rows: int, width: int, kind: str = "standard", starts: bool = False) -> jax.Array:
    """Draws an embedding table, float32 [rows, width].

    "standard": N(0, std = width^-1/2), with zeros in the row of PAD, unless PAD `starts` the decoder's input: while
    alpha is 0, that input would be 0 after every layer, where the gradient of a norm is eps^-1/2. "fixnorm":
    U(-0.01, 0.01).
    """
    if kind == "fixnorm":
        return jax.random.uniform(key, (rows, width), jnp.float32, -0.01, 0.01)
    table = width**-0.5 * jax.random.normal(key, (rows, width), jnp.float32)
    return table if starts else table.at[PAD].set(0.0)


def draw_positions(key: jax.Array, rows: int, width: int) -> jax.Array:
    """Draws a table of learned positions from N(0, std = width^-1/2), as fairseq does: float32 [rows, width]."""
    return width**-0.5 * jax.random.normal(key, (rows, width), jnp.float32)


def fix_norm(table_VD: jax.Array) -> jax.Array:
    """Applies FixNorm: divides every row w by max(|w|, 1e-12) (Nguyen and Salazar, 2019)."""
    squares = jnp.square(table_VD).sum(-1, keepdims=True)
    return table_VD * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


STARTS = {"pad": PAD, "unk": UNK}
"""`model.decoder_start` -> the token that replaces EOS in the decoder's input."""


def drop_words(tokens_BT: jax.Array, rate: float, key: jax.Array | None, tags: int = 0) -> jax.Array:
    """Applies word dropout: each word becomes UNK with probability `rate`. Does nothing if `key` is None.

    PAD, EOS and language tags are never dropped, because only the tag selects the target language. `tags` is the number
    of language tags; their ids follow UNK.
    """
    if key is None or rate == 0.0:
        return tokens_BT
    return jnp.where(dropped(rate, tokens_BT.shape, key) & (tokens_BT > UNK + tags), UNK, tokens_BT)


def embed(tokens_BT: jax.Array, table_VD: jax.Array, positions: jax.Array) -> jax.Array:
    """sqrt(D) E[token] + position, float32 [B, T, D]; positions [T, D] or [B, T, D]."""
    return table_VD[tokens_BT] * table_VD.shape[1] ** 0.5 + positions

"""Token embeddings and sinusoidal positions."""

import jax
import jax.numpy as jnp
import numpy as np

from branchnorm_jax.config import PAD


def sinusoids(length: int, width: int, layout: str = "marian") -> np.ndarray:
    """The table of sinusoidal positions, concat[sin(p f_j), cos(p f_j)] over j < width/2.

    Args:
      length: rows.
      width: columns, even.
      layout: "marian": f_j = 10000^(-2j/width), rows are positions 0, 1, ... (Hugging Face's Marian computes the same
        table, so nothing needs to be exported); "fairseq": f_j = 10000^(-j/(width/2 - 1)), the first token has
        position 2 (fairseq's padding id plus one).

    Returns:
      float32 [length, width].
    """
    half = width // 2
    j = np.arange(half, dtype=np.float64)
    if layout == "marian":
        frequencies, first = 10000 ** (-2 * j / width), 0
    elif layout == "fairseq":
        frequencies, first = 10000 ** (-j / max(half - 1, 1)), 2
    else:
        raise ValueError(f"unknown layout {layout!r}")
    angles = np.arange(first, first + length, dtype=np.float64)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def init_table(key: jax.Array, rows: int, width: int) -> jax.Array:
    """N(0, std = width^-1/2), the row of padding zero: float32 [rows, width]."""
    return (width**-0.5 * jax.random.normal(key, (rows, width), jnp.float32)).at[PAD].set(0.0)


def embed(tokens_BT: jax.Array, table_VD: jax.Array, positions_TD: jax.Array) -> jax.Array:
    """sqrt(D) E[token] + position, float32 [B, T, D]."""
    return table_VD[tokens_BT] * table_VD.shape[1] ** 0.5 + positions_TD

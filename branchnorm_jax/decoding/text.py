"""Loss of a language model on a text, with a sliding context."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import DataConfig
from branchnorm_jax.tokens import EOS, PAD

_SHORTEST = 16
"""Smallest row length. Longer ones are powers of two, so there are few programs."""


class Windows(NamedTuple):
    """Parts of a text that a model reads at once, int64 [windows] each.

    Window w reads the tokens begin[w] to end[w] - 1 and predicts the token after each of those from first[w] on.
    """

    begin: np.ndarray
    first: np.ndarray
    end: np.ndarray


def windows(starts: np.ndarray, context: int, stride: int) -> Windows:
    """Returns windows that predict every token of a text once.

    No window crosses the border of a document. The first window of a document predicts all of its tokens. Every later
    one has `context` tokens and predicts those that no earlier window predicted: `stride` tokens, or fewer at the end.

    Args:
      starts: `TextStore.starts`.
      context: longest window.
      stride: number of tokens to predict, at most `context`.

    >>> windows(np.array([0, 7, 9]), context=4, stride=2)
    Windows(begin=array([0, 2, 3, 7]), first=array([0, 4, 6, 7]), end=array([4, 6, 7, 9]))
    """
    sizes = np.diff(starts)
    counts = 1 + np.maximum(0, -(-(sizes - context) // stride))
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start, stop = np.repeat(starts[:-1], counts), np.repeat(starts[1:], counts)
    end = np.minimum(start + context + index * stride, stop)
    first = np.where(index == 0, start, start + context + (index - 1) * stride)
    return Windows(np.maximum(start, end - context), first, end)


def token_nll(
    model: Transformer,
    params: Params,
    alpha: Alpha,
    tokens: np.ndarray,
    chosen: Windows,
    data: DataConfig,
    batch_tokens: int,
    progress: Callable[[int], Any] = lambda count: None,
) -> np.ndarray:
    """Returns the nll of every token of a text but the first, in nats: float32 [n - 1].

    With `data.rows=packed`, EOS takes the place of the first token of each window, because each part of a long document
    begins with it in training.

    Args:
      model: a language model.
      params: its parameters.
      alpha: alpha_t.
      tokens: the text, int [n]; see `TextStore`.
      chosen: the windows.
      data: has `context`, the length of the longest possible window, and `rows`.
      batch_tokens: number of tokens of a batch.
      progress: called with the number of windows of each finished batch.
    """
    out = np.zeros(len(tokens) - 1, np.float32)
    for group, length in _batches(chosen, data.context, batch_tokens):
        begin, first, end = (values[group][:, None] for values in chosen)
        rows = max(1, batch_tokens // length)
        places = begin + np.arange(length)
        real = places < end
        filler = ((0, rows - len(group)), (0, 0))
        inputs, targets = (
            np.pad(np.where(real, tokens[np.minimum(places + shift, len(out))], PAD), filler) for shift in (0, 1)
        )
        if data.rows == "packed":
            inputs[:, 0] = EOS
        values = np.asarray(_nll(model, params, alpha, inputs.astype(np.int32), targets.astype(np.int32)))[: len(group)]
        predicted = real & (places >= first)
        out[places[predicted]] = values[predicted]
        progress(len(group))
    return out


@functools.partial(jax.jit, static_argnums=0)
def _nll(model: Transformer, params: Params, alpha: Alpha, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    x_BTD, _ = model.teacher_forced(params, inputs, targets, alpha)
    output = model.output(params)
    return output.nll(output.logits(x_BTD), targets)[0]


def _batches(chosen: Windows, context: int, batch_tokens: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the windows of each batch, and the row length."""
    sizes = chosen.end - chosen.begin
    powers = np.maximum(_SHORTEST, 1 << np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64))
    lengths = np.minimum(powers, max(context, _SHORTEST))
    for length in np.unique(lengths).tolist():
        group, rows = np.flatnonzero(lengths == length), max(1, batch_tokens // length)
        yield from ((group[start : start + rows], length) for start in range(0, len(group), rows))

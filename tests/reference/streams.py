"""Stacks with several residual streams in NumPy, one sub-layer after the other, as their papers print them.

See `tests/reference/transformer.py` for types and conventions.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

BLOCKS = 8
"""Blocks of block attention residuals."""

Params = dict[str, Any]
Branch = Callable[[np.ndarray], np.ndarray]
Layers = Iterator[tuple[int, str, Branch, Params]]
"""The sub-layers in order: layer, counted from 1; self, cross or ffn; the branch F; parameters of the layer."""


def unscaled_rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def siamese_norm(x: np.ndarray, layers: Layers, norm: Any, ends: Params, count: int, sublayers: int) -> np.ndarray:
    y = x
    for l, sub, F, p in layers:
        x = norm(x, p[f"{sub}_streams"].get("x_norm", {}))
        z = norm(x + norm(y, p[f"{sub}_streams"].get("y_norm", {})), p[f"{sub}_pre_norm"])
        h = F(z)
        x, y = x + h / np.sqrt(sublayers // count * l), y + h
    return norm(x, ends["x_norm"]) + norm(y, ends["y_norm"])


def mhc(x: np.ndarray, layers: Layers, norm: Any, ends: Params, count: int, sublayers: int) -> np.ndarray:
    X = [x] * 4
    for _, sub, F, p in layers:
        own = p[f"{sub}_streams"]
        r = unscaled_rms(np.concatenate(X, -1))
        columns = {"pre": slice(0, 4), "post": slice(4, 8), "res": slice(8, 24)}
        logits = {
            name: own["scale"][index] * (r @ own["mapping"][:, at]) + own["bias"][at]
            for index, (name, at) in enumerate(columns.items())
        }
        pre, post = sigmoid(logits["pre"]), 2 * sigmoid(logits["post"])
        R = np.exp(logits["res"].reshape(*x.shape[:-1], 4, 4))
        for _ in range(20):
            R = R / R.sum(-2, keepdims=True)
            R = R / R.sum(-1, keepdims=True)
        h = F(norm(sum(pre[..., i, None] * X[i] for i in range(4)), p[f"{sub}_pre_norm"]))
        X = [sum(R[..., i, j, None] * X[j] for j in range(4)) + post[..., i, None] * h for i in range(4)]
    return np.sum(X, axis=0)


def block_attnres(x: np.ndarray, layers: Layers, norm: Any, ends: Params, count: int, sublayers: int) -> np.ndarray:
    total = min(BLOCKS, count)
    starts = {1 + math.ceil(count * block / total) for block in range(total)}
    blocks: list[np.ndarray] = []
    partial = x

    def attend(w: np.ndarray) -> np.ndarray:
        values = [*blocks, partial]
        e = [np.exp(unscaled_rms(v) @ w)[..., None] for v in values]
        return sum(weight * v for weight, v in zip(e, values, strict=True)) / sum(e)

    for l, sub, F, p in layers:
        u = attend(p[f"{sub}_streams"]["query"])
        if sub == "self" and l in starts:
            blocks, partial = [*blocks, partial], np.zeros_like(partial)
        partial = partial + F(norm(u, p[f"{sub}_pre_norm"]))
    return attend(ends["query"])


STREAMS: dict[str, Callable[..., np.ndarray]] = {
    "siamese_norm": siamese_norm,
    "mhc": mhc,
    "block_attnres": block_attnres,
}

"""Logical axis names of every parameter: the one table that sharding needs to know about the model."""

from typing import Any

import jax

KERNEL_AXES: dict[str, tuple[str, str]] = {
    "q": ("embed", "heads"),
    "k": ("embed", "heads"),
    "v": ("embed", "heads"),
    "o": ("heads", "embed"),
    "fc1": ("embed", "ffn"),
    "gate": ("embed", "ffn"),
    "fc2": ("ffn", "embed"),
}


VECTOR_AXES: dict[tuple[str, ...], str] = {("ffn", "inner_norm"): "ffn", ("self", "inner_norm"): "heads"}


def logical_axes(params: Any) -> Any:
    """The tree of `params` with each leaf replaced by a tuple of axis names, one per dimension.

    Names: layers, embed (model width), heads (heads x head width), ffn, vocab. What is neither a matrix, its bias, nor
    a norm within a sub-layer is small, and whole on every device.
    """

    def axes(path: tuple[Any, ...], leaf: Any) -> tuple[str, ...]:
        names = [entry.key for entry in path]
        if names[0] == "embedding":
            return ("vocab", "embed")[: leaf.ndim]
        stacked = names[0] in ("encoder", "decoder")
        if stacked and names[-2] in KERNEL_AXES:
            pair = KERNEL_AXES[names[-2]]
            return ("layers", *(pair if names[-1] == "kernel" else pair[1:]))
        vector = VECTOR_AXES.get(tuple(names[1:3]), "embed")
        return ("layers", *(vector,) * (leaf.ndim - 1)) if stacked else ("embed",) * leaf.ndim

    return jax.tree_util.tree_map_with_path(axes, params)

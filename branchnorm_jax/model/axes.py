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


def logical_axes(params: Any) -> Any:
    """The tree of `params` with each leaf replaced by a tuple of axis names, one per dimension.

    Names: layers, embed (model width), heads (heads x head width), ffn, vocab.
    """

    def axes(path: tuple[Any, ...], leaf: Any) -> tuple[str, ...]:
        names = [entry.key for entry in path]
        if names[0] == "embedding":
            return ("vocab", "embed")
        stacked = ("layers",) if names[0] in ("encoder", "decoder") else ()
        pair = KERNEL_AXES.get(names[-2], ("embed", "embed"))
        return (*stacked, *(pair if names[-1] == "kernel" else pair[1:]))

    return jax.tree_util.tree_map_with_path(axes, params)

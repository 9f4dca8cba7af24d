"""Declarations of parameters: each parameter is declared once, where a module creates it.

Shapes, parameter counts, shardings, optimiser states and checkpoints are maps over the tree of these declarations.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax

from branchnorm_jax.model.recipe import Rule


class Declared(flax.struct.PyTreeNode, nn.meta.AxisMetadata[jax.Array]):
    """The initial value of a parameter, with its metadata. Flax passes on the value alone when a module uses it.

    Attributes:
      value: the initial value before `gain`, float32.
      axes: the logical name of each axis, which `parallel/mesh.py` maps to mesh axes: layers, embed (model width),
        heads (heads x head width), ffn, vocab.
      gain: rule of depth that multiplies the initial value in each layer of a stack; None: nothing does.
    """

    value: Any
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False)
    gain: Rule | None = flax.struct.field(pytree_node=False, default=None)

    def unbox(self) -> Any:
        """The value alone."""
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        """The same declaration of another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Declared":
        """Names a new axis "layers"."""
        return self.replace(axes=(*self.axes[:index], "layers", *self.axes[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Declared":
        """Reverses `add_axis`."""
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))


def declared(draw: Callable[..., jax.Array], *axes: str, gain: Rule | None = None) -> Callable[..., Any]:
    """An initialiser for `nn.Module.param` that declares what `draw` returns; arguments as those of `Declared`.

    The type of its result is Any, because `param` returns the value alone.
    """
    return lambda *args: Declared(draw(*args), axes, gain)


map_declared = functools.partial(jax.tree.map, is_leaf=lambda node: isinstance(node, Declared))
"""`jax.tree.map` over a tree of declarations."""

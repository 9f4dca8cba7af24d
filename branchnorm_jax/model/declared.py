"""Declarations of parameters: each parameter is declared once, where a module creates it.

Shapes, parameter counts, shardings, optimiser states and checkpoints are derived from the tree of these declarations.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax

from branchnorm_jax.model.recipe import Rule


class Declared(flax.struct.PyTreeNode, nn.meta.AxisMetadata[jax.Array]):
    """The initial value of a parameter, with metadata. Flax unboxes the value when a module uses the parameter.

    Attributes:
      value: the initial value before `gain`, float32.
      axes: the logical name of each axis, which `axes.RULES` maps to a mesh axis: layers, embed (model width),
        heads (heads x head width), ffn, vocab, streams.
      gain: rule for a factor on the initial value in each layer of a stack; None means no factor.
    """

    value: Any
    axes: tuple[str, ...] = flax.struct.field(pytree_node=False)
    gain: Rule | None = flax.struct.field(pytree_node=False, default=None)

    def unbox(self) -> Any:
        """Returns the value without metadata."""
        return self.value

    def replace_boxed(self, val: Any) -> Any:
        """Returns the same declaration with another value."""
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "Declared":
        """Inserts the axis name "layers" at `index`."""
        return self.replace(axes=(*self.axes[:index], "layers", *self.axes[index:]))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "Declared":
        """Reverses `add_axis`."""
        return self.replace(axes=(*self.axes[:index], *self.axes[index + 1 :]))


def declared(draw: Callable[..., jax.Array], *axes: str, gain: Rule | None = None) -> Callable[..., Any]:
    """Returns an initialiser for `nn.Module.param` that declares the result of `draw`.

    The other arguments are as in `Declared`. The return type is Any, because `param` returns the unboxed value.
    """
    return lambda *args: Declared(draw(*args), axes, gain)


map_declared = functools.partial(jax.tree.map, is_leaf=lambda node: isinstance(node, Declared))
"""`jax.tree.map` over a tree of declarations."""

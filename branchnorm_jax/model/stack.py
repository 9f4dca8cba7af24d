"""Depth: the same layer applied L times to stacked parameters, as a loop or as one scan."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Carry = Any
PerLayer = Any


def run_stack(
    layer: Callable[[Carry, PerLayer], tuple[Carry, PerLayer]],
    carry: Carry,
    per_layer: PerLayer,
    *,
    scan: bool,
    remat: bool,
) -> tuple[Carry, PerLayer]:
    """carry, out_l = layer(carry, per_layer_l) for l = 0 .. L-1.

    Args:
      layer: a pure function.
      carry: input of the first layer; its types and shapes stay the same.
      per_layer: tree of [L, ...] leaves: parameters, coefficients, keys, caches.
      scan: one `lax.scan`, whose compile time does not depend on L; otherwise a Python loop, which XLA can optimise
        across layers and which takes the longer to compile the deeper the stack.
      remat: keep only the carries for the backward pass and compute each layer again there.

    Returns:
      The last carry, and the outputs stacked to [L, ...] leaves. The two ways share parameters, dropout masks and, up
      to rounding, every number.
    """
    if remat:
        # Under a scan the loop itself keeps XLA from merging the two computations of a layer.
        layer = jax.checkpoint(layer, prevent_cse=not scan)
    if scan:
        return jax.lax.scan(layer, carry, per_layer)
    outputs = []
    depth = jax.tree.leaves(per_layer)[0].shape[0]
    for index in range(depth):
        carry, output = layer(carry, jax.tree.map(lambda leaf, index=index: leaf[index], per_layer))
        outputs.append(output)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

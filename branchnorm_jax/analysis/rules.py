"""How XLA's compilers differ in the memory that a program needs.

The rules were read off the buffer assignments of the compilers for the programs of benchmarks/results/compilers.csv.
"""

from collections.abc import Callable
from typing import NamedTuple

Parts = Callable[[tuple[int, ...]], int]
"""A function from the shape of a value to the number of devices among which it is split."""


def whole(shape: tuple[int, ...]) -> int:
    """Splits no value."""
    del shape
    return 1


class Rules(NamedTuple):
    """What a compiler does with the values of a program. The defaults describe the CPU compiler."""

    merges: bool = False
    """Equal conversions and constants are computed once, and equal stacked results of a loop are stored once."""
    stacks_at_once: bool = False
    """A loop writes a stacked result to its slice at once, so that it keeps no copy until the end of the iteration."""
    carry_first: bool = False
    """The body of a loop first computes the next carry, and then what is only stacked, such as weight gradients."""
    fuses_operands: bool = False
    """Element-wise operations are fused into the matrix product that reads them."""
    keeps_constants: bool = True
    """Arrays filled with a constant are in memory. Otherwise, the kernels that read them compute them."""
    fuses_conversions: bool = False
    """A matrix product writes the narrower type to which its only reader converts its result, and kernels that read a
    wider type convert it themselves."""
    converts_stacks: bool = False
    """If a loop only reads a stacked input in a narrower type, the whole stack is converted before the loop."""
    norms_first: bool = False
    """With remat=nested and fsdp, all gradient norms are computed first, to sum them over the devices while other
    kernels run. The kernels that compute them write two arrays for each gradient: the terms that Adam adds to its two
    moments."""
    held: float = 0.8
    """Memory that is kept longer than `costs.peak` assumes, as a multiple of the size of the parameters.

    It holds gradients and optimiser steps of all layers, so it is not needed if the update is part of the backward
    pass. The value is a median over random runs on the CPU. The other compilers update each array in place.
    """
    parts: Parts = whole
    """How values are split among devices."""


RULES = {
    "cpu": Rules(),
    "gpu": Rules(
        merges=True,
        stacks_at_once=True,
        carry_first=True,
        fuses_conversions=True,
        held=0.0,
    ),
    "tpu": Rules(
        merges=True,
        stacks_at_once=True,
        fuses_operands=True,
        keeps_constants=False,
        converts_stacks=True,
        norms_first=True,
        held=0.0,
    ),
}
"""JAX platform -> rules of its compiler."""

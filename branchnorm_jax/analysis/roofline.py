"""Roofline of an optimised program: what each kernel reads, writes and multiplies, and the least time that this takes.

A kernel takes max(bytes / bandwidth, operations / rate, start) seconds. Bandwidth and rate are the shares of the peak
that good kernels reach. Nothing is measured: kernels do not overlap, and no cache holds what another kernel wrote. For
TPUs, the compiler's own estimate in cycles is better; `Kernel.cycles` has it.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from branchnorm_jax.analysis.devices import Device
from branchnorm_jax.analysis.program import (
    ALIASES,
    Computation,
    Executed,
    Instruction,
    Program,
    called,
    estimated_cycles,
    executed,
    matched,
)

BANDWIDTH_SHARE, MATRIX_SHARE, START = 0.85, 0.70, 2e-6
"""Fractions of a device's peak bandwidth and of its peak FLOP/s that kernels reach, and the least time of a kernel."""

FREE = (*ALIASES, "parameter", "constant", "iota", "partition-id", "replica-id")
"""Instructions that take no time, besides those that end an asynchronous one."""

SLICES = ("dynamic-slice", "slice", "gather")
"""Instructions that read only as much of their first operand as they return."""

FUSED = ("fusion", "fusion-start")
"""Instructions that run another computation as one kernel."""

SAME = ("bitcast", "reshape", "convert", "copy")
"""Instructions of a fused kernel that change only the type or the shape of their operand."""

ELEMENTWISE = (*SAME, "compare", "select", "maximum", "minimum", "add", "subtract", "multiply", "negate", "and", "or")
"""Instructions of a fused kernel that read only those elements of their operands that their own reader reads."""


class Kernel(NamedTuple):
    """One kernel of a program."""

    name: str
    """Name of its instruction."""
    op_name: str
    """The name that JAX gave to its last operation."""
    result: str
    """The largest array of its result."""
    loops: tuple[str, ...]
    """The loops around it, as in `program.Executed`."""
    times: int
    """How often a device runs it."""
    read: int
    """Bytes read by one run."""
    written: int
    """Bytes written by one run."""
    flops: int
    """Multiplications and additions of the matrix products of one run."""
    cycles: int
    """The TPU compiler's estimate of the clock cycles of one run; 0 without one."""
    pallas: bool
    """Whether Mosaic compiled the kernel for a TPU."""

    @property
    def traffic(self) -> int:
        """Bytes read and written by all runs."""
        return self.times * (self.read + self.written)

    def seconds(self, device: Device) -> float:
        """Returns the time of all runs: by the compiler's cycles for a TPU, and by the roofline for a GPU.

        The TPU compiler states no cycles for Pallas kernels, which count as long as their bytes take.
        """
        if device.clock:
            return self.times * (self.memory_seconds(device) if self.pallas else self.cycles / device.clock)
        return self.times * max(self.memory_seconds(device), self.matrix_seconds(device), START)

    def memory_seconds(self, device: Device) -> float:
        """Returns the time in which one run reads and writes."""
        return (self.read + self.written) / (BANDWIDTH_SHARE * device.bandwidth)

    def matrix_seconds(self, device: Device) -> float:
        """Returns the time in which one run multiplies, as if its products were in bfloat16."""
        return self.flops / (MATRIX_SHARE * device.matrix)


def kernels(program: Program) -> Iterator[Kernel]:
    """Yields the kernels of a program in the order of the text; all branches of a conditional count."""
    for found in executed(program):
        instruction = found.instruction
        op = instruction.op
        if found.kernel or op in FREE or op.endswith(("-done", "-update")) or op == "async-start":
            continue
        yield _kernel(program, found)


def _kernel(program: Program, found: Executed) -> Kernel:
    instruction, computation = found.instruction, found.computation
    return Kernel(
        name=instruction.name,
        op_name=instruction.op_name,
        result=str(max(instruction.result, key=lambda array: array.bytes)) if instruction.result else "",
        loops=found.loops,
        times=found.times,
        read=_read(program, instruction, computation),
        written=_written(program, instruction, computation),
        flops=_flops(program, instruction, computation),
        cycles=estimated_cycles(instruction),
        pallas="tpu_custom_call" in instruction.attributes,
    )


def _size(instruction: Instruction) -> int:
    return sum(array.padded_bytes for array in instruction.result)


def _read(program: Program, instruction: Instruction, computation: Computation) -> int:
    operands = [computation[name] for name in instruction.operands]
    if instruction.op in FUSED:
        inside = program.computations[called(instruction)]
        return sum(_read_by(program, inside, index, _size(operand)) for index, operand in enumerate(operands))
    if instruction.op in SLICES:
        return _size(instruction) + sum(map(_size, operands[1:]))
    # An update in place reads only the new values.
    return sum(map(_size, operands[1:] if instruction.op == "dynamic-update-slice" else operands))


def _read_by(program: Program, kernel: Computation, index: int, whole: int) -> int:
    """Returns the bytes that a fused kernel reads of its parameter `index`, which has `whole` bytes."""
    parameter = next(i.name for i in kernel.values() if i.op == "parameter" and int(i.inside) == index)
    used, names = 0, [parameter]
    for name in names:
        for reader in kernel.values():
            if name not in reader.operands:
                continue
            if reader.op in SLICES and reader.operands[0] == name:
                used += _size(reader)
            elif reader.op == "dynamic-update-slice" and reader.operands[0] == name:
                continue
            elif reader.op in ELEMENTWISE and not reader.root:
                if reader.name not in names:
                    names.append(reader.name)
            elif reader.op in FUSED:
                inside = program.computations[called(reader)]
                used += _read_by(program, inside, reader.operands.index(name), whole)
            elif reader.op != "tuple" or name != parameter:
                return whole
    return min(used, whole)


def _written(program: Program, instruction: Instruction, computation: Computation) -> int:
    if instruction.op in FUSED:
        inside = program.computations[called(instruction)]
        return _stored(inside, next(i for i in inside.values() if i.root))
    if instruction.op.endswith("-start"):
        # The result also names the operands.
        return max(array.padded_bytes for array in instruction.result)
    return _stored(computation, instruction)


def _stored(scope: Computation, result: Instruction) -> int:
    """Returns the bytes that a kernel writes for a result: those of the slice if it updates one in place."""
    if result.op == "tuple":
        return sum(_stored(scope, scope[name]) for name in result.operands)
    source = result
    while source.op in SAME and source.operands[0] in scope:
        source = scope[source.operands[0]]
    return _size(scope[source.operands[1]]) if source.op == "dynamic-update-slice" else _size(result)


def _flops(program: Program, instruction: Instruction, computation: Computation) -> int:
    if instruction.op in FUSED:
        inside = program.computations[called(instruction)]
        return sum(_flops(program, part, inside) for part in inside.values())
    if instruction.op == "dot":
        contracted = matched(instruction.attributes, r"lhs_contracting_dims=\{([\d,]*)\}")
    elif instruction.op == "custom-call" and "gemm" in instruction.attributes:
        contracted = matched(instruction.attributes, r'"lhs_contracting_dimensions":\[([^\]]*)\]').replace('"', "")
    else:
        return 0
    left, result = computation[instruction.operands[0]].result[0].shape, instruction.result[0].shape
    return 2 * math.prod(result) * math.prod(left[int(axis)] for axis in contracted.split(",") if axis)

"""Reads the optimised program of a compiler (HLO text): its instructions, how often each runs, and its largest arrays.

`executed` follows the calls and the loops: an instruction in a loop over 6 layers runs 6 times.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0}
"""Bits of an element, for the types whose name does not end in the number of bits."""

ALIASES = (
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "conditional",
    "call",
    "opt-barrier",
    "after-all",
    "domain",
)
"""Instructions whose result is in memory that another instruction owns."""

CALLS = ("call", "async-start")
"""Instructions that run another computation as it is, not as part of one kernel."""


class Array(NamedTuple):
    """Type of one array."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""
    """The text between the braces, for example "2,1,0:T(8,128)(2,1)S(1)"."""

    @property
    def bytes(self) -> int:
        """Number of bytes of the elements, without padding."""
        return _bytes(self.dtype, math.prod(self.shape))

    @property
    def padded_bytes(self) -> int:
        """Number of bytes in memory: tiles such as T(8,128) pad the innermost axes."""
        order, _, tiles = self.layout.partition(":")
        tile = re.search(r"T\(([\d,]+)\)", tiles)
        if tile is None or not self.shape:
            return self.bytes
        sizes = [self.shape[int(axis)] for axis in order.split(",")]
        for index, multiple in enumerate(map(int, tile[1].split(",")[::-1])):
            if index < len(sizes):
                sizes[index] = math.ceil(sizes[index] / multiple) * multiple
        return _bytes(self.dtype, math.prod(sizes))

    @property
    def in_main_memory(self) -> bool:
        """Whether the array is in the device's main memory, not in a TPU's vector memory or on the host."""
        space = re.search(r"S\((\d+)\)", self.layout)
        return space is None or space[1] == "0"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    result: tuple[Array, ...]
    """The arrays of the result, which is a tuple if it has several."""
    op: str
    inside: str
    """The text between the parentheses."""
    attributes: str
    """The text after the parentheses."""
    root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.inside)

    @property
    def op_name(self) -> str:
        """The name that JAX gave to the operation, with the path of functions that leads to it."""
        return matched(self.attributes, r'op_name="([^"]*)"').replace("\\'", "'")


Computation = dict[str, Instruction]


class Program(NamedTuple):
    """The text of a program, taken apart."""

    computations: dict[str, Computation]
    entry: str


class Executed(NamedTuple):
    """An instruction, and how often a device runs it."""

    instruction: Instruction
    computation: Computation
    times: int
    loops: tuple[str, ...]
    """Names of the loops around it, outermost first, each with its number of iterations: "while.3 x 6"."""
    kernel: str
    """Name of the fused kernel of which the instruction is a part, or "". The result of a part is not in memory."""


class Buffers(NamedTuple):
    """Arrays of one type in the device's main memory."""

    bytes: int
    """Size of one array, with padding."""
    number: int
    array: str
    argument: bool
    """Whether they are arguments of the program, such as parameters, or made by it."""
    name: str
    """Name of one of them: of the argument, or of the operation that makes it."""


def parse(text: str) -> Program:
    """Takes apart the text that `jax.stages.Compiled.as_text` returns."""
    computations: dict[str, Computation] = {}
    current, entry = "", ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith("HloModule"):
            current = head[2]
            computations[current] = {}
            entry = current if head[1] else entry
        elif match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.+)$", line):
            computations[current][match[2]] = _instruction(match[2], re.sub(r"/\*.*?\*/", "", match[3]), bool(match[1]))
    return Program(computations, entry)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    kind, rest = text[: (end := _closing(text) if text[0] == "(" else text.index(" "))], text[end:].lstrip()
    op = rest[: rest.index("(")]
    end = len(op) + _closing(rest[len(op) :])
    return Instruction(name, arrays(kind), op, rest[len(op) + 1 : end - 1], rest[end:], root)


def _closing(text: str) -> int:
    """Returns the position after the parenthesis that closes the first character."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return index + 1
    return len(text)


def arrays(kind: str) -> tuple[Array, ...]:
    """Returns the arrays of a type.

    >>> [str(array) for array in arrays("(f32[2,8]{1,0:T(8,128)}, (bf16[4], token[]))")]
    ['f32[2,8]', 'bf16[4]', 'token[]']
    """
    found = re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?", kind)
    return tuple(
        Array(dtype, tuple(int(size.strip("<=")) for size in shape.split(",") if size), layout)
        for dtype, shape, layout in found
    )


def _bytes(dtype: str, count: int) -> int:
    # f8e4m3fn and f4e2m1fn begin with their number of bits; bf16, s32 and c64 end with it.
    bits = BITS[dtype] if dtype in BITS else int(re.findall(r"\d+", dtype)[0])
    return -(-bits * count // 8)


def matched(text: str, pattern: str) -> str:
    """Returns the first group of a regular expression in a text, or "" if it does not match."""
    match = re.search(pattern, text)
    return match[1] if match else ""


def executed(program: Program) -> Iterator[Executed]:
    """Yields every instruction that a device runs, those of called computations and fused kernels included.

    It follows all branches of a conditional, although a device runs only one of them. A loop whose number of iterations
    is not known counts as one iteration; its entry in `Executed.loops` ends in "x ?".
    """
    yield from _executed(program, program.entry, 1, (), "")


def _executed(program: Program, name: str, times: int, loops: tuple[str, ...], kernel: str) -> Iterator[Executed]:
    computation = program.computations[name]
    for instruction in computation.values():
        yield Executed(instruction, computation, times, loops, kernel)
        attributes = instruction.attributes
        if instruction.op == "while":
            count = trip_count(program, instruction, computation)
            around = (*loops, f"{instruction.name} x {count or '?'}")
            yield from _executed(program, _body(instruction), times * (count or 1), around, kernel)
        elif instruction.op == "conditional":
            listed = matched(attributes, r"branch_computations=\{([^}]*)\}").replace("%", "")
            branches = [branch.strip() for branch in listed.split(",") if branch]
            branches = branches or re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", attributes)
            for branch in branches:
                yield from _executed(program, branch, times, loops, kernel)
        elif other := called(instruction):
            inside = kernel or ("" if instruction.op in CALLS else other)
            yield from _executed(program, other, times, loops, inside)


def trip_count(program: Program, loop: Instruction, computation: Computation) -> int | None:
    """Returns the number of iterations of a while loop, or None if it is not known.

    Most compilers note it in the backend's options of the loop. The TPU compiler does not. There the count follows from
    the condition `counter < constant`, if the counter starts at a constant and grows by a constant.
    """
    if known := matched(loop.attributes, r'known_trip_count"?[:=]\{"?n"?:"?(\d+)'):
        return int(known)
    condition = program.computations[matched(loop.attributes, r"condition=%?([\w.\-]+)")]
    compare, scope = _unfused(program, condition, _root(condition))
    if compare.op != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = scope[compare.operands[0]], _constant(scope, compare.operands[1])
    if counter.op != "get-tuple-element" or limit is None:
        return None
    index = int(matched(counter.attributes, r"index=(\d+)"))
    before, after = computation[loop.operands[0]], _root(body := program.computations[_body(loop)])
    if before.op != "tuple" or after.op != "tuple":
        return None
    start = _constant(computation, before.operands[index])
    add, scope = _unfused(program, body, _without_copies(body, after.operands[index]))
    steps = [value for name in add.operands if (value := _constant(scope, name)) is not None]
    if start is None or add.op != "add" or len(steps) != 1 or steps[0] < 1:
        return None
    return max(0, -(-(limit - start) // steps[0]))


def _body(loop: Instruction) -> str:
    return matched(loop.attributes, r"body=%?([\w.\-]+)")


def called(instruction: Instruction) -> str:
    """Returns the name of the computation that a call or a fused kernel runs, or ""."""
    return matched(instruction.attributes, r"(?:calls|to_apply)=%?([\w.\-]+)")


def _root(computation: Computation) -> Instruction:
    return next(instruction for instruction in computation.values() if instruction.root)


def _unfused(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Instruction, Mapping[str, Instruction]]:
    """Returns the last instruction of a fused kernel, and all instructions by name, as if they were not fused.

    Other instructions are returned as they are.
    """
    if instruction.op != "fusion":
        return instruction, computation
    fused = program.computations[called(instruction)]
    outside = {
        name: computation[instruction.operands[int(inner.inside)]]
        for name, inner in fused.items()
        if inner.op == "parameter"
    }
    return _root(fused), {**computation, **fused, **outside}


def _without_copies(scope: Mapping[str, Instruction], name: str) -> Instruction:
    instruction = scope[name]
    while instruction.op in ("copy", "bitcast", "convert"):
        instruction = scope[instruction.operands[0]]
    return instruction


def _constant(scope: Mapping[str, Instruction], name: str) -> int | None:
    """Returns the value of an integer constant."""
    instruction = _without_copies(scope, name)
    is_whole = instruction.op == "constant" and re.fullmatch(r"-?\d+", instruction.inside)
    return int(instruction.inside) if is_whole else None


def cycles(program: Program) -> int:
    """Returns the TPU compiler's estimate of the clock cycles of a run, without the time of the collectives.

    Kernels for which the compiler states no estimate count as 0, as do all programs for other devices.
    """
    found = executed(program)
    return sum(times * estimated_cycles(instruction) for instruction, _, times, _, kernel in found if not kernel)


def estimated_cycles(instruction: Instruction) -> int:
    """Returns the TPU compiler's estimate of the clock cycles of one run of a kernel, or 0 without one."""
    estimate = int(matched(instruction.attributes, r'"?estimated_cycles"?:"?(\d+)') or 0)
    # The largest number of 63 bits means unknown.
    return estimate if estimate < 2**62 else 0


def unknown_loops(program: Program) -> list[str]:
    """Returns the names of the loops whose number of iterations is not known. They count as one iteration."""
    loops = itertools.chain.from_iterable(instruction.loops for instruction in executed(program))
    return sorted({loop.removesuffix(" x ?") for loop in loops if loop.endswith(" x ?")})


def largest_buffers(program: Program, count: int) -> list[Buffers]:
    """Returns the `count` types of the largest arrays in the device's main memory.

    Results that are written in place (`dynamic-update-slice`) and names of parts of other arrays are left out. Not all
    arrays are alive at the same time, and the compiler may give the memory of one to another.
    """
    buffers: dict[tuple[int, str, bool], dict[tuple[str, int], str]] = {}
    for instruction, _, _, loops, kernel in executed(program):
        op = instruction.op
        argument = op == "parameter" and not loops and instruction.name in program.computations[program.entry]
        skipped = kernel or op in ALIASES or op.endswith(("-done", "-start")) or (op == "parameter" and not argument)
        if skipped or _in_place(program, instruction):
            continue
        for index, array in enumerate(instruction.result):
            if array.in_main_memory:
                same = buffers.setdefault((array.padded_bytes, str(array), argument), {})
                same[instruction.name, index] = instruction.op_name or instruction.name
    largest = sorted(buffers.items(), key=lambda item: -item[0][0])[:count]
    return [
        Buffers(size, len(same), array, argument, next(iter(same.values())))
        for (size, array, argument), same in largest
    ]


def _in_place(program: Program, instruction: Instruction) -> bool:
    """Returns whether an instruction updates a slice of an operand, also if this is the last step of a kernel."""
    results, scope = [instruction], program.computations.get(called(instruction), {})
    if instruction.op == "fusion":
        root = _root(scope)
        results = [scope[name] for name in root.operands] if root.op == "tuple" else [root]
    for result in results:
        while result.op == "bitcast" and result.operands[0] in scope:
            result = scope[result.operands[0]]
        if result.op == "dynamic-update-slice":
            return True
    return False

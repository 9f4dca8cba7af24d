"""Cost model of a function: operations, memory traffic and peak memory, without compiling or running it.

The model walks the function's jaxpr and imitates XLA:

- Element-wise operations are fused into the kernel that reads their results. A result takes memory only if a matrix
  product, a loop or several kernels read it, or if it is a result of the function.
- A kernel reuses the buffer of an operand of the same size that is not read again.
- `rules.Rules` describes what the compilers of CPUs, GPUs and TPUs do differently.
- A loop costs the operations and traffic of its body times the number of iterations, but the memory of its body once.
  A stack of 1000 layers is therefore analysed as fast as one of 6.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from branchnorm_jax.analysis.flat import CPU, LOOPS, Op, Program, flatten
from branchnorm_jax.analysis.rules import Rules


class Costs(NamedTuple):
    """Costs of one call."""

    flops: float = 0.0
    """Number of multiplications and additions in matrix products."""
    traffic: float = 0.0
    """Number of bytes read and written by kernels."""
    peak: float = 0.0
    """Peak size of live buffers in bytes. Includes donated arguments; other arguments belong to the caller."""


class Kernel(NamedTuple):
    """A group of fused operations."""

    reads: frozenset[int]
    writes: tuple[int, ...]
    workspace: float
    """Bytes of temporary memory needed in addition to operands and results."""
    in_place: bool
    """Whether a result may reuse the buffer of an operand."""


NONE: frozenset[int] = frozenset()

ALONE = (*LOOPS, "pallas_call", "dot_general", "gather", "scatter", "scatter-add", "sort", "top_k", "cumsum")
"""Primitives that are not fused with the operations that compute their operands."""

CONSTANT = ("broadcast_in_dim", "iota")
"""Primitives whose results, as operands of an element-wise operation, need no memory."""

NEED_TYPE = set(ALONE) - {"gather"}
"""Primitives whose kernels read an operand in its own type only."""

UPDATES = (*LOOPS, "scatter", "scatter-add", "dynamic_update_slice")
"""Primitives that write their results to the memory of their operands."""

RESULT_IN_MEMORY = (*ALONE, "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin")
"""Primitives that are not recomputed in the kernels that read their results."""


def trace(function: Callable[..., Any], *arguments: Any, donated: Sequence[int] = (), rules: Rules = CPU) -> Costs:
    """Estimates the costs of `function(*arguments)`.

    Args:
      function: a pure function.
      arguments: arrays, or `jax.ShapeDtypeStruct`s.
      donated: positions of the donated arguments, whose buffers the function may reuse.
      rules: what the compiler does. `Rules.parts` reduces sizes, but not the number of operations.
    """
    owned = [index in donated for index, tree in enumerate(arguments) for _ in jax.tree.leaves(tree)]
    return measure(jax.make_jaxpr(function)(*arguments), owned, rules=rules)


def measure(
    jaxpr: Any,
    owned: Sequence[bool] = (),
    wanted: Sequence[bool] | None = None,
    carried: slice = slice(0, 0),
    rules: Rules = CPU,
) -> Costs:
    """Estimates the costs of one run of a closed jaxpr.

    Args:
      jaxpr: a whole program, or the body of a loop.
      owned: for a whole program, whether each argument is donated.
      wanted: whether each result is needed; by default all are.
      carried: for a loop body, the range of carried arguments. Carried arguments that are updated slice by slice are
        updated in place and need no extra memory.
      rules: what the compiler does.
    """
    program = flatten(jaxpr, wanted, rules)
    if rules.fuses_conversions:
        program = without_conversions(program)
    donated = {value for value, is_owned in zip(program.arguments, owned, strict=False) if is_owned}
    kernels, result_buffers, flops, traffic = fuse(program, rules)
    # A loop body runs in traced order, which follows one layer. The whole program runs each kernel once it is ready.
    order = breadth_first(kernels) if owned else kernels
    count = carried.stop - carried.start
    carries = set(program.results[: count if wanted is None else sum(wanted[:count])])
    if carries and rules.carry_first:
        order = carry_first(kernels, carries, program.sizes)
    if carries and rules.stacks_at_once:
        result_buffers -= set(program.results) - carries
    sliced = {op.inputs[0] for op in program.ops if op.name == "dynamic_update_slice"}
    updated_in_place = sliced.intersection(program.arguments[carried])
    pinned = result_buffers | (set(program.arguments) - donated - updated_in_place)
    worst = peak(program, order, donated | updated_in_place, pinned) - sum(
        program.sizes[value] for value in updated_in_place
    )
    return Costs(flops, traffic, worst)


def without_conversions(program: Program) -> Program:
    """Removes the conversions that need no memory of their own, see `Rules.fuses_conversions`."""
    sizes, buffer = list(program.sizes), dict[int, int]()
    makers = {value: op for op in program.ops for value in op.outputs}
    readers: dict[int, list[str]] = {}
    for op in program.ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op.name)
    stored = {*program.results, *program.arguments}

    def from_product(value: int) -> list[int]:
        """Returns a product and the values up to `value`, each computed from the one before and read only for that."""
        if value not in makers or value in stored or len(readers[value]) > 1:
            return []
        op = makers[value]
        if op.name == "dot_general":
            return [value]
        operands = [v for v in op.inputs if sizes[v] == sizes[value] and v in makers and makers[v].name not in CONSTANT]
        before = from_product(operands[0]) if op.name not in NEED_TYPE and len(operands) == 1 else []
        return [*before, value] if before else []

    for op in program.ops:
        if op.name == "convert_element_type" and op.outputs[0] not in stored:
            (old,), (new,) = op.inputs, op.outputs
            if sizes[new] < sizes[old] and (chain := from_product(old)):
                sizes[chain[0]] = sizes[new]
                buffer |= dict.fromkeys([*chain[1:], new], chain[0])
            elif sizes[new] > sizes[old] and not NEED_TYPE.intersection(readers[new]):
                buffer[new] = buffer.get(old, old)
    ops = [
        op._replace(inputs=tuple(buffer.get(value, value) for value in op.inputs))
        for op in program.ops
        if not buffer.keys() & op.outputs
    ]
    return program._replace(ops=ops, sizes=sizes)


def fuse(program: Program, rules: Rules) -> tuple[list[Kernel], set[int], float, float]:
    """Fuses the operations of a program into kernels.

    Returns the kernels in traced order, the buffers of the results, and the total operations and traffic.
    """
    sizes, results = program.sizes, set(program.results)
    readers: dict[int, list[Op]] = {}
    for op in program.ops:
        for value in set(op.inputs):
            readers.setdefault(value, []).append(op)
    cheap = {value for op in program.ops if op.name in CONSTANT for value in op.outputs}
    # Buffers that each value is read from: its own buffer, or, if it is fused, those of its operands.
    sources = {value: frozenset([value]) for value in program.arguments}
    kernels: list[Kernel] = []
    flops = traffic = 0.0
    alone = tuple(name for name in ALONE if not (rules.fuses_operands and name == "dot_general"))
    for op in program.ops:
        reads = NONE.union(*(sources.get(value, NONE) for value in op.inputs))
        for value in op.outputs:
            uses = readers.get(value, [])
            operands = [v for v in set(op.inputs) if sizes[v] >= sizes[value] and v not in cheap]
            if value in cheap and not reads and value not in results and not rules.keeps_constants:
                sources[value] = NONE
                continue
            in_memory = (
                op.name in RESULT_IN_MEMORY
                or value in results
                or any(use.name in (alone if op.name not in RESULT_IN_MEMORY else ALONE) for use in uses)
                # Fusing the value into several readers would make each of them read all its operands.
                or (len(uses) > 1 and len(operands) > 1)
            )
            sources[value] = frozenset([value]) if in_memory else reads
        writes = tuple(value for value in op.outputs if value in sources[value])
        if writes:
            inner = _inside(op, rules)
            flops += inner.flops + op.flops
            traffic += inner.traffic if op.name in LOOPS else _traffic(op, reads, writes, sizes)
            in_place = op.name in UPDATES or op.name not in ALONE
            kernels.append(Kernel(reads, writes, inner.peak, in_place))
    return kernels, set(NONE.union(*(sources.get(value, NONE) for value in results))), flops, traffic


def _inside(op: Op, rules: Rules) -> Costs:
    """Returns the costs inside a loop or conditional; zero for other primitives.

    A scan costs all its iterations. A while loop, whose number of iterations is unknown, costs one. A conditional costs
    its most expensive branch.
    """
    if op.name == "scan":
        first, length = op.params["consts"], op.params["length"]
        carried = slice(first, first + op.params["carries"])
        body = measure(op.params["jaxpr"], wanted=op.params["wanted"], carried=carried, rules=rules)
        return Costs(length * body.flops, length * body.traffic, body.peak)
    if op.name == "while":
        return measure(op.params["body_jaxpr"], rules=rules)
    if op.name == "cond":
        branches = (measure(branch, rules=rules) for branch in op.params["branches"])
        return Costs(*map(max, zip(*branches, strict=True)))
    return Costs()


def _traffic(op: Op, reads: frozenset[int], writes: tuple[int, ...], sizes: list[int]) -> float:
    if op.name in ("gather", "dynamic_slice"):
        return 2.0 * sizes[op.outputs[0]]
    if op.name == "dynamic_update_slice":
        return 2.0 * sizes[op.inputs[1]]
    if op.name.startswith("scatter"):
        return 3.0 * sizes[op.inputs[2]]
    return float(sum(sizes[value] for value in (*reads, *writes)))


def breadth_first(kernels: list[Kernel]) -> list[Kernel]:
    """Orders kernels by the time at which their operands are ready."""
    maker = {value: index for index, kernel in enumerate(kernels) for value in kernel.writes}
    waits = [{maker[value] for value in kernel.reads if value in maker} for kernel in kernels]
    followers: dict[int, list[int]] = {}
    for index, before in enumerate(waits):
        for other in before:
            followers.setdefault(other, []).append(index)
    order = [index for index, before in enumerate(waits) if not before]
    for index in order:
        for follower in followers.get(index, ()):
            waits[follower].discard(index)
            if not waits[follower]:
                order.append(follower)
    return [kernels[index] for index in order]


def carry_first(kernels: list[Kernel], carries: set[int], sizes: list[int]) -> list[Kernel]:
    """Moves the kernels that the next carry does not depend on to the end of the iteration, except for reductions."""
    needed, first, later = set(carries), [], []
    for kernel in reversed(kernels):
        reduces = 100 * sum(sizes[value] for value in kernel.writes) < sum(sizes[value] for value in kernel.reads)
        if reduces or needed.intersection(kernel.writes):
            first.append(kernel)
            needed |= kernel.reads
        else:
            later.append(kernel)
    return [*first[::-1], *later[::-1]]


def peak(program: Program, kernels: list[Kernel], allocated: set[int], pinned: set[int]) -> float:
    """Returns the peak memory of the kernels in this order, in bytes.

    Args:
      program: sizes of all values.
      kernels: kernels in order of execution.
      allocated: values that are allocated at the start.
      pinned: values that are never freed.
    """
    sizes = program.sizes
    last = {buffer: index for index, kernel in enumerate(kernels) for buffer in kernel.reads}
    live = worst = float(sum(sizes[value] for value in allocated))
    for index, kernel in enumerate(kernels):
        ended = [sizes[buffer] for buffer in kernel.reads if last[buffer] == index and buffer not in pinned]
        new = [sizes[value] for value in kernel.writes]
        replaced, free = 0, list(ended)
        for size in new if kernel.in_place else ():
            if size in free:
                free.remove(size)
                replaced += size
        worst = max(worst, live + sum(new) - replaced + kernel.workspace)
        unread = sum(sizes[value] for value in kernel.writes if value not in last and value not in pinned)
        live += sum(new) - sum(ended) - unread
    return worst

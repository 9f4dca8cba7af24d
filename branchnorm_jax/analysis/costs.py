"""What a function will cost on a device: operations, memory traffic, peak memory. Nothing is compiled, nothing runs.

The jaxpr of the function is walked as XLA would run it. Operations on single elements are fused into the kernel that
reads them: their results take no memory, unless a matrix product or a loop reads them, several kernels do, or they are
results of the whole. A kernel's result takes the place of an operand of its size that nobody reads again. A loop costs
its body as often as it runs, and its body's memory once: a stack of 1000 layers is walked as fast as one of six.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core


class Costs(NamedTuple):
    """Of one call."""

    flops: float = 0.0
    """Multiplications and additions of the matrix products."""
    traffic: float = 0.0
    """Bytes that kernels read and write."""
    peak: float = 0.0
    """Bytes of the buffers alive at the worst moment: donated arguments count, others are the caller's."""


class Op(NamedTuple):
    """One primitive. Values are numbers; see `Program`."""

    name: str
    params: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float
    """If it is a matrix product."""


class Program(NamedTuple):
    """A jaxpr without inner calls and without what no result needs."""

    ops: list[Op]
    sizes: list[int]
    """Bytes of each value."""
    arguments: list[int]
    results: list[int]


class Kernel(NamedTuple):
    """What runs at once."""

    reads: frozenset[int]
    writes: tuple[int, ...]
    workspace: float
    """Bytes that it needs beside, while it runs."""
    in_place: bool
    """Whether a result may take the place of an operand."""


NONE: frozenset[int] = frozenset()

LOOPS = ("scan", "while", "cond")

ALONE = (*LOOPS, "dot_general", "gather", "scatter", "scatter-add", "sort", "top_k", "cumsum")
"""Primitives that are kernels of their own and read their operands from memory."""

RESULT_IN_MEMORY = (*ALONE, "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin")
"""Primitives that no reader can compute again for itself."""

SAME_BYTES = ("reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "reshard", "sharding_constraint", "name")
"""Primitives whose result is their operand."""


def trace(function: Callable[..., Any], *arguments: Any, donated: Sequence[int] = ()) -> Costs:
    """The costs of `function(*arguments)`.

    Args:
      function: a pure function.
      arguments: arrays, or their shapes and types.
      donated: positions of the arguments whose memory the function may use.
    """
    owned = [index in donated for index, tree in enumerate(arguments) for _ in jax.tree.leaves(tree)]
    return measure(jax.make_jaxpr(function)(*arguments), owned)


def measure(
    jaxpr: Any, owned: Sequence[bool] = (), wanted: Sequence[bool] | None = None, carried: slice = slice(0)
) -> Costs:
    """The costs of one run of a closed jaxpr.

    Args:
      jaxpr: a whole program, or the body of a loop.
      owned: of a whole program, which arguments' memory it may use.
      wanted: the results that are needed; all if not given.
      carried: of a loop's body, the arguments that its results take the place of: where they are updated slice by
        slice, in the loop's own memory.
    """
    program = flatten(jaxpr, wanted)
    mine = {value for value, is_mine in zip(program.arguments, owned, strict=False) if is_mine}
    kernels, kept, flops, traffic = fuse(program)
    # In a loop's body as it is traced, which follows one layer; the whole as soon as its operands are there.
    order = breadth_first(kernels) if owned else kernels
    sliced = {op.inputs[0] for op in program.ops if op.name == "dynamic_update_slice"}
    lent = sliced.intersection(program.arguments[carried])
    stay = kept | (set(program.arguments) - mine - lent)
    worst = peak(program, order, mine | lent, stay) - sum(program.sizes[value] for value in lent)
    return Costs(flops, traffic, worst)


def flatten(jaxpr: Any, wanted: Sequence[bool] | None = None) -> Program:
    """The program of a closed jaxpr; of its results those that are `wanted`."""
    ops: list[Op] = []
    sizes: list[int] = []

    def new(aval: Any) -> int:
        sizes.append(math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0)
        return len(sizes) - 1

    def run(jaxpr: Any, arguments: list[int]) -> list[int]:
        known = dict(zip(jaxpr.invars, arguments, strict=True)) | {v: new(v.aval) for v in jaxpr.constvars}

        def value(atom: Any) -> int:
            return new(atom.aval) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            inputs = [value(atom) for atom in equation.invars]
            inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
            if inner is not None and name not in LOOPS:
                outputs = run(getattr(inner, "jaxpr", inner), inputs)
            elif name in SAME_BYTES and len(inputs) == len(equation.outvars):
                outputs = inputs
            else:
                outputs = [new(variable.aval) for variable in equation.outvars]
                parts = _parts(equation) if name == "scan" else {}
                ops.append(Op(name, params | parts, tuple(inputs), tuple(outputs), _flops(equation)))
            known.update(zip(equation.outvars, outputs, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    arguments = [new(variable.aval) for variable in jaxpr.jaxpr.invars]
    results = run(jaxpr.jaxpr, arguments)
    results = results if wanted is None else [value for value, want in zip(results, wanted, strict=True) if want]
    needed, used = set(results), []
    for op in reversed(ops):
        if needed.intersection(op.outputs):
            used.append(_without_unused(op, needed))
            needed.update(used[-1].inputs)
    return Program(used[::-1], sizes, arguments, results)


def _parts(equation: Any) -> dict[str, int]:
    """How many of a scan's inputs are the same for every pass, and how many of its results are carried.

    What is taken apart or stacked has an axis more than in the body; how jax names the numbers depends on its version.
    """
    body = equation.params["jaxpr"].jaxpr

    def alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))

    carries = alike(equation.outvars, body.outvars)
    return {"consts": alike(equation.invars, body.invars) - carries, "carries": carries}


def _without_unused(op: Op, needed: set[int]) -> Op:
    """A scan without the inputs and outputs that no needed output depends on; any other primitive as it is."""
    if op.name != "scan":
        return op
    consts, carries = op.params["consts"], op.params["carries"]
    wanted = [value in needed for value in op.outputs]
    while True:
        body = flatten(op.params["jaxpr"], wanted)
        read = set(body.results).union(*(inner.inputs for inner in body.ops))
        used = [value in read for value in body.arguments]
        # What a pass of the loop reads of the carry, the pass before has to make.
        carried = [a or b for a, b in zip(wanted, used[consts : consts + carries], strict=False)]
        if wanted[:carries] == carried:
            inputs = tuple(value for value, keep in zip(op.inputs, used, strict=True) if keep)
            outputs = tuple(value for value in op.outputs if value in needed)
            return op._replace(params=op.params | {"wanted": wanted}, inputs=inputs, outputs=outputs)
        wanted = carried + wanted[carries:]


def _flops(equation: Any) -> float:
    if equation.primitive.name != "dot_general":
        return 0.0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, product = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(product) * math.prod(left[axis] for axis in contracted)


def fuse(program: Program) -> tuple[list[Kernel], set[int], float, float]:
    """The kernels as traced, the buffers that hold the results, and the operations and traffic of all."""
    sizes, results = program.sizes, set(program.results)
    readers: dict[int, list[Op]] = {}
    for op in program.ops:
        for value in set(op.inputs):
            readers.setdefault(value, []).append(op)
    cheap = {value for op in program.ops if op.name in ("broadcast_in_dim", "iota") for value in op.outputs}
    # Of each value, the buffers that it is read from: its own, or those that it is computed from where it is read.
    sources = {value: frozenset([value]) for value in program.arguments}
    kernels: list[Kernel] = []
    flops = traffic = 0.0
    for op in program.ops:
        reads = NONE.union(*(sources.get(value, NONE) for value in op.inputs))
        for value in op.outputs:
            uses = readers.get(value, [])
            operands = [v for v in set(op.inputs) if sizes[v] >= sizes[value] and v not in cheap]
            in_memory = (
                op.name in RESULT_IN_MEMORY
                or value in results
                or any(use.name in ALONE for use in uses)
                # Each of several readers would read all operands: more than the one result.
                or (len(uses) > 1 and len(operands) > 1)
            )
            sources[value] = frozenset([value]) if in_memory else reads
        writes = tuple(value for value in op.outputs if value in sources[value])
        if writes:
            inner = _inside(op)
            flops += inner.flops + op.flops
            traffic += inner.traffic if op.name in LOOPS else _traffic(op, reads, writes, sizes)
            in_place = op.name not in ALONE or op.name in LOOPS or op.name.startswith("scatter")
            kernels.append(Kernel(reads, writes, inner.peak, in_place))
    return kernels, set(NONE.union(*(sources.get(value, NONE) for value in results))), flops, traffic


def _inside(op: Op) -> Costs:
    """Of a loop, all its passes (of an unknown number, one); of a choice, the dearest; of all else, nothing."""
    if op.name == "scan":
        first, length = op.params["consts"], op.params["length"]
        carried = slice(first, first + op.params["carries"])
        body = measure(op.params["jaxpr"], wanted=op.params["wanted"], carried=carried)
        return Costs(length * body.flops, length * body.traffic, body.peak)
    if op.name == "while":
        return measure(op.params["body_jaxpr"])
    if op.name == "cond":
        return Costs(*map(max, zip(*(measure(branch) for branch in op.params["branches"]), strict=True)))
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
    """The kernels in the order in which their operands get ready."""
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


def peak(program: Program, kernels: list[Kernel], mine: set[int], stay: set[int]) -> float:
    """Bytes at the worst moment of the kernels in this order; buffers that `stay` are not given up."""
    sizes = program.sizes
    last = {buffer: index for index, kernel in enumerate(kernels) for buffer in kernel.reads}
    live = worst = float(sum(sizes[value] for value in mine))
    for index, kernel in enumerate(kernels):
        ended = [sizes[buffer] for buffer in kernel.reads if last[buffer] == index and buffer not in stay]
        new = [sizes[value] for value in kernel.writes]
        replaced, free = 0, list(ended)
        for size in new if kernel.in_place else ():
            if size in free:
                free.remove(size)
                replaced += size
        worst = max(worst, live + sum(new) - replaced + kernel.workspace)
        unread = sum(sizes[value] for value in kernel.writes if value not in last and value not in stay)
        live += sum(new) - sum(ended) - unread
    return worst

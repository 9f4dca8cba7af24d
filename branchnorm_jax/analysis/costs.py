"""Cost model of a function: operations, memory traffic and peak memory, without compiling or running it.

The model walks the function's jaxpr and imitates XLA:

- Element-wise operations are fused into the kernel that reads their results. A result takes memory only if a matrix
  product, a loop or several kernels read it, or if it is a result of the function.
- A kernel reuses the buffer of an operand of the same size that is not read again.
- A loop costs the operations and traffic of its body times the number of iterations, but the memory of its body once.
  A stack of 1000 layers is therefore analysed as fast as one of 6.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core


class Costs(NamedTuple):
    """Costs of one call."""

    flops: float = 0.0
    """Number of multiplications and additions in matrix products."""
    traffic: float = 0.0
    """Number of bytes read and written by kernels."""
    peak: float = 0.0
    """Peak size of live buffers in bytes. Includes donated arguments; other arguments belong to the caller."""


class Op(NamedTuple):
    """One primitive operation; `inputs` and `outputs` are indices of values in `Program.sizes`."""

    name: str
    params: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float
    """Operations of a matrix product; 0 for any other primitive."""


class Program(NamedTuple):
    """A flattened jaxpr: inner calls are inlined, and operations that no result needs are removed."""

    ops: list[Op]
    sizes: list[int]
    """Size of each value in bytes."""
    arguments: list[int]
    results: list[int]


class Kernel(NamedTuple):
    """A group of fused operations."""

    reads: frozenset[int]
    writes: tuple[int, ...]
    workspace: float
    """Bytes of temporary memory needed in addition to operands and results."""
    in_place: bool
    """Whether a result may reuse the buffer of an operand."""


NONE: frozenset[int] = frozenset()

LOOPS = ("scan", "while", "cond")

ALONE = (*LOOPS, "dot_general", "gather", "scatter", "scatter-add", "sort", "top_k", "cumsum")
"""Primitives that are not fused with the operations that compute their operands."""

RESULT_IN_MEMORY = (*ALONE, "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin")
"""Primitives that are not recomputed in the kernels that read their results."""

SAME_BYTES = ("reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "reshard", "sharding_constraint", "name")
"""Primitives whose result shares the buffer of their operand."""


def trace(function: Callable[..., Any], *arguments: Any, donated: Sequence[int] = ()) -> Costs:
    """Estimates the costs of `function(*arguments)`.

    Args:
      function: a pure function.
      arguments: arrays, or `jax.ShapeDtypeStruct`s.
      donated: positions of the donated arguments, whose buffers the function may reuse.
    """
    owned = [index in donated for index, tree in enumerate(arguments) for _ in jax.tree.leaves(tree)]
    return measure(jax.make_jaxpr(function)(*arguments), owned)


def measure(
    jaxpr: Any, owned: Sequence[bool] = (), wanted: Sequence[bool] | None = None, carried: slice = slice(0)
) -> Costs:
    """Estimates the costs of one run of a closed jaxpr.

    Args:
      jaxpr: a whole program, or the body of a loop.
      owned: for a whole program, whether each argument is donated.
      wanted: whether each result is needed; by default all are.
      carried: for a loop body, the range of carried arguments. Carried arguments that are updated slice by slice are
        updated in place and need no extra memory.
    """
    program = flatten(jaxpr, wanted)
    donated = {value for value, is_owned in zip(program.arguments, owned, strict=False) if is_owned}
    kernels, result_buffers, flops, traffic = fuse(program)
    # A loop body runs in traced order, which follows one layer. The whole program runs each kernel once it is ready.
    order = breadth_first(kernels) if owned else kernels
    sliced = {op.inputs[0] for op in program.ops if op.name == "dynamic_update_slice"}
    updated_in_place = sliced.intersection(program.arguments[carried])
    pinned = result_buffers | (set(program.arguments) - donated - updated_in_place)
    worst = peak(program, order, donated | updated_in_place, pinned) - sum(
        program.sizes[value] for value in updated_in_place
    )
    return Costs(flops, traffic, worst)


def flatten(jaxpr: Any, wanted: Sequence[bool] | None = None) -> Program:
    """Flattens a closed jaxpr, keeping only the `wanted` results (default: all)."""
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
    """Returns the number of constant inputs and of carried results of a scan.

    They are found by comparing ranks, since scanned inputs and stacked results have one more axis outside the body. The
    parameters of the primitive are not used, because their names depend on the version of jax.
    """
    body = equation.params["jaxpr"].jaxpr

    def alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(outside, inside, strict=True))

    carries = alike(equation.outvars, body.outvars)
    return {"consts": alike(equation.invars, body.invars) - carries, "carries": carries}


def _without_unused(op: Op, needed: set[int]) -> Op:
    """Removes unused inputs and outputs of a scan; other primitives are unchanged."""
    if op.name != "scan":
        return op
    consts, carries = op.params["consts"], op.params["carries"]
    wanted = [value in needed for value in op.outputs]
    while True:
        body = flatten(op.params["jaxpr"], wanted)
        read = set(body.results).union(*(inner.inputs for inner in body.ops))
        used = [value in read for value in body.arguments]
        # A carried value that one iteration reads must be computed by the iteration before.
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
    """Fuses the operations of a program into kernels.

    Returns the kernels in traced order, the buffers of the results, and the total operations and traffic.
    """
    sizes, results = program.sizes, set(program.results)
    readers: dict[int, list[Op]] = {}
    for op in program.ops:
        for value in set(op.inputs):
            readers.setdefault(value, []).append(op)
    cheap = {value for op in program.ops if op.name in ("broadcast_in_dim", "iota") for value in op.outputs}
    # Buffers that each value is read from: its own buffer, or, if it is fused, those of its operands.
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
                # Fusing the value into several readers would make each of them read all its operands.
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
    """Returns the costs inside a loop or conditional; zero for other primitives.

    A scan costs all its iterations. A while loop, whose number of iterations is unknown, costs one. A conditional costs
    its most expensive branch.
    """
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

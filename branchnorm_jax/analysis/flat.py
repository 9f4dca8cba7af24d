"""Flattens a jaxpr to a list of operations on values of known size; `costs.py` estimates what they cost."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from branchnorm_jax.analysis.rules import RULES, Rules

CPU = RULES["cpu"]

LOOPS = ("scan", "while", "cond")

SAME_BYTES = ("reshape", "squeeze", "expand_dims", "stop_gradient", "copy", "reshard", "sharding_constraint", "name")
"""Primitives whose result shares the buffer of their operand."""

MERGED = ("convert_element_type", "broadcast_in_dim")
"""Primitives of which equal ones are merged; see `Rules.merges`."""


class Op(NamedTuple):
    """One primitive operation; `inputs` and `outputs` are indices of values in `Program.sizes`."""

    name: str
    params: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: float
    """Operations of a matrix product or of a Pallas kernel; 0 for any other primitive."""


class Program(NamedTuple):
    """A flattened jaxpr: inner calls are inlined, and operations that no result needs are removed."""

    ops: list[Op]
    sizes: list[int]
    """Size of each value in bytes, on each device."""
    arguments: list[int]
    results: list[int]


def flatten(jaxpr: Any, wanted: Sequence[bool] | None = None, rules: Rules = CPU) -> Program:
    """Flattens a closed jaxpr, keeping only the `wanted` results (default: all)."""
    flat = _Flat(rules)
    arguments = [flat.new(variable.aval) for variable in jaxpr.jaxpr.invars]
    results = flat.run(jaxpr.jaxpr, arguments)
    results = results if wanted is None else [value for value, want in zip(results, wanted, strict=True) if want]
    needed, used = set(results), []
    for op in reversed(flat.ops):
        if needed.intersection(op.outputs):
            used.append(_without_unused(op, needed))
            needed.update(used[-1].inputs)
    return Program(used[::-1], flat.sizes, arguments, results)


class _Flat:
    """The operations and values of a program, while its jaxprs are inlined."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.ops: list[Op] = []
        self.sizes: list[int] = []
        self.made: dict[tuple[Any, ...], list[int]] = {}
        """Results of the operations of `MERGED`, by what they compute."""

    def new(self, aval: Any) -> int:
        size = math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0
        self.sizes.append(size // self.rules.parts(aval.shape) if size else 0)
        return len(self.sizes) - 1

    def run(self, jaxpr: Any, arguments: list[int]) -> list[int]:
        known = dict(zip(jaxpr.invars, arguments, strict=True)) | {v: self.new(v.aval) for v in jaxpr.constvars}

        def value(atom: Any) -> int:
            return self.new(atom.aval) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            inputs = [value(atom) for atom in equation.invars]
            inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
            if inner is not None and name not in (*LOOPS, "pallas_call"):
                outputs = self.run(getattr(inner, "jaxpr", inner), inputs)
            elif name in SAME_BYTES and len(inputs) == len(equation.outvars):
                outputs = inputs
            elif name == "scan":
                outputs = self.scan(equation, inputs)
            else:
                outputs = self.once(equation, inputs)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def once(self, equation: Any, inputs: list[int]) -> list[int]:
        """Adds an operation, unless the same one is there already."""
        name = equation.primitive.name
        key: tuple[Any, ...] = ()
        if self.rules.merges and name in MERGED:
            atoms = zip(equation.invars, inputs, strict=True)
            read = (str(atom) if isinstance(atom, core.Literal) else value for atom, value in atoms)
            key = (name, str(equation.params), *read)
            if key in self.made:
                return self.made[key]
        outputs = [self.new(variable.aval) for variable in equation.outvars]
        self.ops.append(Op(name, equation.params, tuple(inputs), tuple(outputs), _flops(equation)))
        if key:
            self.made[key] = outputs
        return outputs

    def scan(self, equation: Any, inputs: list[int]) -> list[int]:
        """Adds a loop."""
        counts, outputs = _counts(equation), [self.new(variable.aval) for variable in equation.outvars]
        carries, first = counts["carries"], counts["consts"] + counts["carries"]
        if self.rules.converts_stacks or self.rules.merges:
            body = flatten(equation.params["jaxpr"], rules=self.rules)
            if self.rules.converts_stacks:
                types = [self.narrower(body, index, equation) for index in range(first, len(inputs))]
                stacks = zip(inputs[first:], types, equation.invars[first:], strict=True)
                inputs = inputs[:first] + [self.converted(*stack) for stack in stacks]
            if self.rules.merges:
                same: dict[int, int] = {}
                stacked = zip(body.results[carries:], outputs[carries:], strict=True)
                outputs = outputs[:carries] + [same.setdefault(inner, outer) for inner, outer in stacked]
        self.ops.append(Op("scan", equation.params | counts, tuple(inputs), tuple(outputs), 0.0))
        return outputs

    def narrower(self, body: Program, index: int, equation: Any) -> Any:
        """Returns the type to which a loop converts its input `index` before any other use, if it is narrower."""
        argument, dtype = body.arguments[index], equation.invars[index].aval.dtype
        readers = [op for op in body.ops if argument in op.inputs]
        types = {op.params["new_dtype"] if op.name == "convert_element_type" else dtype for op in readers}
        return next((new for new in types if len(types) == 1 and new.itemsize < dtype.itemsize), None)

    def converted(self, value: int, dtype: Any, variable: Any) -> int:
        """Returns a stacked input of a loop in the type `dtype`."""
        if dtype is None:
            return value
        key = ("converted", value, dtype)
        if key not in self.made:
            self.made[key] = [self.new(variable.aval.update(dtype=dtype))]
            self.ops.append(Op("convert_element_type", {"new_dtype": dtype}, (value,), tuple(self.made[key]), 0.0))
        return self.made[key][0]


def _counts(equation: Any) -> dict[str, int]:
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
            outputs = tuple(dict.fromkeys(value for value in op.outputs if value in needed))
            return op._replace(params=op.params | {"wanted": wanted}, inputs=inputs, outputs=outputs)
        wanted = carried + wanted[carries:]


def _flops(equation: Any) -> float:
    """Returns the operations of a matrix product or of a Pallas kernel, and 0 for any other primitive."""
    if equation.primitive.name == "pallas_call":
        return math.prod(equation.params["grid_mapping"].grid) * _flops_inside(equation)
    if equation.primitive.name != "dot_general":
        return 0.0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, product = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(product) * math.prod(left[axis] for axis in contracted)


def _flops_inside(equation: Any) -> float:
    """Returns the operations of the matrix products in one program of a Pallas kernel, with all its loops."""
    inner = [inside for jaxpr in core.jaxprs_in_params(equation.params) for inside in jaxpr.eqns]
    return sum(_flops(one) + one.params.get("length", 1) * _flops_inside(one) for one in inner)

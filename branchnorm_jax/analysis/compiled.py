"""Compiles the update of a run for absent devices, and reports what the compiler says of it."""

import dataclasses
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from branchnorm_jax.analysis import collectives, program, topologies
from branchnorm_jax.analysis.estimate import lengths, rows_of, update_costs
from branchnorm_jax.analysis.topologies import Target
from branchnorm_jax.data.packing import Shape
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config
from branchnorm_jax.parallel.mesh import make_mesh, row_devices
from branchnorm_jax.training.lower import allocated_bytes, lower_update
from branchnorm_jax.training.optimizer import make_optimizer
from branchnorm_jax.training.state import abstract_state

LARGEST, PRINTED = 20, 8
"""Number of kinds of arrays and of collectives that a report lists, and that it prints."""

PACKAGES = {"tpu": ("jax", "libtpu"), "cuda": ("jax", "jax-cuda13-plugin", "jax-cuda12-plugin")}


class Absent(NamedTuple):
    """The devices of `plan.compile`, and the mesh of a run on them."""

    target: Target
    mesh: Mesh

    @property
    def devices(self) -> list[Any]:
        """The devices in the order of the mesh."""
        return list(self.mesh.devices.flat)


def planned_for(config: Config, target: Target) -> tuple[Config, Absent]:
    """Returns the config of a run on the target's devices, and their mesh.

    Raises:
      MissingExtraError: if the compiler is not installed.
      UserError: if the topology is unknown, or does not match the mesh or `plan.device`, `plan.devices`.
    """
    plan, parallel = config.plan, config.parallel
    if plan.calibrate:
        raise UserError(f"config: plan.calibrate measures this machine; leave it out with plan.compile={target.text}")
    for name, given, implied in (("device", plan.device, target.device), ("devices", plan.devices, target.count)):
        if given and given != implied:
            raise UserError(
                f"config: plan.{name}={given} contradicts plan.compile={target.text}, which has "
                f"{target.count} x {target.device}; leave out plan.{name}"
            )
    absent = topologies.absent_devices(target)
    mesh = make_mesh(parallel, absent)
    changed = dataclasses.replace(
        config,
        plan=dataclasses.replace(plan, device=target.device, devices=target.count),
        parallel=dataclasses.replace(parallel, data=mesh.shape["data"]),
    )
    return changed, Absent(target, mesh)


def largest_batch(config: Config) -> Shape:
    """Returns the shape of the batch that needs the most memory according to the plan."""
    count = row_devices(config.parallel)
    shapes = [(rows_of(config, length, count), length) for length in lengths(config)]
    rows, length = max(shapes, key=lambda shape: update_costs(config, *shape).peak)
    return Shape(rows * count, length, length)


def compile_update(config: Config, absent: Absent, shape: Shape | None = None) -> tuple[dict[str, Any], str]:
    """Compiles the update of a run.

    Args:
      config: the run.
      absent: its devices.
      shape: rows and row lengths of the batch; by default, those of `largest_batch`.

    Returns:
      The report of the compiler, for `plan.json`, and the optimised program (HLO text). If the program does not fit
      into the memory of a device, the report has the compiler's `error`, and the text is empty.
    """
    target = absent.target
    rows, length, _ = shape = shape or largest_batch(config)
    model = Transformer(config.model, config.data.vocab_size, config.data.vocab_size)
    optimizer = make_optimizer(config.train, config.model)
    state = abstract_state(model, optimizer, absent.mesh, bool(config.train.ema_decay))
    lowered = lower_update(config, model, optimizer, absent.mesh, state, shape)
    report: dict[str, Any] = {
        "target": target.text,
        "mesh": dict(absent.mesh.shape),
        "remat": config.model.remat,
        "rows": rows,
        "row_length": length,
        "versions": versions(target),
    }
    begin = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=topologies.OPTIONS[target.platform])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return report | {"seconds": time.perf_counter() - begin, "error": str(error).splitlines()[0]}, ""
    report["seconds"] = time.perf_counter() - begin
    text = compiled.as_text() or ""
    return report | memory_of(compiled) | read(text, absent), text


def memory_of(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Returns the memory that a program needs on each device, as reported by the compiler."""
    memory: Any = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    results, peak = memory.output_size_in_bytes - memory.alias_size_in_bytes, allocated_bytes(compiled)
    return {
        "peak_bytes": peak,
        "argument_bytes": arguments,
        "result_bytes": results,
        "temporary_bytes": peak - arguments - results,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def read(text: str, absent: Absent) -> dict[str, Any]:
    """Returns the collectives and the largest arrays of a program."""
    parsed, domains = program.parse(text), topologies.domains(absent.devices)
    found = collectives.collectives(parsed)
    inside, between = absent.target.networks

    def bytes_of(collective: collectives.Collective) -> float:
        return collective.times * sum(collectives.sent(collective, domains))

    ranked = sorted(found, key=bytes_of, reverse=True)[:LARGEST]
    return {
        "networks": {"inside": inside, "between": between},
        "collectives": collectives.traffic(found, domains),
        "largest_collectives": [
            {
                "kind": collective.kind,
                "operand_bytes": collective.payload,
                "executions": collective.times,
                "loops": list(collective.loops),
                "inside_bytes": collective.times * collectives.sent(collective, domains).inside,
                "between_bytes": collective.times * collectives.sent(collective, domains).between,
                "name": collective.name,
            }
            for collective in ranked
        ],
        "between_in_loops_bytes": sum(
            collective.times * collectives.sent(collective, domains).between for collective in found if collective.loops
        ),
        "unknown_loops": program.unknown_loops(parsed),
        "cycles": program.cycles(parsed),
        "largest_arrays": [buffer._asdict() for buffer in program.largest_buffers(parsed, LARGEST)],
    }


def versions(target: Target) -> dict[str, str]:
    """Returns the versions of JAX and of the compiler."""
    found = {}
    for name in PACKAGES[target.platform]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def format_report(report: Mapping[str, Any], predicted: float) -> str:
    """Formats the report of a compiler as text.

    Args:
      report: see `compile_update`.
      predicted: the plan's prediction of the peak memory, in bytes.
    """
    mesh = ", ".join(f"{name} {size}" for name, size in report["mesh"].items() if size > 1) or "one device"
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"compiled for {report['target']} ({mesh}) with model.remat={report['remat']}, {report['rows']} x "
        f"{report['row_length']} tokens a side, in {report['seconds']:,.0f} s ({packages})"
    ]
    if "error" in report:
        return "\n".join([*lines, f"does not fit; the compiler says: {report['error']}"])
    gb = {name: report[f"{name}_bytes"] / 1e9 for name in ("peak", "argument", "temporary")}
    lines.append(
        f"peak per device {gb['peak']:,.3f} GB by the compiler (the plan: {predicted / 1e9:,.3f}): "
        f"state and batch {gb['argument']:,.3f}, temporary {gb['temporary']:,.3f}"
    )
    return "\n".join([*lines, "", *_collectives(report), "", *_arrays(report)])


def _collectives(report: Mapping[str, Any]) -> list[str]:
    if not report["collectives"]:
        return ["no collectives"]
    inside, between = report["networks"].values()

    def row(name: str, part: Mapping[str, Any], more: str = "") -> str:
        sizes = (part[f"{place}_bytes"] / 1e6 for place in ("inside", "between"))
        return f"{name:<20}{part['executions']:>12,}" + "".join(f"{size:>14,.3f}" for size in sizes) + more

    lines = [
        f"MB that each device sends per update; inside: {inside}, between: {between}",
        f"{'collectives':<20}{'executions':>12}{'inside':>14}{'between':>14}",
        *(row(kind, part) for kind, part in report["collectives"].items()),
        "the largest:",
    ]
    for part in report["largest_collectives"][:PRINTED]:
        where = f" in {', '.join(part['loops'])}" if part["loops"] else ""
        lines.append(row(part["kind"], part, f"  {_short(part['name'])}{where}"))
    if report["unknown_loops"]:
        lines.append(f"counted once, because the number of iterations is unknown: {', '.join(report['unknown_loops'])}")
    return lines


def _arrays(report: Mapping[str, Any]) -> list[str]:
    lines = [f"{'largest arrays':<26}{'number':>8}{'MB each':>12}"]
    for part in report["largest_arrays"][:PRINTED]:
        name = part["name"] if part["argument"] else _short(part["name"])
        more = ", ..." if part["number"] > 1 else ""
        lines.append(f"{part['array']:<26}{part['number']:>8,}{part['bytes'] / 1e6:>12,.3f}  {name}{more}")
    return lines


def _short(name: str) -> str:
    """Returns the last parts of the path of an operation."""
    return "/".join(name.split("/")[-3:])

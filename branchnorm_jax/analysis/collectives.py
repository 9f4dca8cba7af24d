"""The collectives of an optimised program, and the bytes that they send.

The compilers write replica groups, asynchronous collectives and messages between TPU slices in several ways. This
module understands those of XLA's CPU, CUDA and TPU compilers.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from branchnorm_jax.analysis.program import Program, executed, matched

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

Groups = tuple[tuple[int, ...], ...]


class Collective(NamedTuple):
    """One collective of the program."""

    kind: str
    payload: int
    """Bytes of the operands on each device."""
    groups: Groups | None
    """Positions in the mesh of the devices that take part together. () means that all devices take part.

    None marks a message of the TPU runtime between the devices at the same place of each slice.
    """
    times: int
    """Number of executions per run of the program."""
    loops: tuple[str, ...]
    name: str


class Sent(NamedTuple):
    """Bytes that a device sends in one execution of a collective."""

    inside: float
    """Bytes to devices of the same slice or host."""
    between: float
    """Bytes to other slices or hosts."""


def collectives(program: Program) -> list[Collective]:
    """Returns the collectives of a program, in the order of its text.

    Those in all branches of a conditional count, although a device runs only one of the branches.
    """
    found: list[Collective] = []
    seen = set()
    for instruction, computation, times, loops, kernel in executed(program):
        kind = instruction.op.removesuffix("-start")
        message = matched(instruction.attributes, r'_xla_megascale_transfer_type="(\w+)"')
        between = instruction.op == "send" and bool(message)
        if not between and (kind not in KINDS or instruction.op.endswith("-done")):
            continue
        # The TPU compiler runs some collectives beside other kernels, and writes them into each of these kernels.
        if kernel and "async_collective_fusion" in instruction.attributes:
            same = loops, kind, matched(instruction.attributes, r"channel_id=(\d+)")
            if same in seen:
                continue
            seen.add(same)
        # Its reduce-scatter may also be a kernel of an all-reduce and of slices of the result.
        if kernel.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        operands = instruction.operands[:1] if between else instruction.operands
        payload = sum(array.bytes for name in operands if name in computation for array in computation[name].result)
        groups = None if between else replica_groups(instruction.attributes)
        kind = message.lower().replace("_", "-") if between else kind
        found.append(Collective(kind, payload, groups, times, loops, instruction.op_name))
    return found


def replica_groups(attributes: str) -> Groups:
    """Returns which devices take part in a collective together; () means all devices.

    XLA has three notations. For collective-permute, it lists pairs of a source and a target.

    >>> replica_groups("replica_groups={{0,1},{2,3}}, dimensions={0}")
    ((0, 1), (2, 3))
    >>> replica_groups("replica_groups=[2,2]<=[2,2]T(1,0)")
    ((0, 2), (1, 3))
    >>> replica_groups("replica_groups=mesh['data'=2,'model'=2] {'data'}")
    ((0, 2), (1, 3))
    >>> replica_groups("channel_id=1, source_target_pairs={{0,1},{1,0}}")
    ((0, 1), (1, 0))
    """
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}", attributes):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1]))
    if match := re.search(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return _rows(_iota(match[1]))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}", attributes):
        return _rows(_mesh_groups(*match.groups()))
    return ()


def _iota(text: str) -> np.ndarray:
    """Returns the array that "[rows,columns]<=[sizes]T(axes)" stands for."""
    shape, sizes, axes = (
        [int(number) for number in matched(text, pattern).split(",") if number]
        for pattern in (r"^\[([\d,]+)\]", r"<=\[([\d,]+)\]", r"T\(([\d,]+)\)")
    )
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(axes or range(len(sizes))).reshape(shape)


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> np.ndarray:
    """Returns the groups of the notation mesh[names and sizes], device_ids=(...) {axes}.

    An axis 'a':(2)4 is the part of the axis a that remains if it is split into 2 x 4 x the rest.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh)}
    grouped = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'?(\w+)'?(?::\((\d+)\)(\d+))?", axes)
    ]
    # The axes cut into parts: name, product of the sizes of the parts before it, and size.
    parts: list[tuple[str, int, int]] = []
    for name, total in sizes.items():
        end = 1
        for _, before, size in sorted(part for part in grouped if part[0] == name):
            parts += [(name, end, before // end), (name, before, size)]
            end = before * size
        parts.append((name, end, total // end))
    if device_ids is None:
        devices = np.arange(math.prod(sizes.values()))
    elif "<=" in device_ids or device_ids.startswith("["):
        dims = matched(device_ids, r"\[([\d,]+)\]")
        devices = _iota(f"[{math.prod(sizes.values())}]<=[{dims}]{device_ids[device_ids.index(']') + 1 :]}")
    else:
        devices = np.array([int(number) for number in device_ids.split(",")])
    devices = devices.reshape([size for _, _, size in parts])
    inner = [parts.index(part) for part in grouped]
    rest = [index for index in range(len(parts)) if index not in inner]
    return devices.transpose([*rest, *inner]).reshape(-1, math.prod(size for _, _, size in grouped))


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in array.reshape(-1, array.shape[-1]))


def sent(collective: Collective, domains: Sequence[int]) -> Sent:
    """Returns the bytes that a device sends in one execution; the largest number over all devices.

    Each collective counts as a ring of its n = s i devices, in two levels: i devices inside each of s slices or hosts,
    and s devices between them, as the TPU compiler does it. The bytes of both levels add up to those of one ring. With
    B bytes of operands on each device:

    | | inside | between |
    |---|---|---|
    | all-gather | s (i - 1) B | (s - 1) B |
    | reduce-scatter | (i - 1) B / i | (s - 1) B / (i s) |
    | all-reduce | 2 (i - 1) B / i | 2 (s - 1) B / (i s) |
    | all-to-all | (i - 1) B / n | (n - i) B / n |
    | collective-permute | B, if no pair of devices is in different slices or hosts | B, otherwise |

    Args:
      collective: the collective.
      domains: the domain of each device, in the order of the mesh; see `topologies.domains`.
    """
    if collective.groups is None:
        slices = len(set(domains))
        factor = {"all-reduce": 2 / slices, "all-gather": 1.0}.get(collective.kind, 1 / slices)
        return Sent(0.0, factor * (slices - 1) * collective.payload)
    groups = collective.groups or (tuple(range(len(domains))),)
    if collective.kind == "collective-permute":
        crosses = any(domains[source] != domains[target] for source, target in groups)
        return Sent(0.0, collective.payload) if crosses else Sent(collective.payload, 0.0)
    both = [_by_ring(collective, [domains[device] for device in group]) for group in groups]
    return Sent(max(part.inside for part in both), max(part.between for part in both))


def _by_ring(collective: Collective, domains: list[int]) -> Sent:
    count, payload = len(domains), collective.payload
    inner = max(Counter(domains).values())
    outer = len(set(domains))
    match collective.kind:
        case "all-gather":
            return Sent(outer * (inner - 1) * payload, (outer - 1) * payload)
        case "all-reduce":
            return Sent(2 * (inner - 1) / inner * payload, 2 * (outer - 1) / (inner * outer) * payload)
        case "reduce-scatter":
            return Sent((inner - 1) / inner * payload, (outer - 1) / (inner * outer) * payload)
        case _:
            return Sent((inner - 1) / count * payload, (count - inner) / count * payload)


def per_iteration(found: Sequence[Collective]) -> dict[str, dict[tuple[str, int], int]]:
    """Sums the operands of the collectives in loops.

    Returns:
      name of the innermost loop -> (kind, number of devices that take part together) -> bytes of the operands on each
      device, per iteration. The number of devices is 0 if all devices take part.
    """
    loops: dict[str, dict[tuple[str, int], int]] = {}
    for collective in found:
        if collective.loops:
            sums = loops.setdefault(collective.loops[-1], {})
            key = collective.kind, max(map(len, collective.groups or ()), default=0)
            sums[key] = sums.get(key, 0) + collective.payload
    return loops


def traffic(found: Sequence[Collective], domains: Sequence[int]) -> dict[str, dict[str, float]]:
    """Sums the collectives by kind.

    Returns:
      kind -> {"executions": number of executions, "inside_bytes" and "between_bytes": see `sent`; each per run of the
      program and per device}.
    """
    sums: dict[str, dict[str, float]] = {}
    for collective in found:
        total = sums.setdefault(collective.kind, {"executions": 0, "inside_bytes": 0.0, "between_bytes": 0.0})
        part = sent(collective, domains)
        total["executions"] += collective.times
        total["inside_bytes"] += collective.times * part.inside
        total["between_bytes"] += collective.times * part.between
    order = {kind: index for index, kind in enumerate(KINDS)}
    return dict(sorted(sums.items(), key=lambda item: order.get(item[0], len(order))))

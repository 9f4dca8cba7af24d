"""Other devices after each stop: a run resumes on any number of processes and devices, and computes the same losses."""

import functools
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from branchnorm_jax.training.logs import read_lines
from faults.controls import OPTIONS
from faults.processes import ROOT, Finished, environment, run
from faults.trial import Family, Outcome, Trial

UPDATES = 30
TOLERANCE = 1e-6
"""Relative error of a loss. Other numbers of devices add the same float32 numbers in another order."""


class Machine(NamedTuple):
    """What a part of the run uses."""

    processes: int
    devices: int
    """Of each process."""
    fsdp: bool
    """Whether the devices share the parameters; otherwise each has a copy."""

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices} {'fsdp' if self.fsdp else 'data'}"


SINGLE = (8, 4, 2, 1, 3, 8)
"""Devices of a single process."""

SEVERAL = ((2, 1), (1, 2), (3, 1))
"""Processes and devices of each."""


def draw(rng: random.Random) -> list[tuple[Machine, int]]:
    """Draws a sequence of machines, and for each the update before which it stops."""
    machines = [Machine(*each, fsdp=rng.random() < 0.5) for each in rng.choice((SEVERAL, [(1, n) for n in SINGLE]))]
    stops = sorted(rng.sample(range(1, UPDATES), len(machines) - 1))
    return list(zip(machines, [*stops, UPDATES], strict=True))


HASTY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
"""Each number of devices needs programs of its own, whose compilation takes most of the time."""


def set_devices(count: int) -> None:
    """Makes this process use the CPU as several devices."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    jax.config.update("jax_disable_most_optimizations", True)


def part(machine: Machine, until: int, workdir: Path, cache: Path) -> Finished:
    """Trains on a machine until an update."""
    fsdp = machine.processes * machine.devices if machine.fsdp else 1
    options = [*OPTIONS, f"--config.train.steps={until}", f"--config.parallel.fsdp={fsdp}", f"--workdir={workdir}"]
    if machine.processes == 1:
        return run(options, cache, prepared=functools.partial(set_devices, machine.devices))
    launcher = ["launch/local.py", "-n", str(machine.processes), "--cpu-devices", str(machine.devices), "--"]
    command = [sys.executable, *launcher, sys.executable, "main.py", *options]
    variables = environment(cache) | HASTY
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=1800,
    )
    return Finished(done.returncode, "", done.stdout)


def difference(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> str:
    """Returns how the metrics of a run differ from those of another one; "" if only by rounding."""
    if [line["step"] for line in found] != [line["step"] for line in expected]:
        return f"metrics of updates {[line['step'] for line in found]}"
    for ours, theirs in zip(found, expected, strict=True):
        if (ours["batch"], ours["target_tokens"]) != (theirs["batch"], theirs["target_tokens"]):
            return f"update {ours['step']} has another batch"
        if abs(ours["loss"] / theirs["loss"] - 1) > TOLERANCE:
            return f"the loss of update {ours['step']} is {ours['loss']!r}, undisturbed {theirs['loss']!r}"
    return ""


def prepare(shared: Path, seconds: float) -> Trial:
    """Makes the undisturbed run, on one device."""
    cache, undisturbed = shared / "compiled", shared / "undisturbed"
    done = part(Machine(1, 1, fsdp=False), UPDATES, undisturbed, cache)
    if done.code:
        raise RuntimeError(done.error)
    expected = read_lines(undisturbed / "metrics.jsonl")

    def trial(rng: random.Random, folder: Path) -> Outcome:
        where = list[str]()
        for machine, until in draw(rng):
            where.append(f"{machine} to update {until}")
            done = part(machine, until, folder / "run", cache)
            if done.code or done.fault:
                return Outcome("other devices", ", ".join(where), done.said, done.code, wrong=done.fault or done.said)
        found = read_lines(folder / "run" / "metrics.jsonl")
        return Outcome("other devices", ", ".join(where), wrong=difference(found, expected))

    return trial


FAMILY = Family(
    "Other devices after each stop",
    f"A run of {UPDATES} updates with dropout is stopped at random updates and resumed on other devices: on "
    + ", ".join(map(str, SINGLE))
    + " devices of one process, or on "
    + ", ".join(f"{processes} x {devices}" for processes, devices in SEVERAL)
    + " devices of several processes. Each part shares the parameters (fsdp) or copies them (data), at random. All "
    f"batches must be those of an undisturbed run on one device, and all losses must equal its losses within "
    f"{TOLERANCE:.0e}.",
    prepare,
    20,
)

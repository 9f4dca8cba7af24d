"""Verdicts of the runs on changing devices and of the long run under a restart loop."""

import random
from pathlib import Path
from typing import Any

import pytest

from faults import soak, topology
from faults.processes import Finished


def line(**changes: Any) -> list[dict[str, Any]]:
    """Returns metrics of one update."""
    return [{"step": 3, "loss": 2.5, "batch": "ab", "target_tokens": 7} | changes]


@pytest.mark.parametrize(
    ("changes", "different"),
    [
        ({}, False),
        ({"loss": 2.5 * (1 + 5e-7)}, False),
        ({"loss": 2.5 * (1 + 2e-6)}, True),
        ({"batch": "ac"}, True),
        ({"target_tokens": 8}, True),
        ({"step": 4}, True),
    ],
)
def test_runs_on_other_devices_are_compared(changes: dict[str, Any], different: bool) -> None:
    assert bool(topology.difference(line(**changes), line())) == different
    assert topology.difference([], line())


def test_all_machines_and_modes_are_drawn() -> None:
    drawn = [topology.draw(random.Random(number)) for number in range(50)]
    assert {each for parts in drawn for each, _ in parts} == {
        topology.Machine(processes, devices, fsdp)
        for processes, devices in [*topology.SEVERAL, *((1, count) for count in topology.SINGLE)]
        for fsdp in (False, True)
    }
    for parts in drawn:
        stops = [until for _, until in parts]
        assert stops == sorted(set(stops)) and stops[-1] == topology.UPDATES


@pytest.mark.parametrize(
    ("fault", "done", "again"),
    [
        ("SIGKILL", Finished(-9, "", ""), True),
        ("SIGTERM", Finished(143, "", "Preempted: saved"), True),
        ("SIGTERM", Finished(-15, "", ""), True),
        ("full disk", Finished(5, "", "StorageError: full"), True),
        ("SIGTERM", Finished(5, "", "StorageError: full"), False),
        ("damaged checkpoint", Finished(2, "", "UserError: none can be read"), False),
        ("full disk", Finished(1, "", "Traceback (most recent call last):\nOSError"), False),
        ("SIGTERM", Finished(-11, "", ""), False),
    ],
)
def test_the_restart_loop_follows_the_launchers(tmp_path: Path, fault: str, done: Finished, again: bool) -> None:
    loop = soak.Loop(tmp_path, tmp_path)
    for _ in range(5):
        if again:
            loop.check(done, fault)
        else:
            with pytest.raises(soak.Stopped, match=fault):
                loop.check(done, fault)

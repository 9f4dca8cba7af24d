"""Runs of several processes on this machine, started by launch/local.py with the unmodified main.py."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, read_metrics


def start_hosts(
    *options: str,
    processes: int = 2,
    devices: int = 2,
    grace: int = 60,
    flags: str = "",
    before: str = "",
    program: str = "main.py",
) -> subprocess.Popen[str]:
    """Starts `processes` processes of a program.

    A shell runs `before` and expands `flags` in each process, for what differs between them.
    """
    launcher = [sys.executable, "launch/local.py", "-n", str(processes), "--cpu-devices", str(devices)]
    launcher += ["--grace", str(grace)]
    command = ["sh", "-c", f'{before}\nexec "$@" {flags}', "sh", sys.executable, program, *options]
    return subprocess.Popen([*launcher, "--", *command], cwd=ROOT, text=True, stdout=subprocess.PIPE)


def run_hosts(*options: str, **how: Any) -> tuple[int, str]:
    """Runs the processes to their end. Returns the exit code and the output of all of them."""
    process = start_hosts(*options, **how)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def losses(workdir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(workdir)]


class Hosts:
    """A run of several processes that a test disturbs."""

    def __init__(self, *options: str, **how: Any) -> None:
        self.process = start_hosts(*options, **how)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.pids: dict[int, int] = {}

    def read_until(self, pattern: str) -> str:
        """Returns the first line in which the pattern occurs."""
        lines = []
        for line in iter(self.output.readline, ""):
            lines.append(line)
            if started := re.search(r"\[(\d)\] started as process (\d+)", line):
                self.pids[int(started[1])] = int(started[2])
            if re.search(pattern, line):
                return line
        raise AssertionError("".join(lines))

    def disturb(self, index: int, number: signal.Signals, ready: Callable[[], bool]) -> tuple[int, list[str], float]:
        """Sends a signal to a process once `ready` returns True.

        Returns the exit code of the launcher, the lines after the signal, and the seconds until the last line.
        """
        deadline = time.monotonic() + 300
        while not ready():
            assert self.process.poll() is None, self.output.read()
            assert time.monotonic() < deadline, "not ready within five minutes"
            time.sleep(0.005)
        subprocess.run(["kill", f"-{number.value}", str(self.pids[index])], check=True)
        begin = last = time.monotonic()
        lines = []
        for line in iter(self.output.readline, ""):
            last = time.monotonic()
            lines.append(line.rstrip())
        return self.process.wait(), lines, last - begin

"""Starts the processes of one run on this machine, or on several over ssh.

    python launch/local.py -n 2 -- python main.py --config=configs/text.py:50L-50L --workdir=runs/mine
    python launch/local.py -n 2 --cpu-devices 2 -- python main.py ...      # 4 devices without an accelerator
    python launch/local.py -n 8 --gpus 1 -- python main.py ...             # one process per GPU
    python launch/local.py --hosts a,b -- python main.py ...               # one process per host; shared folder

It chooses a free port for the coordinator and sets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. Each
line of output begins with the number of its process. SIGTERM, SIGINT and SIGUSR1 are passed on (over ssh to process 0
alone); the processes agree among themselves where to stop. After the first failure the others have `--grace` seconds to
end, then they are killed. The exit code is that of the process that failed first: 128 + n after signal n (start again),
2 or 3 (stop), 4 (a process was lost: start again), 5 (storage: stop).
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO

FORWARDED = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
"""Signals to this process, and what it sends to the processes of the run."""
SSH = ("ssh", "-o", "BatchMode=yes")
STARTED = "launch/local.py started process "
"""What the shell of another host prints before the number of the process that it becomes."""
LOST = 4
"""Exit code of a process that ended because another one failed."""


def main() -> int:
    """Starts the processes, waits for them and returns the exit code."""
    arguments = parse(sys.argv[1:])
    hosts = arguments.hosts.split(",") if arguments.hosts else []
    count = len(hosts) or arguments.processes
    address = arguments.coordinator or f"{hosts[0].rpartition('@')[2] if hosts else '127.0.0.1'}:{free_port()}"
    commands = [
        command_of(arguments.command, environment_of(index, count, address, arguments), hosts[index] if hosts else "")
        for index in range(count)
    ]
    if arguments.dry_run:
        print("\n".join(shlex.join(command) for command in commands))
        return 0
    processes = [
        # Each process is in a session of its own, so that Ctrl-C in the terminal reaches them only through this one.
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=follow
        )
        for command in commands
    ]

    remote: dict[int, int] = {}

    def forward(number: int, frame: object) -> None:
        sent = FORWARDED[signal.Signals(number)]
        if 0 in remote:  # A signal would end ssh, and not reach the process.
            subprocess.Popen([*SSH, hosts[0], f"kill -{sent.name.removeprefix('SIG')} {remote[0]}"])
            return
        for process in processes:
            process.send_signal(sent)

    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, forward)
    readers = []
    for index, process in enumerate(processes):
        if not hosts:
            show(index, f"started as process {process.pid}")
        readers.append(threading.Thread(target=copy, args=(index, process.stdout, remote)))
        readers[-1].start()
    code = wait(processes, arguments.grace)
    for reader in readers:
        reader.join()
    return code


def parse(argv: list[str]) -> argparse.Namespace:
    """Parses the command line. The command follows `--`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--processes", type=int, default=2, help="number of processes on this machine")
    parser.add_argument("--hosts", default="", help="comma-separated hosts instead: one process on each, over ssh")
    parser.add_argument("--coordinator", default="", help="address:port of process 0 (default: a free port)")
    parser.add_argument("--cpu-devices", type=int, default=0, help="use the CPU, as this many devices per process")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per process: the first process gets the first ones")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds to end after the failure of another process")
    parser.add_argument("--dry-run", action="store_true", help="print the commands instead of running them")
    parser.add_argument("command", nargs="+", help="the command of every process, after --")
    arguments = parser.parse_args(argv)
    if arguments.processes < 1:
        parser.error("-n must be at least 1")
    if min(arguments.cpu_devices, arguments.gpus) < 0:
        parser.error("--cpu-devices and --gpus must not be negative")
    if not all(arguments.hosts.split(",")) and arguments.hosts:
        parser.error("--hosts contains an empty name")
    return arguments


def follow() -> None:
    """Makes Linux send this process SIGTERM when the launcher dies, so that it saves and stops."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port() -> int:
    """Returns a port that no process of this machine uses at the moment."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def environment_of(index: int, count: int, address: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables that process `index` gets in addition to those of this process."""
    variables = {
        **({} if arguments.hosts or arguments.coordinator else {"JAX_COORDINATOR_BIND_ADDRESS": address}),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
    }
    if arguments.cpu_devices:
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(arguments.cpu_devices)}
    if arguments.gpus:
        first = 0 if arguments.hosts else index * arguments.gpus
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(first + gpu) for gpu in range(arguments.gpus))
    return variables


def command_of(command: list[str], variables: dict[str, str], host: str) -> list[str]:
    """Returns the command line of one process. On another host it runs in the folder of the same name."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    local = ["env", *settings, *command]
    if not host:
        return local
    # With a terminal (-tt), the remote process gets SIGHUP when the connection ends.
    return [*SSH, "-tt", host, f"cd {shlex.quote(os.getcwd())} && echo {STARTED}$$ && exec {shlex.join(local)}"]


def copy(index: int, stream: IO[bytes] | None, remote: dict[int, int]) -> None:
    """Copies the output of a process line by line. A progress line counts as a line each time it is redrawn.

    Puts the number of a process on another host into `remote`.
    """
    assert stream is not None
    rest = b""
    while part := os.read(stream.fileno(), 65536):
        *lines, rest = (rest + part).replace(b"\r", b"\n").split(b"\n")
        for line in filter(None, lines):
            if line.startswith(STARTED.encode()):
                remote[index] = int(line.removeprefix(STARTED.encode()))
            show(index, line.decode(errors="replace"))
    if rest:
        show(index, rest.decode(errors="replace"))


def show(index: int, line: str) -> None:
    """Prints a line of process `index`."""
    # One write, because several threads print: `print` would write the end of the line separately.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"[{index}] {line}\n")
        sys.stdout.flush()


def wait(processes: list[subprocess.Popen[bytes]], grace: float) -> int:
    """Waits until all processes have ended. Returns the exit code of the first that failed, or 0.

    Exit code 4 follows the failure of another process: of several that failed since the last look, another code is
    the first one.
    """
    code, deadline = 0, float("inf")
    while None in (codes := [process.poll() for process in processes]):
        if not code and (failed := list(filter(None, codes))):
            code, deadline = first_of(failed), time.monotonic() + grace
        if time.monotonic() > deadline:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)
    code = code or first_of(list(filter(None, codes)))
    return 128 - code if code < 0 else code


def first_of(failures: list[int]) -> int:
    """Returns the code that did not follow from another failure, or 0 if none failed."""
    return next((code for code in failures if code != LOST), LOST if failures else 0)


if __name__ == "__main__":
    sys.exit(main())

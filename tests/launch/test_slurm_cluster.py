"""Runs launch/slurm.sbatch in a real Slurm cluster of one machine, which the tests start and stop."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.conftest import HASTY, ROOT, read_metrics, read_status

DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])
MISSING = [name for name in (*DAEMONS, "sbatch", "srun", "scontrol") if not shutil.which(name, path=PATH)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs Slurm (Debian: slurmctld slurmd slurm-client munge): {MISSING}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start Slurm's daemons"),
]

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
JobRequeue=0
SchedulerParameters=bf_interval=1,sched_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def wait_until(ready: Callable[[], bool], what: Callable[[], str], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


class Cluster:
    """A Slurm cluster of this machine. `folder` contains its files; jobs write their logs there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        conf = CONF.format(host=host, folder=self.folder, ports=free_ports(2))
        (self.folder / "slurm.conf").write_text(conf.lstrip())
        files = {
            "socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log",
            "seed-file": "munge.seed",
        }  # fmt: skip
        munged = ["munged", "--foreground", "--force", *(f"--{k}={self.folder / v}" for k, v in files.items())]
        for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (self.folder / f"{command[0]}.out").open("wb") as log:
                daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            self.daemons.append(daemon)
            time.sleep(1)
        wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T", check=False), self.logs)

    def stop(self) -> None:
        self.run("scancel", "--user=root", check=False)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.run("squeue", "--noheader", check=False), self.logs, 30)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(30)

    def run(self, *command: str, check: bool = True, variables: Mapping[str, str] | None = None) -> str:
        environment = self.environment | dict(variables or {})
        done = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out"))

    def submit(self, *command: str, options: tuple[str, ...] = (), **variables: str) -> "Job":
        output = self.run(
            "sbatch", "--parsable", f"--output={self.folder}/job-%j.log", *options,
            "launch/slurm.sbatch", *command, variables=variables,
        )  # fmt: skip
        return Job(self, output.strip())


class Job:
    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    @property
    def log(self) -> str:
        path = self.cluster.folder / f"job-{self.number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def field(self, name: str) -> str:
        text = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number)
        found = re.search(rf"\b{name}=(\S+)", text)
        assert found, text
        return found[1]

    def wait_for_log(self, text: str, seconds: float = 120.0) -> None:
        wait_until(lambda: text in self.log, lambda: self.log + self.cluster.logs(), seconds)

    def wait_for_end(self, state: str, seconds: float = 120.0) -> None:
        wait_until(lambda: self.field("JobState") == state, lambda: self.field("JobState") + self.log, seconds)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


# Imitates the program: it counts its starts in a file, saves at SIGUSR1 and SIGTERM, and finishes at its second start.
IMITATION = """
import os, signal, sys, time
starts, number = sys.argv[1], int(os.environ["SLURM_PROCID"])
def stop(number, frame):
    print("saved", flush=True)
    time.sleep(float(os.environ["SLURM_PROCID"]))
    sys.exit(128 + number)
for name in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(name, stop)
with open(f"{starts}.{number}", "a") as file:
    file.write("x")
start = len(open(f"{starts}.{number}").read())
print(f"process {number} of {os.environ['SLURM_NTASKS']}: start {start}", flush=True)
if start == 2:
    sys.exit(0)
time.sleep(600)
"""


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_signal_saves_requeues_and_resumes(cluster: Cluster, tmp_path: Path, tasks: int) -> None:
    script = tmp_path / "imitation.py"
    script.write_text(IMITATION)
    job = cluster.submit(
        sys.executable, str(script), str(tmp_path / "starts"), options=(f"--ntasks-per-node={tasks}",), GRACE="5"
    )
    job.wait_for_log(f"process {tasks - 1} of {tasks}: start 1")
    cluster.run("scancel", "--signal=USR1", job.number)
    job.wait_for_end("COMPLETED")
    assert job.field("Restarts") == "1"
    assert job.log.count("saved") == tasks
    assert "exit code 138: again" in job.log
    assert f"process 0 of {tasks}: start 2" in job.log
    assert "exit code 0: done" in job.log


@pytest.mark.parametrize(("flags", "name"), [(("--batch",), "USR1"), ((), "TERM")])
def test_signals_to_the_batch_shell_and_to_the_tasks(
    cluster: Cluster, tmp_path: Path, flags: tuple[str, ...], name: str
) -> None:
    script = tmp_path / "imitation.py"
    script.write_text(IMITATION)
    job = cluster.submit(sys.executable, str(script), str(tmp_path / "starts"))
    job.wait_for_log("start 1")
    cluster.run("scancel", *flags, f"--signal={name}", job.number)
    job.wait_for_end("COMPLETED")
    assert job.log.count("saved") == 1
    assert f"exit code {128 + getattr(signal, f'SIG{name}')}: again" in job.log


def test_the_signal_before_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "imitation.py"
    script.write_text(IMITATION)
    # Slurm checks time limits every 30 s, so the signal comes within the first minute.
    job = cluster.submit(sys.executable, str(script), str(tmp_path / "starts"), options=("--time=2",))
    job.wait_for_end("COMPLETED", 240)
    assert job.log.count("saved") == 1
    assert job.field("Restarts") == "1"


def test_a_cancelled_job_is_not_requeued(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "imitation.py"
    script.write_text(IMITATION)
    job = cluster.submit(sys.executable, str(script), str(tmp_path / "starts"))
    job.wait_for_log("start 1")
    cluster.run("scancel", job.number)
    job.wait_for_end("CANCELLED")
    job.wait_for_log("it is not requeued")
    time.sleep(5)
    assert job.field("JobState") == "CANCELLED"
    assert "start 2" not in job.log


def test_a_lost_host_is_retried(cluster: Cluster) -> None:
    job = cluster.submit("sh", "-c", "exit 4", MAX_RETRIES="1")
    job.wait_for_end("FAILED")
    assert job.field("Restarts") == "1"
    assert job.field("ExitCode") == "4:0"
    assert re.findall(r"slurm.sbatch: exit code (.*)", job.log) == ["4: retry", "4: stop"]


def test_the_first_failure_decides(cluster: Cluster) -> None:
    """Process 1 diverges, and srun kills process 0."""
    job = cluster.submit(
        "sh", "-c", "test $SLURM_PROCID = 0 || exit 3; sleep 600", options=("--ntasks-per-node=2",), GRACE="1"
    )
    job.wait_for_end("FAILED")
    assert job.field("Restarts") == "0"
    assert job.field("ExitCode") == "3:0"


def test_the_program_is_requeued_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    options = (*HASTY, "--config.train.steps=150", "--config.train.eval_every=0", "--config.train.checkpoint_every=0")
    command = [sys.executable, "main.py", *options, f"--workdir={tmp_path}"]
    job = cluster.submit(*command, options=("--ntasks-per-node=2",), JAX_PLATFORMS="cpu", GRACE="10")
    wait_until(lambda: (tmp_path / "metrics.jsonl").exists() and len(read_metrics(tmp_path)) > 5, lambda: job.log, 600)
    cluster.run("scancel", "--signal=USR1", job.number)
    job.wait_for_log("exit code 138: again")
    saved = read_status(tmp_path)
    assert saved["status"] == "preempted"
    job.wait_for_end("COMPLETED", 600)
    status = read_status(tmp_path)
    assert (status["status"], status["step"], status["processes"]) == ("done", 150, 2)
    assert f"from step {saved['step']}" in job.log
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(150))

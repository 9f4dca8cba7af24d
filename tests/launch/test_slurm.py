"""launch/slurm.sbatch with stand-ins for Slurm's commands; test_slurm_cluster.py runs it in a real cluster."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cases import quick_and_slow
from tests.conftest import ROOT
from tests.launch.stubs import Stubs

COMMAND = ("python", "main.py", "--workdir=a b")
REQUEUE = ["scontrol", "requeue", "7"]


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    stubs = Stubs(tmp_path, "srun", "scontrol", "scancel")
    stubs.answer("scontrol show job", "JobId=7 JobName=branchnorm JobState=RUNNING Restarts=0")
    return stubs


def submit(stubs: Stubs, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return stubs.run(
        "launch/slurm.sbatch", *command, **{"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT)} | variables
    )


@pytest.mark.parametrize(
    ("code", "requeued"),
    [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 0), (6, 0), (130, 1), (134, 1), (137, 1), (138, 1), (143, 1)],
)
def test_exit_code_decides_about_the_requeue(stubs: Stubs, code: int, requeued: bool) -> None:
    stubs.answer("^srun", code)
    done = submit(stubs, *COMMAND)
    assert done.returncode == code, done.stderr
    assert (REQUEUE in stubs.calls) == requeued


def test_retries_are_counted_across_requeues(stubs: Stubs) -> None:
    def codes(*expected: int) -> list[bool]:
        requeued = []
        for code in expected:
            stubs.forget()
            stubs.answer("^srun", code)
            submit(stubs, *COMMAND, SLURM_RESTART_COUNT=str(len(restarts)), MAX_RETRIES="2")
            restarts.append(code)
            requeued.append(REQUEUE in stubs.calls)
        return requeued

    restarts: list[int] = []
    assert codes(4, 4, 138) == [True, True, True]
    assert codes(4, 134, 4) == [True, True, False]
    assert not list(stubs.folder.parent.glob("slurm-*"))


def test_a_job_that_slurm_ends_is_not_requeued(stubs: Stubs) -> None:
    stubs.answer("^srun", 143)
    stubs.answer("scontrol show job", "JobId=7 JobState=CANCELLED Restarts=0")
    assert submit(stubs, *COMMAND).returncode == 143
    assert REQUEUE not in stubs.calls


def test_arguments_of_srun_and_sbatch(stubs: Stubs) -> None:
    assert submit(stubs, *COMMAND, SRUN_FLAGS="--container-image=a --cpu-bind=none").returncode == 0
    srun, *flags = stubs.calls[0]
    assert srun == "srun"
    assert flags[:5] == ["--kill-on-bad-exit=1", "--container-image=a", "--cpu-bind=none", "bash", "-c"]
    assert flags[6:] == ["task", *COMMAND]
    options = re.findall(r"^#SBATCH (\S+)$", (ROOT / "launch" / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=USR1@300", "--open-mode=append", "--ntasks-per-node=1"} <= set(options)


def test_dry_run_prints_and_runs_nothing(stubs: Stubs) -> None:
    done = stubs.run("launch/slurm.sbatch", *COMMAND, DRY_RUN="1", SLURM_SUBMIT_DIR=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert shlex.split(done.stdout)[:3] == ["srun", "--kill-on-bad-exit=1", "bash"]
    assert "'--workdir=a b'" in done.stdout or r"--workdir=a\ b" in done.stdout
    assert stubs.calls == []
    assert [path.name for path in stubs.folder.parent.iterdir()] == ["stubs"]


def test_a_missing_command_is_a_user_error(stubs: Stubs) -> None:
    assert submit(stubs).returncode == 2
    assert stubs.calls == []


@pytest.mark.parametrize("name", quick_and_slow(["USR1", "TERM"], ["USR1"]))
def test_signals_to_the_batch_shell_reach_the_tasks(stubs: Stubs, name: str) -> None:
    stubs.answer("^srun", (138, 3.0))
    process = stubs.start("launch/slurm.sbatch", *COMMAND, SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(ROOT))
    while not stubs.calls:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(getattr(signal, f"SIG{name}"))
    _, error = process.communicate(timeout=60)
    assert process.returncode == 138, error
    assert ["scancel", f"--signal={name}", "7"] in stubs.calls
    assert REQUEUE in stubs.calls


def run_task(folder: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs what srun starts in each task."""
    stubs = Stubs(folder, "srun", "scontrol")
    submit(stubs, *COMMAND)
    environment = os.environ | {"EXIT_FILE": str(folder / "exit"), "GRACE": "0", "SLURM_NTASKS": "2"} | variables
    return subprocess.run(
        ["bash", "-c", stubs.calls[0][4], "task", "sh", "-c", script], env=environment, text=True, capture_output=True
    )


@pytest.mark.parametrize(
    ("gpus", "tasks", "local", "expected"),
    [("8", "1", "0", "0,1,2,3,4,5,6,7"), ("8", "8", "3", "3"), ("8", "4", "1", "2,3"), ("", "1", "0", "")],
)
def test_tasks_share_the_gpus_of_their_node(tmp_path: Path, gpus: str, tasks: str, local: str, expected: str) -> None:
    done = run_task(
        tmp_path, 'echo "$JAX_LOCAL_DEVICE_IDS"',
        SLURM_GPUS_ON_NODE=gpus, SLURM_NTASKS_PER_NODE=tasks, SLURM_LOCALID=local,
    )  # fmt: skip
    assert done.stdout == expected + "\n", done.stderr


def test_task_records_the_first_failure(tmp_path: Path) -> None:
    assert run_task(tmp_path, "exit 3").returncode == 3
    assert (tmp_path / "exit").read_text() == "3\n"
    (tmp_path / "second").mkdir()
    other = run_task(tmp_path / "second", "exit 137", EXIT_FILE=str(tmp_path / "exit"))
    assert other.returncode == 137
    assert (tmp_path / "exit").read_text() == "3\n"


def test_first_failure_counts_rather_than_the_code_of_srun(tmp_path: Path) -> None:
    """The stand-in for srun runs one task, which diverges, but reports that it killed another."""
    stubs = Stubs(tmp_path, "scontrol")
    srun = stubs.folder / "srun"
    srun.write_text('#!/bin/bash\nshift\nSLURM_NTASKS=1 "$@"\nexit 137\n')
    srun.chmod(0o755)
    assert submit(stubs, "sh", "-c", "exit 3").returncode == 3
    assert stubs.calls == []

"""Processes of a run that die, hang, are missing or late: the others end soon, with one line and exit code 4."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branchnorm_jax.parallel import watchdog
from tests.conftest import HASTY, ROOT, read_status
from tests.parallel.processes import Hosts, losses, run_hosts

HOST = socket.gethostname()
HEARTBEAT = 10
OPTIONS = (
    *HASTY,
    "--config.train.steps=100000",
    "--config.train.eval_every=0",
    "--config.train.keep_last=100",
    f"--config.parallel.heartbeat_timeout={HEARTBEAT}",
)
ADVICE = "start the run again, it resumes from its last checkpoint"
DIED = f"process {{}} on host {HOST} was lost: its connection closed; {ADVICE}"
SILENT = f"process {{}} on host {HOST} was lost: it has been silent for {HEARTBEAT} s; {ADVICE}"

Ready = Callable[[], bool]


def in_update(workdir: Path) -> Ready:
    """A checkpoint is complete and the run goes on."""
    return lambda: (workdir / "checkpoints" / "10").is_dir() and len(losses(workdir)) > 12


def in_validation(workdir: Path) -> Ready:
    """The validation at step 13 follows update 12, and translates for a long time."""
    return lambda: (workdir / "metrics.jsonl").exists() and len(losses(workdir)) == 13


def in_save(workdir: Path) -> Ready:
    """The files of the second checkpoint are being written."""
    return lambda: any(path.name.startswith("20.") for path in (workdir / "checkpoints").glob("*tmp*"))


def disturbed(faulty: int, more: str = "") -> dict[str, Any]:
    """Arguments of `run_hosts` for a fault at update 8 in one process."""
    before = f"export FAULTY={faulty} PYTHONPATH={ROOT} {more}"
    return {"program": "tests/parallel/disturbed.py", "before": before, "devices": 1}


def check_resume(workdir: Path) -> None:
    """Resumes the run from its last checkpoint."""
    last = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())
    code, output = run_hosts(*OPTIONS, f"--workdir={workdir}", f"--config.train.steps={last + 3}", devices=1)
    assert code == 0, output
    assert f"training from step {last} to {last + 3}" in output
    assert "HostError" not in output
    assert read_status(workdir)["status"] == "done"
    assert len(losses(workdir)) == last + 3


def check_loss(
    workdir: Path, lost: int, number: signal.Signals, ready: Ready, *options: str, processes: int = 2
) -> None:
    hosts = Hosts(*OPTIONS, f"--workdir={workdir}", *options, processes=processes, devices=1, grace=15)
    hosts.read_until("compiled")
    code, lines, seconds = hosts.disturb(lost, number, ready)
    reason = (DIED if number == signal.SIGKILL else SILENT).format(lost)
    survivors = [index for index in range(processes) if index != lost]
    told = [line for line in lines if "] train: " not in line]
    assert sorted(told) == [f"[{index}] HostError: {reason}" for index in survivors]
    assert code == (137 if number == signal.SIGKILL else 4)
    assert seconds < (5 if number == signal.SIGKILL else HEARTBEAT + 10)
    if lost:
        assert (read_status(workdir)["status"], read_status(workdir)["reason"]) == ("failed", reason)


@pytest.mark.slow
def test_run_survives_the_death_of_a_process(tmp_path: Path) -> None:
    check_loss(tmp_path, 1, signal.SIGKILL, in_update(tmp_path))
    check_resume(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "number"),
    [(1, signal.SIGSTOP), (0, signal.SIGKILL), (0, signal.SIGSTOP)],
    ids=lambda value: f"{value!s}",
)
def test_lost_during_an_update(tmp_path: Path, lost: int, number: signal.Signals) -> None:
    check_loss(tmp_path, lost, number, in_update(tmp_path))
    check_resume(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_lost_during_a_validation(tmp_path: Path, lost: int) -> None:
    options = ("--config.train.eval_every=13", "--config.train.eval_bleu_sentences=500", "--config.decode.beam_size=4")
    check_loss(tmp_path, lost, signal.SIGKILL, in_validation(tmp_path), *options)
    assert (tmp_path / "validation.jsonl").read_text() == ""
    check_resume(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_lost_during_a_save(tmp_path: Path, lost: int) -> None:
    check_loss(tmp_path, lost, signal.SIGKILL, in_save(tmp_path))
    check_resume(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [2, 0])
def test_all_survivors_name_the_lost_process(tmp_path: Path, lost: int) -> None:
    options = ("--config.data.row_multiple=9",)
    check_loss(tmp_path, lost, signal.SIGKILL, in_update(tmp_path), *options, processes=3)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 1])
def test_run_without_progress_ends_with_stacks(tmp_path: Path, processes: int) -> None:
    """The stalled process is alive: its connection works and it is not silent."""
    options = (*OPTIONS, f"--workdir={tmp_path}", "--config.train.checkpoint_every=5")
    code, output = run_hosts(*options, processes=processes, **disturbed(processes - 1))
    assert code == 4, output
    who = f"process [01] on host {HOST} makes no progress" if processes > 1 else "no progress"
    line = rf"\[\d\] HostError: ({who}: update [89] has taken \d+ s, usually .* s; the stacks are above; {ADVICE})\n"
    told = re.findall(line, output)
    assert len(told) == processes
    assert len(set(told)) == 1
    assert re.search(rf"\[{processes - 1}\] +File .*disturbed\.py.* in read_with_fault", output), output
    assert (read_status(tmp_path)["status"], read_status(tmp_path)["reason"]) == ("failed", told[0])
    check_resume(tmp_path)


@pytest.mark.slow
def test_missing_process_is_named(tmp_path: Path) -> None:
    code, output = run_hosts(
        *HASTY,
        f"--workdir={tmp_path}",
        "--config.parallel.start_timeout=12",
        processes=3,
        grace=1,
        before="test $JAX_PROCESS_ID != 1 || exec sleep 100",
    )
    line = (
        "HostError: 2 of 3 processes came within parallel.start_timeout=12 s, without process 1; start all processes "
        "at the same time, or raise the timeout"
    )
    assert code == 4, output
    told = [line for line in output.splitlines() if "started as" not in line]
    assert sorted(told) == sorted(
        [f"[{index}] process {index} waits for process 1 to start" for index in (0, 2)]
        + [f"[{index}] {line}" for index in (0, 2)]
    )


@pytest.mark.slow
def test_missing_first_process_is_named(tmp_path: Path) -> None:
    code, output = run_hosts(
        *HASTY,
        f"--workdir={tmp_path}",
        "--config.parallel.start_timeout=3",
        grace=1,
        before="test $JAX_PROCESS_ID != 0 || exec sleep 100",
    )
    assert code == 4, output
    line = r"\[1\] HostError: process 0 of 2 is missing: it did not answer at 127\.0\.0\.1:\d+ within parallel\.start_"
    assert re.search(line, output), output
    assert output.count("HostError") == 1


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, 0])
def test_late_process_is_waited_for(late: int) -> None:
    begin = time.monotonic()
    code, output = run_hosts("--mode=methods", before=f"test $JAX_PROCESS_ID != {late} || sleep 60")
    assert code == 0, output
    assert time.monotonic() - begin > 60
    assert len(re.findall(rf"\[{1 - late}\] process {1 - late} waits for process {late}.* to start\n", output)) == 1
    assert output.count(" waits for ") == 1
    assert "HostError" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ("JAX_PROCESS_ID=$((JAX_PROCESS_ID > 0))", "there is already a process 1 on host"),
        ("JAX_NUM_PROCESSES=$((JAX_PROCESS_ID < 2 ? 3 : 4))", "it belongs to a run of 4 processes, process 0 to a run"),
    ],
)
def test_contradicting_numbers_are_rejected(settings: str, mistake: str) -> None:
    code, output = run_hosts("--mode=methods", processes=3, before=f"export {settings}")
    assert code == 2, output
    assert len(re.findall(rf"UserError: process \d on host {HOST} cannot join the run: {mistake}", output)) == 1, output


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [1, 0])
def test_failure_of_one_process_ends_the_others(tmp_path: Path, faulty: int) -> None:
    code, output = run_hosts(
        *OPTIONS, f"--workdir={tmp_path}", "--config.train.step_timeout=0", **disturbed(faulty, "FULL=1")
    )
    assert code == 5, output
    told = [line for line in output.splitlines() if "Error: " in line]
    failure = f"StorageError: {tmp_path}: No space left on device; earlier checkpoints are kept"
    follow = f"HostError: process {faulty} on host {HOST} ended with exit code 5; its own message says why"
    assert sorted(told) == sorted([f"[{faulty}] {failure}", f"[{1 - faulty}] {follow}"])


def test_watchdog_allows_several_usual_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK", 0.01)
    monkeypatch.setattr(watchdog, "SHORT", 0.0)
    ended: list[str] = []
    with watchdog.Watchdog(4, ended.append) as dog:
        for step, seconds in enumerate((0.2, 0.2, 0.4)):
            dog.begin("update", f"{step}")
            time.sleep(seconds)
        dog.begin("the validation", "at step 3")
        time.sleep(1.0)
        dog.begin("")
        time.sleep(1.0)
        assert ended == []
        dog.begin("update", "4")
        while not ended:
            time.sleep(0.01)
    assert re.fullmatch(r"update 4 has taken 1 s, usually 0\.2\d* s", ended[0])


@pytest.mark.slow
def test_paused_process_is_not_stuck() -> None:
    """The time in which a process is stopped, as by Ctrl-Z, does not count as time without progress."""
    program = (
        "import time\nfrom branchnorm_jax.parallel import watchdog\nwatchdog.SHORT, watchdog.TICK = 3.0, 0.1\n"
        "with watchdog.Watchdog(1, print) as dog:\n"
        "    for step in range(3):\n        dog.begin('update', f'{step}')\n        print('next', flush=True)\n"
        "        time.sleep(0.5)\n"
        "    dog.begin('update', '3')\n    print('paused', flush=True)\n    time.sleep(1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "paused\n":
        pass
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(4)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == ""

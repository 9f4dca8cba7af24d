"""Runs of several processes on this machine, started by launch/local.py with the unmodified main.py."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from branchnorm_jax.errors import UserError
from branchnorm_jax.options import ParallelConfig
from branchnorm_jax.parallel import hosts
from branchnorm_jax.parallel.meeting import parse_address
from tests.conftest import HASTY, ROOT, read_metrics, read_status, run_main
from tests.parallel.processes import losses, run_hosts, start_hosts

OPTIONS = (
    *HASTY,
    *("--config.train.steps=12", "--config.train.eval_every=6", "--config.train.checkpoint_every=6"),
)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process with four devices."""
    workdir = tmp_path_factory.mktemp("single") / "run"
    done = run_main(*OPTIONS, f"--workdir={workdir}", devices=4)
    assert done.returncode == 0, done.stderr
    return workdir


def scores(workdir: Path) -> list[float]:
    return [json.loads(line)["bleu"] for line in (workdir / "validation.jsonl").read_text().splitlines()]


def only_in_process_1(mount: str) -> str:
    """Returns the argument `before` of `run_hosts` that mounts files for process 1. Skips the test without root."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    return f'test $JAX_PROCESS_ID = 0 || exec unshare --mount sh -c \'{mount} && exec "$@"\' sh "$@"'


@pytest.mark.slow
def test_two_processes_train_like_one(single: Path, tmp_path: Path) -> None:
    code, output = run_hosts(*OPTIONS, f"--workdir={tmp_path}")
    assert code == 0, output
    np.testing.assert_allclose(losses(tmp_path), losses(single), rtol=1e-5)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(12))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert output.count("training a vocabulary") == output.count("training from step 0") == 1
    status = read_status(tmp_path)
    assert (status["status"], status["step"], status["processes"]) == ("done", 12, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "fsdp", "model"),
    [
        (2, 2, 2, 2),
        (4, 1, 1, 1),
        (2, 2, 1, 2),
        (2, 2, 1, 4),
        (2, 2, 2, 1),
        (2, 2, 4, 1),
    ],
)
def test_other_topologies_train_like_one_process(
    single: Path, tmp_path: Path, processes: int, devices: int, fsdp: int, model: int
) -> None:
    options = (*OPTIONS, f"--workdir={tmp_path}", f"--config.parallel.fsdp={fsdp}", f"--config.parallel.model={model}")
    code, output = run_hosts(*options, processes=processes, devices=devices)
    assert code == 0, output
    np.testing.assert_allclose(losses(tmp_path), losses(single), rtol=1e-5)
    share = re.search(r"mesh .*: ([\d.]+) % of the state on each device", output)
    assert share and float(share[1]) <= 100 / (fsdp * model) + 5
    status = read_status(tmp_path)
    assert (status["status"], status["processes"]) == ("done", processes)
    # One process restores the last checkpoint and computes the same digest.
    alone = run_main(*OPTIONS, f"--workdir={tmp_path}")
    assert alone.returncode == 0, alone.stderr
    assert read_status(tmp_path)["processes"] == 1
    assert read_status(tmp_path)["state_sha256"] == status["state_sha256"]


@pytest.mark.slow
def test_processes_share_the_translation_of_a_validation(tmp_path: Path) -> None:
    options = (*OPTIONS, "--config.train.eval_bleu_sentences=5", "--config.parallel.fsdp=2")
    done = run_main(*options, f"--workdir={tmp_path / 'one'}", devices=4)
    assert done.returncode == 0, done.stderr
    code, output = run_hosts(*options, f"--workdir={tmp_path / 'two'}")
    assert code == 0, output
    assert scores(tmp_path / "two") == pytest.approx(scores(tmp_path / "one"), abs=1e-3)


@pytest.mark.slow
def test_processes_share_an_evaluation_and_a_sweep(tmp_path: Path) -> None:
    """The first process alone writes and prints; other modes refuse several processes."""
    short = ("--config.train.steps=2", "--config.train.eval_every=0")
    sweep = ("--mode=sweep", *OPTIONS, *short, "--config.sweep.grid=method=branchnorm,rezero", f"--workdir={tmp_path}")
    code, output = run_hosts(*sweep, devices=1)
    assert code == 0, output
    assert output.count("| test BLEU |") == 1
    run = tmp_path / "branchnorm"
    texts = {path.name: path.read_text() for path in (run / "evaluation").iterdir()}
    before = json.loads((run / "results.json").read_text())
    done = run_main("--mode=evaluate", f"--workdir={run}")
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in (run / "evaluation").iterdir()} == texts
    assert json.loads((run / "results.json").read_text()) == before
    code, output = run_hosts("--mode=translate", f"--workdir={run}", devices=1)
    assert code == 2
    assert "--mode=translate runs in one process, but there are 2" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("receiver", "number"),
    [
        (1, signal.SIGTERM),
        (0, signal.SIGTERM),
        (0, signal.SIGUSR1),
        (1, signal.SIGUSR1),
        (0, signal.SIGINT),
        (1, signal.SIGINT),
    ],
)
def test_a_signal_at_one_process_stops_all_at_the_same_step(
    tmp_path: Path, receiver: int, number: signal.Signals
) -> None:
    options = (*HASTY, f"--workdir={tmp_path}")
    long = (*options, "--config.train.steps=100000", "--config.train.eval_every=0", "--config.train.checkpoint_every=0")
    process = start_hosts(*long)
    assert process.stdout is not None
    pids = {}
    for line in iter(process.stdout.readline, ""):
        if started := re.search(r"\[(\d)\] started as process (\d+)", line):
            pids[int(started[1])] = int(started[2])
        if "compiled" in line:
            break
    while not (tmp_path / "metrics.jsonl").exists() or len(losses(tmp_path)) < 5:
        time.sleep(0.1)
    subprocess.run(["kill", f"-{number.value}", str(pids[receiver])], check=True)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, output
    saved = {index: step for index, step in re.findall(r"\[(\d)\] Preempted: .* saved at step (\d+)", output)}
    assert set(saved) == {"0", "1"}
    assert len(set(saved.values())) == 1
    status = read_status(tmp_path)
    assert (status["status"], str(status["step"])) == ("preempted", saved["0"])
    assert (tmp_path / "checkpoints" / saved["0"]).is_dir()
    # On another topology the run goes on from there.
    steps = status["step"] + 3
    done = run_main(*long, f"--config.train.steps={steps}")
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(steps))


@pytest.mark.slow
def test_resumed_processes_equal_uninterrupted_ones_bit_for_bit(tmp_path: Path) -> None:
    for workdir, stops in ((tmp_path / "once", [12]), (tmp_path / "twice", [7, 12])):
        for steps in stops:
            code, output = run_hosts(*OPTIONS, f"--workdir={workdir}", f"--config.train.steps={steps}")
            assert code == 0, output
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    assert read_status(tmp_path / "twice")["state_sha256"] == read_status(tmp_path / "once")["state_sha256"]


@pytest.mark.slow
def test_runs_that_resume_on_other_devices_equal_an_uninterrupted_one(single: Path, tmp_path: Path) -> None:
    """4, 2, 1 and 8 devices in turn, with another mesh each time."""
    meshes = ((3, 2, 2, 2), (6, 2, 1, 1), (9, 1, 1, 1), (12, 2, 4, 4))
    for steps, processes, devices, fsdp in meshes:
        options = (f"--workdir={tmp_path}", f"--config.train.steps={steps}", f"--config.parallel.fsdp={fsdp}")
        code, output = run_hosts(*OPTIONS, *options, processes=processes, devices=devices)
        assert code == 0, output
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(12))
    np.testing.assert_allclose(losses(tmp_path), losses(single), rtol=1e-5)


@pytest.mark.slow
def test_processes_with_different_options_are_rejected(tmp_path: Path) -> None:
    flags = "--config.train.learning_rate=0.00$((JAX_PROCESS_ID + 1))"
    code, output = run_hosts(*OPTIONS, f"--workdir={tmp_path}", flags=flags)
    assert code == 2, output
    line = r"UserError: train.learning_rate is '0.002' in process 1 on \S+, but '0.001' in process 0 on \S+; all "
    assert len(re.findall(line, output)) == 2, output


@pytest.mark.slow
def test_processes_with_different_code_are_rejected(tmp_path: Path) -> None:
    """Process 1 runs in a copy of the checkout with another commit."""
    copy = tmp_path / "copy"
    git = "git -c user.name=x -c user.email=x@example.com"
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    subprocess.run(f"{git} commit --quiet --allow-empty -m other", shell=True, cwd=copy, check=True)
    code, output = run_hosts(
        *OPTIONS, f"--workdir={tmp_path / 'run'}", before=f"test $JAX_PROCESS_ID = 0 || cd {copy}", devices=1
    )
    assert code == 2, output
    revisions = [
        subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True).stdout.strip()
        for folder in (copy, ROOT)
    ]
    line = rf"UserError: git revision is '{revisions[0]}' in process 1 on \S+, but '{revisions[1]}\+?' in process 0 on"
    assert len(re.findall(line, output)) == 2, output


@pytest.mark.slow
def test_processes_with_different_vocabularies_are_rejected(tmp_path: Path) -> None:
    """Process 1 sees another file in place of the vocabulary of the workdir, as with a stale network file system."""
    for name, size in (("run", 300), ("other", 290)):
        options = (
            *OPTIONS,
            f"--config.data.vocab_size={size}",
            "--config.train.steps=1",
            f"--workdir={tmp_path / name}",
        )
        assert run_main(*options).returncode == 0
    file = "vocabulary/source.model"
    mount = f"mount --bind {tmp_path / 'other' / file} {tmp_path / 'run' / file}"
    code, output = run_hosts(
        *OPTIONS,
        f"--workdir={tmp_path / 'run'}",
        before=only_in_process_1(mount),
        devices=1,
    )
    assert code == 2, output
    line = r"UserError: hash of vocabulary is '[0-9a-f]+' in process 1 on \S+, but '[0-9a-f]+' in process 0 on"
    assert len(re.findall(line, output)) == 2, output


@pytest.mark.slow
def test_all_processes_restore_the_checkpoint_that_all_can_read(tmp_path: Path) -> None:
    """Process 1 sees rubbish in place of the newest checkpoint."""
    run, rubbish = tmp_path / "run", tmp_path / "rubbish"
    rubbish.write_text("rubbish")
    assert run_main(*OPTIONS, f"--workdir={run}", devices=2).returncode == 0
    mount = f"for file in {run}/checkpoints/12/training/d/*; do mount --bind {rubbish} $file; done"
    code, output = run_hosts(
        *OPTIONS,
        f"--workdir={run}",
        "--config.train.steps=15",
        before=only_in_process_1(mount),
        devices=1,
    )
    assert code == 0, output
    assert re.search(r"checkpoint 12 in .* is damaged \(.*\); trying the previous one\n", output), output
    assert "training from step 6 to 15" in output
    assert [line["step"] for line in read_metrics(run)] == list(range(15))


@pytest.mark.slow
def test_processes_save_and_stop_when_the_launcher_dies(tmp_path: Path) -> None:
    """Their output goes nowhere from then on."""
    process = start_hosts(*HASTY, f"--workdir={tmp_path}", "--config.train.steps=100000", devices=1)
    assert process.stdout is not None
    pids: list[str] = []
    while not (tmp_path / "metrics.jsonl").exists() or len(losses(tmp_path)) < 5:
        pids += re.findall(r"started as process (\d+)", process.stdout.readline()) if len(pids) < 2 else []
        time.sleep(0.1)
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(600):
        if not any(Path("/proc", pid).exists() for pid in pids):
            break
        time.sleep(0.1)
    assert len(pids) == 2 and not any(Path("/proc", pid).exists() for pid in pids)
    status = read_status(tmp_path)
    assert status["status"] == "preempted"
    assert (tmp_path / "checkpoints" / str(status["step"])).is_dir()


@pytest.mark.slow
def test_a_signal_before_the_first_update_stops_all_processes(tmp_path: Path) -> None:
    """JAX installs a handler of its own for SIGTERM when the processes connect."""
    process = start_hosts(*HASTY, f"--workdir={tmp_path}", "--config.data.numerals_pairs=300000", devices=1)
    assert process.stdout is not None
    pids: dict[str, int] = {}
    while "training a vocabulary" not in (line := process.stdout.readline()):
        if started := re.search(r"\[(\d)\] started as process (\d+)", line):
            pids[started[1]] = int(started[2])
    os.kill(pids["0"], signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    assert "Preempted: stopped by signal 15" in output


def test_only_a_described_run_has_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of Slurm is no run: neither its shell nor a step of one process."""
    joined: list[int] = []

    def place(timeout: int) -> tuple[str, int, int, None]:
        joined.append(timeout)
        return "a:1", 1, 0, None

    monkeypatch.setattr(hosts, "_place", place)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: None)
    allocation = {"SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "8"}
    for variables, expected in (
        ({}, 0),
        (allocation, 0),
        (allocation | {"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, 0),
        (allocation | {"SLURM_STEP_NODELIST": "a"}, 1),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a", "JAX_COORDINATOR_ADDRESS": "a:1"}, 1),
    ):
        for name in ("SLURM_NTASKS", *hosts.LAUNCHERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        joined.clear()
        hosts.start(ParallelConfig())
        assert len(joined) == expected, variables


@pytest.mark.parametrize(
    ("address", "count", "index", "message"),
    [
        ("a", "2", "0", "the address a is not host:port"),
        ("a:99999", "2", "0", "the address a:99999 is not host:port, with a port from 1 to 65535"),
        ("a:0", "2", "0", "the address a:0 is not host:port"),
        ("::1", "2", "0", "the address ::1 is not host:port"),
        ("http://a:1", "2", "0", "the address http://a:1 is not host:port"),
        ("a:-1", "2", "0", "the address a:-1 is not host:port"),
        ("a:1", "0", "0", "JAX_NUM_PROCESSES=0, but a run has at least one process"),
        ("a:1", "2", "2", "JAX_PROCESS_ID=2, but the 2 processes have the numbers 0 to 1"),
    ],
)
def test_wrong_descriptions_are_one_line(
    monkeypatch: pytest.MonkeyPatch, address: str, count: str, index: str, message: str
) -> None:
    for name, value in zip(
        ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"), (address, count, index), strict=True
    ):
        monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(UserError, match=f"^the processes of the run are described wrongly: {message}"):
        hosts.start(ParallelConfig())


def test_addresses() -> None:
    addresses = {"a.b:1": ("a.b", 1), "[::]:1234": ("::", 1234), "[fe80::1%eth0]:65535": ("fe80::1%eth0", 65535)}
    assert {text: parse_address(text) for text in addresses} == addresses
    assert parse_address(":5") == ("", 5)


@pytest.mark.slow
def test_workdirs_that_are_not_shared_are_rejected(tmp_path: Path) -> None:
    code, output = run_hosts(*OPTIONS, flags=f"--workdir={tmp_path}/$JAX_PROCESS_ID")
    assert code == 2, output
    assert re.search(r"\[1\] UserError: .*/1 on \S+ is not the workdir of process 0; --workdir must be", output), output


@pytest.mark.slow
def test_second_run_in_a_workdir_is_rejected_by_all_processes(tmp_path: Path) -> None:
    first = start_hosts(*HASTY, f"--workdir={tmp_path}", "--config.train.steps=100000")
    try:
        while not (tmp_path / "metrics.jsonl").exists():
            time.sleep(0.1)
        code, output = run_hosts(*HASTY, f"--workdir={tmp_path}")
        assert code == 2, output
        assert output.count("another process is training in this workdir") == 2
    finally:
        first.terminate()
        first.communicate()


def test_local_launcher_ignores_the_signals_that_nohup_ignores(tmp_path: Path) -> None:
    """Its processes must not get SIGTERM in place of SIGHUP."""
    signalled = tmp_path / "signalled"
    program = "import pathlib, time; print('ready', flush=True)\n"
    program += f"while not pathlib.Path({str(signalled)!r}).exists(): time.sleep(0.01)\n"
    program += "print('alive')"
    launcher = [sys.executable, "launch/local.py", "-n", "1", "--", sys.executable, "-c", program]
    process = subprocess.Popen(["nohup", *launcher], cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if "ready" in line:
            break
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)  # A launcher that passes the signal on would do so before the file exists.
    signalled.touch()
    output, _ = process.communicate(timeout=60)
    assert "alive" in output
    assert process.returncode == 0


def test_local_launcher_prints_its_commands() -> None:
    launcher = [sys.executable, "launch/local.py"]
    done = subprocess.run(
        [*launcher, "-n", "2", "--gpus", "2", "--coordinator", "a:1", "--dry-run", "--", "python", "main.py"],
        cwd=ROOT, text=True, capture_output=True, check=True,
    )  # fmt: skip
    common = "env JAX_COORDINATOR_ADDRESS=a:1 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID="
    assert done.stdout.splitlines() == [
        f"{common}0 JAX_LOCAL_DEVICE_IDS=0,1 python main.py",
        f"{common}1 JAX_LOCAL_DEVICE_IDS=2,3 python main.py",
    ]
    done = subprocess.run(
        [*launcher, "--hosts", "me@x,me@y", "--dry-run", "--", "python", "main.py"],
        cwd=ROOT, text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert [line.split()[:5] for line in done.stdout.splitlines()] == [
        ["ssh", "-o", "BatchMode=yes", "-tt", host] for host in ("me@x", "me@y")
    ]
    assert done.stdout.count("JAX_COORDINATOR_ADDRESS=x:") == 2


SSH = """#!/bin/sh
# Like ssh, it leaves signals to itself, and ends with the code of its command.
while case $1 in -o) shift ;; -tt) ;; *) false ;; esac; do shift; done
shift
setsid sh -c "$1"
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_local_launcher_passes_signals_on_to_another_host(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    program = f"trap 'echo saved; exit {128 + number}' {number}; echo waits; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [sys.executable, "launch/local.py", "--hosts", "x,x", "--", "sh", "-c",
         f"test $JAX_PROCESS_ID = 0 || exit 0; {program}"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert process.stdout is not None
    while "[0] waits" not in process.stdout.readline():
        pass
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "[0] saved" in output


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("test $JAX_PROCESS_ID = 0 || exit 3; sleep 100", 3),
        ("test $JAX_PROCESS_ID = 1 || kill -9 $$; sleep 100", 137),
        (
            # Process 0 notices the failure of process 1 between two looks of the launcher.
            "if test $JAX_PROCESS_ID = 1; then (sleep 0.01; touch {noticed}) & exit 3; fi\n"
            "until test -e {noticed}; do :; done; exit 4",
            3,
        ),
    ],
)
def test_first_failure_ends_all_processes(tmp_path: Path, script: str, code: int) -> None:
    started = time.monotonic()
    script = script.format(noticed=tmp_path / "noticed")
    done = subprocess.run(
        [sys.executable, "launch/local.py", "-n", "2", "--grace", "1", "--", "sh", "-c", script],
        cwd=ROOT, capture_output=True,
    )  # fmt: skip
    assert done.returncode == code
    assert time.monotonic() - started < 50

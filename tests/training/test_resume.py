"""Killed runs, with real processes and signals, lose nothing and end with identical results."""

import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from branchnorm_jax.training.logs import read_lines
from tests.conftest import HASTY, ROOT, TINY, kill_when, read_metrics, read_status, run_main, start_main


def logged(workdir: Path, steps: int) -> Callable[[], bool]:
    """Returns a function that tells whether the run has logged `steps` updates."""
    path = workdir / "metrics.jsonl"
    return lambda: path.exists() and len(path.read_bytes().splitlines()) >= steps


@pytest.fixture(scope="module")
def uninterrupted(trained: Path) -> tuple[str, list[dict]]:
    """Returns digest and metrics of the uninterrupted run."""
    return read_status(trained)["state_sha256"], read_metrics(trained)


@pytest.mark.slow
def test_interrupted_run_ends_bit_for_bit_the_same(uninterrupted: tuple[str, list[dict]], tmp_path: Path) -> None:
    options = (*TINY, f"--workdir={tmp_path}")
    moments = sorted(random.SystemRandom().sample(range(3, 70), 3))
    for moment in moments:
        process = start_main(*options)
        kill_when(process, logged(tmp_path, moment), signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, f"killed at {moments}"
        status = read_status(tmp_path)
        assert (status["status"], status["step"] % 10) == ("running", 0)
        assert moment - 20 < status["step"] <= len(read_metrics(tmp_path)) + 1

    process = start_main(*options)
    kill_when(process, logged(tmp_path, 75), signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, error
    (first, last) = re.findall(r"training from step (\d+) (?:.|\n)*: repeating updates \1 to (\d+), ", error)[0]
    assert int(first) <= moments[-1] - 1 <= int(last)
    status = read_status(tmp_path)
    assert status["status"] == "preempted"
    assert "saved at step" in error
    assert (tmp_path / "checkpoints" / str(status["step"])).is_dir()

    last = run_main(*options)
    assert last.returncode == 0, last.stderr
    assert f"from step {status['step']} to 120" in last.stderr
    digest, metrics = uninterrupted
    assert read_status(tmp_path)["state_sha256"] == digest, f"killed at {moments}"
    assert read_metrics(tmp_path) == metrics
    assert [line["step"] for line in metrics] == list(range(120))


@pytest.mark.slow
def test_ctrl_c_saves_and_exits_with_its_own_code(tmp_path: Path) -> None:
    process = start_main(*TINY, f"--workdir={tmp_path}")
    kill_when(process, logged(tmp_path, 3), signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    status = read_status(tmp_path)
    assert status["status"] == "preempted"
    assert (tmp_path / "checkpoints" / str(status["step"])).is_dir()
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_stop_waits_neither_for_all_programs_nor_for_a_validation(tmp_path: Path) -> None:
    """A validation is due at every step. The resumed run makes the one that the stop left out, and adds the score.

    The parameters hardly change, so that only the first validation is the best so far.
    """
    options = (
        *HASTY,
        "--config.train.steps=12",
        "--config.train.eval_every=1",
        "--config.train.checkpoint_every=1",
        "--config.train.keep_best=20",
        "--config.train.learning_rate=1e-30",
    )
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    validations = lambda folder: read_lines(folder / "validation.jsonl")  # noqa: E731

    process = start_main(*options, f"--workdir={workdir}")
    kill_when(process, (workdir / "status.json").exists, signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, error
    assert "stopping as soon as the state is saved" in error
    assert "stopped by signal 15 before the first update" in error
    assert read_status(workdir)["step"] == 0

    process = start_main(*options, f"--workdir={workdir}")
    kill_when(process, logged(workdir, 3), signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGINT, error
    step = read_status(workdir)["step"]
    assert f"saved at step {step}" in error
    assert validations(workdir)[-1]["step"] == step - 1

    for folder in (workdir, whole):
        done = run_main(*options, f"--workdir={folder}")
        assert done.returncode == 0, done.stderr
    assert [line["step"] for line in validations(whole)] == list(range(1, 13))
    assert validations(workdir) == validations(whole)
    assert read_metrics(workdir) == read_metrics(whole)
    assert read_status(workdir)["state_sha256"] == read_status(whole)["state_sha256"]
    for folder in (workdir, whole):
        scored = {path.parent.name for path in folder.glob("checkpoints/*/metrics")}
        assert scored == {str(number) for number in range(1, 13)}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_translation_at_any_time(trained: Path, number: signal.Signals) -> None:
    """If the signal interrupts the reading of a checkpoint, the checkpoint is not reported as damaged."""
    for tenths in range(4, 60, 7):
        process = start_main("--mode=translate", f"--workdir={trained}", stdin=subprocess.PIPE)
        time.sleep(tenths / 10)
        process.send_signal(number)
        try:
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
        # At the very start, Python or the operating system handles the signal in its default way.
        assert process.returncode in (128 + number, -number), (tenths, error)
        assert "damaged" not in error
        assert tenths < 10 or "Traceback" not in error


def test_signal_lost_just_before_the_end_sets_the_exit_code() -> None:
    """The alarm that repeats the signal would arrive while Python shuts down, and kill the process."""
    code = """
import gc, signal
from branchnorm_jax import cli
cli.heed_signals()
def once(*_):
    gc.callbacks.remove(once)
    signal.raise_signal(signal.SIGTERM)
gc.callbacks.append(once)
gc.collect()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (143, "done\n", "")


def test_signals_while_python_shuts_down_end_the_process() -> None:
    """The alarm that repeats a lost signal would arrive when Python has forgotten its handler, and kill the process."""
    code = """
import atexit, gc, signal, sys, time
class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)
slow = Slow()
@atexit.register
def late():
    gc.callbacks.append(once)
    gc.collect()
def once(*_):
    gc.callbacks.remove(once)
    signal.raise_signal(signal.SIGUSR1)
from branchnorm_jax import cli
cli.heed_signals()
sys.argv = ["main.py", "--mode=help"]
cli.command()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (128 + signal.SIGUSR1, "")
    assert "--mode" in done.stdout


def test_signals_during_garbage_collection_are_not_lost() -> None:
    code = """
import gc, os, signal, sys, time
from branchnorm_jax import cli
cli.heed_signals()
def once(*_):
    gc.callbacks.remove(once)
    signal.raise_signal(signal.SIGTERM)
gc.callbacks.append(once)
try:
    gc.collect()
    print("lost at first", flush=True)
    time.sleep(60)
except cli.Preempted as error:
    sys.exit(error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "lost at first\n", "")


def test_finished_runs_are_not_changed(trained: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, workdir], check=True)
    again = run_main(*TINY, f"--workdir={workdir}")
    assert again.returncode == 0, again.stderr
    assert "compiled" not in again.stderr
    done = f"it has made its {read_status(workdir)['step']} updates; to train longer, raise train.steps\n"
    assert f"this run is finished: {done}" in again.stderr
    assert read_metrics(workdir) == read_metrics(trained)
    assert read_status(workdir)["state_sha256"] == read_status(trained)["state_sha256"]


@pytest.mark.slow
def test_second_training_in_a_workdir_is_rejected(tmp_path: Path) -> None:
    first = start_main(*TINY, f"--workdir={tmp_path}", "--config.train.steps=100000")
    try:
        kill_when(first, logged(tmp_path, 1), signal.SIGCONT)
        second = run_main(*TINY, f"--workdir={tmp_path}")
        assert second.returncode == 2
        assert "another process is training" in second.stderr
    finally:
        first.kill()
        first.communicate()


@pytest.mark.slow
def test_damaged_checkpoints_are_reported_and_replaced_by_earlier_ones(
    uninterrupted: tuple[str, list[dict]], trained: Path, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, workdir], check=True)
    newest = max((workdir / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    assert newest.name == "120"
    # Flips one bit of a weight and stores it properly, so that only the checksums of this project can notice. A byte of
    # the data file would not do: that file also contains index nodes that no reader looks at.
    stored = {"driver": "ocdbt", "base": f"file://{newest / 'params'}/", "path": "decoder.cross.k.kernel/"}
    array = tensorstore.open({"driver": "zarr", "kvstore": stored}).result()
    weights = array.read().result().copy()
    weights.view(np.uint32).flat[100] ^= 1 << 20
    array.write(weights).result()
    resumed = run_main(*TINY, f"--workdir={workdir}")
    assert resumed.returncode == 0, resumed.stderr
    assert "checkpoint 120" in resumed.stderr
    assert "the checksums of its" in resumed.stderr
    assert "Traceback" not in resumed.stderr
    assert read_status(workdir)["state_sha256"] == uninterrupted[0]
    assert read_metrics(workdir) == uninterrupted[1]


SMALL_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_failed_save_ends_the_run_and_keeps_earlier_checkpoints(trained: Path, tmp_path: Path) -> None:
    """The operating system refuses files above 30 kB: a checkpoint's list of arrays (39 kB), but not a new log.

    The arrays themselves would not do: the storage library packs them into files whose size depends on the moment.
    """
    workdir = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, workdir], check=True)
    (workdir / "metrics.jsonl").unlink()
    longer = (*TINY, f"--workdir={workdir}", "--config.train.steps=150", "--config.train.log_every=10")
    refused = subprocess.run(
        [sys.executable, "-c", SMALL_FILES, "main.py", *longer], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 5, refused.stderr
    # The threads of the storage library may print before this message.
    assert "could not be written" in refused.stderr.strip().splitlines()[-1]
    assert read_status(workdir)["status"] == "failed"
    resumed = run_main(*longer)
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 120 to 150" in resumed.stderr


@pytest.mark.slow
def test_failed_saves_are_tried_again(uninterrupted: tuple[str, list[dict]], tmp_path: Path) -> None:
    """From update 1 to 45 the operating system refuses files above 30 kB, as in the test before."""
    process = start_main(*TINY, f"--workdir={tmp_path}", "--config.train.on_save_failure=warn")
    for update, limit in ((1, 30_000), (45, resource.RLIM_INFINITY)):
        kill_when(process, logged(tmp_path, update), signal.SIGSTOP)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        process.send_signal(signal.SIGCONT)
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert "training goes on" in error
    assert "Traceback" not in error
    status = read_status(tmp_path)
    assert status["failed_saves"] >= 3
    assert status["state_sha256"] == uninterrupted[0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["110", "120"]


def test_runs_without_a_valid_checkpoint_are_rejected(trained: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, workdir], check=True)
    for file in (workdir / "checkpoints").rglob("*"):
        if file.is_file() and file.stat().st_size > 200:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    resumed = run_main(*TINY, f"--workdir={workdir}")
    assert resumed.returncode == 2
    assert "none of the checkpoints" in resumed.stderr
    assert "Traceback" not in resumed.stderr

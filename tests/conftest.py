"""Shared fixtures, among them a tiny trained run, and helpers that start main.py as a user does."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent

TINY = (
    "--config=configs/numerals.py:2L-2L",
    "--config.model.width=16",
    "--config.model.ffn_width=24",
    "--config.model.heads=2",
    "--config.model.dropout=0.1",
    "--config.model.alpha_steps=10",
    "--config.model.remat=none",  # "auto" first traces an update to predict its memory
    "--config.data.numerals_pairs=600",
    "--config.data.vocab_size=300",
    "--config.data.max_length=128",
    "--config.data.batch_shapes=2",
    "--config.train.batch_tokens=1024",
    "--config.train.steps=120",
    "--config.train.warmup_steps=10",
    "--config.train.learning_rate=5e-3",
    "--config.train.schedule=inverse_sqrt",
    "--config.train.eval_every=60",
    "--config.train.checkpoint_every=10",
    "--config.train.log_every=1",
    "--config.train.eval_bleu_sentences=4",
    "--config.decode.beam_size=2",
    "--config.decode.max_length_a=1.0",
    "--config.decode.max_length_b=4",
)
"""Options for a run of a few seconds. Later options on a command line take precedence."""

HASTY = (
    *TINY,
    "--config.data.batch_shapes=1",
    "--config.train.best_metric=loss",
    "--config.train.eval_bleu_sentences=0",
    "--config.decode.beam_size=1",
    "--config.decode.max_length_a=0.1",
)
"""Options for tests in which neither the batches nor the translations matter."""


LONG = (
    "test_main.py",
    "test_every_method.py",
    "test_trouble.py",
    "test_preflight.py",
    "test_sweep.py",
)


def pytest_configure() -> None:
    """Restores Ctrl-C and removes time limits.

    Tests in the background ignore Ctrl-C, and the processes that they start would inherit this.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    compile_quickly()
    # Without limits, property tests do not fail on a busy machine.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def compile_quickly() -> None:
    """Lets this process, and not those that it starts, compile in two thirds of the time.

    Most of the tests' time is the compilation of programs that run for milliseconds, many of a single operation.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    if jax.__version_info__ < (0, 11):  # Later versions do not know the option.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
        with mock.patch.dict(os.environ, XLA_FLAGS=flags):
            jax.jit(lambda: 0)()  # XLA reads the variable once.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, so that none of them runs alone at the end: workers take whole files."""
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers of a test session share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def compile_cache(session_folder: Path) -> None:
    """Compiles each program once per test session, for all workers and for the processes that they start."""
    folder = str(session_folder / "compile_cache")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # main.py compiles as for a user.
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Frees the programs of a test file: thousands of programs exhaust the memory maps of a process."""
    yield
    jax.clear_caches()


def start_main(*options: str, devices: int = 1, **kwargs: Any) -> subprocess.Popen[str]:
    """Starts main.py in its own process, from the repository root."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, "main.py", *options],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def run_main(*options: str, stdin: str = "", devices: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs main.py to its end."""
    process = start_main(*options, devices=devices, stdin=subprocess.PIPE)
    out, error = process.communicate(stdin)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


def output_of(code: str, devices: int, **environment: str) -> str:
    """Returns what Python code prints in a process of its own, with some CPU devices."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    environment = {**os.environ, **flags, **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_status(workdir: Path) -> dict[str, Any]:
    """Returns the contents of status.json."""
    return json.loads((workdir / "status.json").read_text())


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """Returns metrics.jsonl without the wall times, the only values that may differ between equal runs."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets the system refuse to write beyond this size, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def kill_when(process: subprocess.Popen[str], ready: Callable[[], bool], number: signal.Signals) -> None:
    """Sends a signal once `ready` returns True; fails if the process ends or two minutes pass first."""
    for _ in range(12000):
        if ready():
            process.send_signal(number)
            return
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.01)
    process.kill()
    raise AssertionError("the process was not ready within two minutes")


@pytest.fixture(scope="session")
def trained(session_folder: Path) -> Path:
    """The workdir of a finished tiny run, created once. Tests read or copy it and never change it."""
    workdir, made = session_folder / "trained", session_folder / "trained.made"
    with (session_folder / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            done = run_main(*TINY, f"--workdir={workdir}")
            assert done.returncode == 0, done.stderr
            made.touch()
    return workdir

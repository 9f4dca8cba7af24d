"""Runs the command line in processes of its own."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from branchnorm_jax import cli

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = (sys.executable, "main.py")

TINY = (
    "--config=configs/numerals.py:2L-2L",
    "--config.model.width=16",
    "--config.model.ffn_width=24",
    "--config.model.heads=2",
    "--config.model.alpha_steps=10",
    "--config.model.remat=none",  # "auto" first traces an update to predict its memory
    "--config.data.numerals_pairs=300",
    "--config.data.vocab_size=300",
    "--config.data.max_length=128",
    "--config.data.batch_shapes=1",
    "--config.train.batch_tokens=512",
    "--config.train.steps=30",
    "--config.train.warmup_steps=10",
    "--config.train.learning_rate=5e-3",
    "--config.train.eval_every=15",
    "--config.train.checkpoint_every=5",
    "--config.train.log_every=1",
    "--config.train.best_metric=loss",
    "--config.train.eval_bleu_sentences=0",
    "--config.decode.beam_size=1",
    "--config.decode.max_length_a=1.0",
    "--config.decode.max_length_b=4",
)
"""Options of a run of 30 updates, which saves every fifth and validates twice."""


class Finished(NamedTuple):
    """A process that ended."""

    code: int
    out: str
    error: str

    @property
    def said(self) -> str:
        """The last line of stderr."""
        lines = self.error.strip().splitlines()
        return lines[-1] if lines else ""

    @property
    def fault(self) -> str:
        """What is wrong with the way it ended: "" unless it printed a traceback or crashed."""
        if "Traceback (most recent call last)" in self.error:
            return f"traceback: {self.said}"
        return f"exit code {self.code}: {self.said}" if self.code == 1 or self.code < 0 else ""


def environment(cache: Path) -> dict[str, str]:
    """Returns the environment of a process; all share the compiled programs in `cache`."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def start(
    options: Sequence[str], cache: Path, program: Sequence[str] = PROGRAM, **kwargs: Any
) -> subprocess.Popen[str]:
    """Starts main.py, or another program."""
    return subprocess.Popen(
        [*program, *options],
        cwd=ROOT,
        env=environment(cache),
        text=True,
        errors="replace",
        stdin=kwargs.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def run(
    options: Sequence[str],
    cache: Path,
    text: str | bytes = "",
    prepared: Callable[[], None] | None = None,
    seconds: float | None = None,
) -> Finished:
    """Runs main.py to its end, in a copy of a process that has imported its modules already.

    The processes of `start` import them again, which takes longer than many trials.

    Args:
      options: the command line.
      cache: folder of the compiled programs.
      text: what stdin contains.
      prepared: a function that the process calls first.
      seconds: the process is killed after this time; exit code -9.
    """
    os.environ.update(environment(cache))
    _CONTEXT.set_forkserver_preload(["faults.processes", *PRELOADED])
    with tempfile.TemporaryDirectory() as folder:
        names = [str(Path(folder) / name) for name in ("in", "out", "error")]
        Path(names[0]).write_bytes(text.encode() if isinstance(text, str) else text)
        process = _CONTEXT.Process(target=_main, args=(prepared, list(options), *names))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        out, error = (Path(name).read_text(encoding="utf-8", errors="replace") for name in names[1:])
    code = process.exitcode
    process.close()
    return Finished(1 if code is None else code, out, error)


def tiny_model(shared: Path) -> tuple[Path, Path]:
    """Trains the tiny model that several families read, unless it is there.

    It is beside `shared`, the folder of a family. Returns the folder of compiled programs, and the workdir.
    """
    folder = shared.with_name("tiny model")
    cache, workdir = folder / "compiled", folder / "model"
    if not (folder / "made").exists():
        done = run([*TINY, "--config.train.steps=200", f"--workdir={workdir}"], cache)
        if done.code:
            raise RuntimeError(done.error)
        (folder / "made").touch()
    return cache, workdir


_CONTEXT = multiprocessing.get_context("forkserver")

PRELOADED = (
    "branchnorm_jax.cli",
    *(f"branchnorm_jax.modes.{name}" for name in ("runs", "evaluate", "lines", "export")),
    "tensorboardX",
    "sacremoses",
)
"""Modules that most modes import. None of them starts the devices of JAX, or threads."""


def _main(prepared: Callable[[], None] | None, options: list[str], *names: str) -> None:
    """Runs main.py in this process, with files in place of stdin, stdout and stderr."""
    for number, (name, flags) in enumerate(zip(names, (os.O_RDONLY, *[os.O_WRONLY | os.O_CREAT] * 2), strict=True)):
        os.dup2(os.open(name, flags), number)
    os.chdir(ROOT)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, os.fdopen(number, "w" if number else "r", buffering=1, encoding="utf-8"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepared:
        prepared()
    sys.argv = ["main.py", *options]
    cli.command()

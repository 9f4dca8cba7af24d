"""Runs the command line in processes of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

TINY = (
    "--config=configs/numerals.py:2L-2L",
    "--config.model.width=16",
    "--config.model.ffn_width=24",
    "--config.model.heads=2",
    "--config.model.alpha_steps=10",
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


def start(options: Sequence[str], cache: Path, **kwargs: Any) -> subprocess.Popen[str]:
    """Starts main.py."""
    command = [sys.executable, "main.py", *options]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(cache),
        text=True,
        errors="replace",
        stdin=kwargs.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def run(options: Sequence[str], cache: Path, text: str | None = None) -> Finished:
    """Runs main.py to its end, with `text` on stdin."""
    process = start(options, cache, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE)
    out, error = process.communicate(text)
    return Finished(process.returncode, out, error)

"""What several modes need: a trained model, and lines from a stream."""

import os
import stat
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import BinaryIO, NamedTuple, TextIO

from branchnorm_jax.data.tokenizer import load_tokenizer
from branchnorm_jax.decoding.translate import Translator, make_model
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import BranchScale
from branchnorm_jax.options import Config
from branchnorm_jax.parallel.mesh import make_mesh
from branchnorm_jax.training import logs
from branchnorm_jax.training.checkpoint import Checkpoints
from branchnorm_jax.training.state import abstract_params
from branchnorm_jax.workdir import Workdir

CHUNK = 10_000
"""Lines of a file that are sorted by length and translated together."""


class Trained(NamedTuple):
    """A checkpoint ready for use: parameters, their step and alpha_t, and a translator around them."""

    translator: Translator
    params: Params
    branch_scale: BranchScale
    step: int


def load(config: Config, workdir: Workdir) -> Trained:
    """The checkpoint that `decode.checkpoint` names. Raises `UserError` if the workdir holds none."""
    if not (workdir / "config.json").exists():
        raise UserError(f"{workdir.path}: no training run in this workdir; train first (--mode=train)")
    tokenizer = load_tokenizer(workdir / "vocabulary")
    model = make_model(config.model, tokenizer)
    if tokenizer.sha256 != workdir.data_identity().get("vocabulary"):
        raise UserError(f"{workdir / 'vocabulary'}: not the vocabulary that this run was trained with; restore it")
    abstract = abstract_params(model, make_mesh(config.parallel, 0))
    params, alpha, step = Checkpoints(workdir / "checkpoints", config.train, logs.say, read_only=True).restore_params(
        config.decode.checkpoint, abstract
    )
    translator = Translator(model, tokenizer, config.decode, warn=logs.say)
    return Trained(translator, params, alpha, step)


def read_chunks(text: TextIO | None) -> Iterator[list[str]]:
    """Lines of a stream in lists: a file's in chunks of `CHUNK`; a pipe's or terminal's as soon as they are there.

    Raises:
      UserError: for invalid UTF-8, naming the line.
    """
    if text is None:
        raise UserError("stdin is closed; give the text with < file or through a pipe")
    stream = text.buffer
    patient = stat.S_ISREG(_mode(stream))
    queue: SimpleQueue[bytes | OSError | None] = SimpleQueue()

    def read() -> None:
        try:
            for line in stream:
                queue.put(line)
        except OSError as error:
            queue.put(error)
        queue.put(None)

    threading.Thread(target=read, daemon=True, name="stdin").start()
    number, ended = 0, False
    while not ended:
        lines: list[str] = []
        while len(lines) < CHUNK:
            try:
                raw = queue.get(block=patient or not lines)
            except Empty:
                break
            if raw is None:
                ended = True
                break
            if isinstance(raw, OSError):
                raise UserError(f"stdin, after line {number}: {raw.strerror or raw}")
            number += 1
            try:
                lines.append(raw.decode("utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                raise UserError(
                    f"stdin, line {number}: invalid UTF-8 ({error.reason} at byte {error.start})"
                ) from error
        if lines:
            yield lines


def _mode(stream: BinaryIO) -> int:
    try:
        return os.fstat(stream.fileno()).st_mode
    except OSError:
        return 0

"""What several modes need: a trained model, and lines from a stream."""

import itertools
import os
import stat
import threading
from collections.abc import Iterator
from queue import Empty, Queue
from typing import BinaryIO, NamedTuple

from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.translate import Member, Translator
from branchnorm_jax.errors import UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.options import Config
from branchnorm_jax.training import logs
from branchnorm_jax.training.digests import checksums
from branchnorm_jax.training.trained import find_run, network, restore_model
from branchnorm_jax.workdir import Workdir


class Trained(NamedTuple):
    """A checkpoint ready for use: parameters, their step and alpha_t, and a translator around them."""

    translator: Translator
    params: Params
    alpha: Alpha
    step: int

    @property
    def checksums(self) -> list[list[int]]:
        """What tells the models that vote from any others."""
        others = ((other.params, other.alpha) for other in self.translator.others)
        return [checksums(weights).tolist() for weights in ((self.params, self.alpha), *others)]


def load(config: Config, workdir: Workdir) -> Trained:
    """The checkpoint that `decode.checkpoint` names. Raises `UserError` if the workdir holds none."""
    tokenizer, model = network(config, workdir)
    params, alpha, step = restore_model(config, workdir, model, config.decode.checkpoint)
    paths = filter(None, map(str.strip, config.decode.ensemble.split(",")))
    others = tuple(member(path, tokenizer, config) for path in paths)
    for other in others:
        if config.decode.alignment_layer > (depth := other.model.config.decoder_layers):
            raise UserError(
                f"decode.alignment_layer={config.decode.alignment_layer}: a model of the ensemble has {depth}"
            )
    return Trained(Translator(model, tokenizer, config.decode, logs.say, others), params, alpha, step)


def member(path: str, tokenizer: Tokenizer, config: Config) -> Member:
    """A model of an ensemble: the checkpoint "workdir" (its best) or "workdir:checkpoint".

    Raises:
      UserError: if there is none, its vocabulary is not `tokenizer`, or its language tags come elsewhere.
    """
    theirs, workdir, which = find_run("decode.ensemble", path, config)
    its_tokenizer, model = network(theirs, workdir)
    if its_tokenizer.sha256 != tokenizer.sha256:
        raise UserError(f"decode.ensemble: {workdir.path} has another vocabulary; models that vote must share one")
    its_tags, tags = (data.tags if data.pairs else "none" for data in (theirs.data, config.data))
    if its_tags != tags:
        raise UserError(
            f"decode.ensemble: {workdir.path} was trained with data.tags={its_tags}, not {tags}; models that vote must "
            "be asked for a language in the same way"
        )
    params, alpha, _ = restore_model(theirs, workdir, model, which)
    return Member(model, params, alpha)


def read_chunks(stream: BinaryIO | None, name: str, most: int) -> Iterator[list[str]]:
    """Lines of a stream in lists: a file's `most` at a time; a pipe's or terminal's as soon as they are there.

    A byte-order mark at the beginning of the stream is left out.

    Raises:
      UserError: for what is not UTF-8, naming the line, or a stream that cannot be read.
    """
    if stream is None:
        raise UserError(f"{name} is closed; give the text with < file or through a pipe")
    number = 0
    for raw in _read_at_once(stream, most) if stat.S_ISREG(_mode(stream)) else _read_as_it_comes(stream, most):
        lines = []
        for line in raw:
            if isinstance(line, OSError):
                raise UserError(f"{name}, after line {number}: {line.strerror or line}")
            number += 1
            try:
                lines.append(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                where = f"{error.reason} at byte {error.start}"
                raise UserError(f"{name}, line {number}: not valid UTF-8 ({where}); convert it to UTF-8") from error
        yield lines


def lines_ahead(stream: BinaryIO | None) -> int:
    """Lines that a file still has, which is then where it was; 0 for what cannot be read twice, or not at all."""
    if stream is None or not stat.S_ISREG(_mode(stream)):
        return 0
    try:
        here = stream.tell()
        count = sum(1 for _ in stream)
        stream.seek(here)
    except OSError:  # `read_chunks` says where.
        return 0
    return count


def _read_at_once(stream: BinaryIO, most: int) -> Iterator[list[bytes | OSError]]:
    """A file's lines, `most` at a time."""
    while True:
        try:
            lines: list[bytes | OSError] = list(itertools.islice(stream, most))
        except OSError as error:
            lines = [error]
        if not lines:
            return
        yield lines


def _read_as_it_comes(stream: BinaryIO, most: int) -> Iterator[list[bytes | OSError]]:
    """What is there of the lines of a pipe or terminal, at most `most`; waits for the first.

    No more than the next `most` are read ahead: who writes faster waits, and a pipe of any size fits into memory.
    """
    queue: Queue[bytes | OSError | None] = Queue(most)

    # A file of its own: whoever closes one that another thread waits at must wait, too.
    descriptor = os.dup(stream.fileno())

    def read() -> None:
        try:
            with open(descriptor, "rb") as own:
                for line in own:
                    queue.put(line)
        except OSError as error:
            queue.put(error)
        queue.put(None)

    threading.Thread(target=read, daemon=True, name="stdin").start()
    ended = False
    while not ended:
        lines: list[bytes | OSError] = []
        while len(lines) < most:
            try:
                line = queue.get(block=not lines)
            except Empty:
                break
            if line is None:
                ended = True
                break
            lines.append(line)
        if lines:
            yield lines


def _mode(stream: BinaryIO) -> int:
    try:
        return os.fstat(stream.fileno()).st_mode
    except OSError:
        return 0

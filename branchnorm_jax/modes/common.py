"""Code shared by several modes: loading a trained model, and reading lines from a stream."""

import contextlib
import dataclasses
import itertools
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import BinaryIO, NamedTuple

import jax
import numpy as np

from branchnorm_jax.config import to_flat
from branchnorm_jax.data.lines import COMPRESSED, decompressed, unchanged
from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.glossary import NO_TERMS, Glossary, read_glossary
from branchnorm_jax.decoding.results import Translation
from branchnorm_jax.decoding.translate import Member, Translator
from branchnorm_jax.errors import MismatchError, MissingExtraError, UserError
from branchnorm_jax.model.coefficients import Alpha
from branchnorm_jax.model.parameters import Params
from branchnorm_jax.model.transformer import Transformer
from branchnorm_jax.options import Config, DecodeConfig
from branchnorm_jax.parallel import hosts
from branchnorm_jax.tokens import EOS, UNK
from branchnorm_jax.training import logs
from branchnorm_jax.training.digests import checksums
from branchnorm_jax.training.trained import find_run, network, restore, restore_model
from branchnorm_jax.workdir import Workdir

Sentences = list[list[int]]
"""Token ids, EOS last."""

CHUNK = 2000
"""Number of lines of a file that are sorted by length and translated together, and the most that a kill can lose."""

PAUSE = 0.05
"""Seconds without a line after which the lines read from a pipe are used."""

TOLERANCE = 1e-3
"""Largest accepted difference between the log-probabilities of a token in another library and in ours."""

LONGEST = 30
"""Tokens of the longest random sentence."""


class Trained(NamedTuple):
    """A checkpoint ready for use: a translator, the parameters, alpha_t and the step."""

    translator: Translator
    params: Params
    alpha: Alpha
    step: int

    @property
    def checksums(self) -> list[list[int]]:
        """Checksums of the leaves of each model of the ensemble, which identify the models."""
        others = ((other.params, other.alpha) for other in self.translator.others)
        return [checksums(weights).tolist() for weights in ((self.params, self.alpha), *others)]


def load(config: Config, workdir: Workdir) -> Trained:
    """Loads the checkpoint that `decode.checkpoint` names, and the other models of `decode.ensemble`.

    Raises:
      UserError: if the workdir has no such checkpoint, or a model of the ensemble does not fit.
    """
    tokenizer, model, params, alpha, step = restore(config, workdir)
    paths = filter(None, map(str.strip, config.decode.ensemble.split(",")))
    others = tuple(member(path, tokenizer, config) for path in paths)
    for other in others:
        if config.decode.alignment_layer > (depth := other.model.config.decoder_layers):
            raise UserError(
                f"decode.alignment_layer={config.decode.alignment_layer}: a model of the ensemble has {depth} decoder "
                "layers"
            )
    translator = Translator(model, tokenizer, config.decode, logs.say, others, data=config.data)
    return Trained(dataclasses.replace(translator, glossary=checked_glossary(config, translator)), params, alpha, step)


def checked_glossary(config: Config, translator: Translator) -> Glossary:
    """Reads `decode.glossary`. Raises `UserError` if the model cannot write one of its translations."""
    if not config.decode.glossary:
        return NO_TERMS
    glossary = read_glossary(Path(config.decode.glossary))
    for translation in glossary.all_translations:
        try:
            translator.encoded(translation)
        except UserError as error:
            raise UserError(f"decode.glossary={config.decode.glossary}: {error}") from error
    return glossary


def member(path: str, tokenizer: Tokenizer, config: Config) -> Member:
    """Loads a model of an ensemble from "workdir" (its best checkpoint) or "workdir:checkpoint".

    Raises:
      UserError: if the checkpoint does not exist, or if its vocabulary is not `tokenizer`'s or its `data.tags` differ.
    """
    theirs, workdir, which = find_run("decode.ensemble", path, config)
    its_tokenizer, model = network(theirs, workdir)
    if its_tokenizer.sha256 != tokenizer.sha256:
        raise UserError(f"decode.ensemble: {workdir.path} has a different vocabulary; an ensemble needs a shared one")
    its_tags, tags = (data.tags if data.pairs else "none" for data in (theirs.data, config.data))
    if its_tags != tags:
        raise UserError(
            f"decode.ensemble: {workdir.path} was trained with data.tags={its_tags}, not {tags}; all models of an "
            "ensemble need the same data.tags"
        )
    params, alpha, _ = restore_model(theirs, workdir, model, which)
    return Member(model, params, alpha)


def agree(config: Config, **facts: object) -> None:
    """Checks that all processes have the same options, code and packages, and the same `facts`. All must call it.

    Raises:
      UserError: if they differ.
    """
    if jax.process_count() > 1:
        code = {"git revision": logs.git_revision(), **logs.environment()["versions"]}
        hosts.agree(to_flat(config) | code | facts)


def count_split(results: Iterable[Sequence[Translation]]) -> int:
    """Returns the number of lines that were split, from the translations of each line."""
    return sum(bool(best.parts) for best, *_ in results)


def say_split(count: int, config: DecodeConfig, limit: int) -> None:
    """Prints how many lines were split, if any, because they had more than `limit` tokens."""
    if count and config.split == "auto":
        lines = "1 line" if count == 1 else f"{count:,} lines"
        logs.say(f"{lines} of more than {limit} tokens translated sentence by sentence (decode.split)")


def random_sentences(
    model: Transformer, count: int, absent: Sequence[int] = (), longest: int = LONGEST
) -> tuple[Sentences, Sentences]:
    """Returns random sources and targets with EOS, of pieces that text can have.

    Args:
      model: the model, which knows the unused target pieces.
      count: number of sentences.
      absent: source pieces to leave out.
      longest: most tokens of a sentence, if the model has that many positions.
    """
    most = min(LONGEST, longest, model.config.longest or LONGEST)
    rng = np.random.default_rng(0)

    def sentences(size: int, never: Sequence[int]) -> Sentences:
        ids = np.setdiff1d(np.arange(UNK + model.tags + 1, size), never)
        return [[*rng.choice(ids, rng.integers(1, most)).tolist(), EOS] for _ in range(count)]

    return sentences(model.source_vocab, absent), sentences(model.target_vocab, model.unused)


def compared(
    ours: Callable[[], list[np.ndarray]],
    theirs: Callable[[], list[np.ndarray]],
    what: str,
    kind: str,
    tolerance: float = TOLERANCE,
) -> float | None:
    """Compares the log-probabilities of tokens in this project and in another library.

    Args:
      ours: computes ours, one array per sentence.
      theirs: computes the same in the other library.
      what: which sentences these are, for the message.
      kind: "imported" or "exported", for messages.
      tolerance: the largest accepted difference.

    Returns:
      The largest difference, or None if the other library is not installed.

    Raises:
      MismatchError: if a difference is larger than `tolerance`.
      OSError: if the other library cannot open a file.
    """
    try:
        expected = theirs()
    except MissingExtraError as error:
        logs.say(f"the {kind} model was not checked: {error}")
        return None
    except RuntimeError as error:  # Safetensors and CTranslate2 have no exception of their own for this.
        if "unable to open file" not in str(error).lower():
            raise
        raise OSError(str(error)) from error
    # Without this, GPUs and TPUs would round the operands of products.
    with jax.default_matmul_precision("highest"):
        actual = ours()
    largest = float(np.abs(np.concatenate(actual) - np.concatenate(expected)).max())
    logs.say(f"largest difference of a token's log-probability over {what}: {largest:.2e}")
    if not largest <= tolerance:
        raise MismatchError(f"log-probabilities differ by {largest:.2e}, more than {tolerance}: nothing was {kind}")
    return largest


@contextlib.contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO | None, str]]:
    """Opens a file, or stdin if `path` is empty; yields the stream and its name.

    The text of a compressed file is in a temporary file, which can be read twice.

    Raises:
      UserError: if the file cannot be opened, or if it is compressed and damaged.
    """
    if not path:
        yield (sys.stdin.buffer if sys.stdin else None), "stdin"
        return
    with contextlib.ExitStack() as stack:
        try:
            file: BinaryIO = stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        if Path(path).suffix in COMPRESSED:
            file = stack.enter_context(tempfile.TemporaryFile())
            file.writelines(decompressed(Path(path)))
            file.seek(0)
        yield file, path


def read_chunks(stream: BinaryIO | None, name: str, most: int) -> Iterator[list[str]]:
    """Yields the lines of a stream in lists of at most `most`.

    Lines of a file come `most` at a time. Lines of a pipe or a terminal come as soon as they are available. A
    byte-order mark at the beginning of the stream is removed.

    Raises:
      UserError: if a line is not UTF-8 (the message gives its number), if the stream cannot be read, or if it is a file
        that changed while it was read.
    """
    if stream is None:
        raise UserError(f"{name} is closed; give the text with < file or through a pipe")
    regular = stat.S_ISREG(_mode(stream))
    with unchanged(stream, name) if regular else contextlib.nullcontext():
        yield from _decoded(_read_at_once(stream, most) if regular else _read_as_it_comes(stream, most), name)


def _decoded(chunks: Iterator[list[bytes | OSError]], name: str) -> Iterator[list[str]]:
    """Decodes the lines of `read_chunks`."""
    number = 0
    for raw in chunks:
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
    """Returns the number of unread lines of a file and keeps its position.

    Returns 0 for a stream that cannot be read twice, or not at all.
    """
    if stream is None or not stat.S_ISREG(_mode(stream)):
        return 0
    try:
        here = stream.tell()
        count = sum(1 for _ in stream)
        stream.seek(here)
    except OSError:  # `read_chunks` reports it.
        return 0
    return count


def _read_at_once(stream: BinaryIO, most: int) -> Iterator[list[bytes | OSError]]:
    """Yields the lines of a file, `most` at a time. A read error takes the place of a line."""
    while True:
        try:
            lines: list[bytes | OSError] = list(itertools.islice(stream, most))
        except OSError as error:
            lines = [error]
        if not lines:
            return
        yield lines


def _read_as_it_comes(stream: BinaryIO, most: int) -> Iterator[list[bytes | OSError]]:
    """Yields the available lines of a pipe or a terminal, at most `most` at a time; waits for the first.

    A list ends when no line comes for `PAUSE` seconds; at once on a terminal, where a person waits for the answer.
    Otherwise the first list would have one line, and programs for one line and for many would both be compiled. A
    thread reads at most `most` lines ahead. A faster writer has to wait, so a pipe of any length fits into memory. A
    read error takes the place of a line.
    """
    queue: Queue[bytes | OSError | None] = Queue(most)

    # A duplicate, because closing a file blocks while another thread waits to read from it.
    descriptor = os.dup(stream.fileno())

    def read() -> None:
        try:
            with open(descriptor, "rb") as own:
                for line in own:
                    queue.put(line)
        except OSError as error:
            queue.put(error)
        queue.put(None)

    ended, pause = False, 0.0 if os.isatty(descriptor) else PAUSE
    threading.Thread(target=read, daemon=True, name="stdin").start()
    while not ended:
        lines: list[bytes | OSError] = []
        while len(lines) < most:
            try:
                line = queue.get(timeout=pause if lines else None)
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

"""Hostile input: each line gives one line of output, or the input is refused in one line that says where.

Most trials translate or score a file in this process, with the functions that the command line uses. Others read a
file of pairs that is malformed or badly compressed, or start the command line with something odd as its input, its
output or its config.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import re
import resource
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from branchnorm_jax import config as configs
from branchnorm_jax.data.formats import UnpairedWarning, pairs_in
from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.decoding.engine import coarse
from branchnorm_jax.errors import BranchNormError, UserError, one_line
from branchnorm_jax.modes import lines as line_modes
from branchnorm_jax.modes.common import Trained, load, read_chunks
from branchnorm_jax.options import Config
from branchnorm_jax.workdir import Workdir
from faults import hostile
from faults.processes import Finished, run, tiny_model
from faults.trial import Family, Outcome, Trial

LINES = 250
"""Lines of a trial that translates or scores."""

FILES = 10
"""Files that a trial of the readers reads."""

SECONDS = 600.0
"""A command that takes longer hangs."""

MEMORY = 4 << 30
"""Bytes of data of a command that reads a long line or a file that compresses well."""

LONG = 100_000_000
"""Bytes of the longest line."""


def in_place(line: int, message: str) -> str:
    """Returns what is wrong with a refusal because of a line: "" if it names the line."""
    return "" if f"line {line}:" in message else f"refused, but not because of line {line}: {message[:200]}"


def lines_of(content: bytes) -> list[str]:
    """Returns the lines of an input file."""
    return [line.decode().rstrip("\r") for line in hostile.plain(content.removeprefix("\ufeff".encode()))]


def translate_lines(config: Config, trained: Trained, rng: random.Random, folder: Path) -> Outcome:
    """Translates or scores a file of `LINES` lines, a third of them unusual."""
    mode = rng.choice(("translate", "translate", "score"))
    content = hostile.lines(rng, LINES, mode == "score")
    changes: dict[str, Any] = {
        "format": rng.choice(("text", "text", "jsonl")),
        "nbest": rng.choice((1, 1, 2)) if mode == "translate" else 1,
        "split": rng.choice(("auto", "none", "sentences")),
        "token_scores": mode == "translate" and rng.random() < 0.2,
        "alignments": mode == "translate" and rng.random() < 0.05,
    }
    decode = dataclasses.replace(config.decode, **changes)
    config = dataclasses.replace(config, decode=decode)
    trained = trained._replace(translator=dataclasses.replace(trained.translator, config=decode))
    path = folder / "text"
    path.write_bytes(content)
    where = f"{mode}: {' '.join(f'{name}={value}' for name, value in changes.items())}"
    faulty = hostile.first_invalid(content)
    if mode == "score" and not faulty:
        faulty = next(
            (number for number, row in enumerate(lines_of(content), 1) if row.strip() and row.count("\t") != 1), 0
        )
    try:
        with path.open("rb") as stream, contextlib.redirect_stderr(io.StringIO()):
            chunks = read_chunks(stream, "text", line_modes.CHUNK)
            if mode == "score":
                found = [*line_modes.scored(config, trained, chunks, "text")]
            else:
                found = [*line_modes.translated(config, trained, chunks, 0, 0)]
    except BranchNormError as error:
        wrong = in_place(faulty, str(error)) if faulty else f"{LINES} good lines are refused: {error}"
        return Outcome(f"{LINES} lines, refused", where, str(error), error.exit_code, wrong=wrong)
    except Exception as error:
        return Outcome(f"{LINES} lines", where, wrong=f"{type(error).__name__}: {error}"[:300])
    printed = "".join(f"{line}\n" for each in found for line in each)
    wanted, given = LINES * decode.nbest if decode.format == "text" else LINES, printed.count("\n")
    wrong = f"line {faulty} is not refused" if faulty else ""
    lost = "" if given == wanted else f"{given} lines instead of {wanted}"
    if decode.format == "jsonl" and not lost and not wrong:
        pairs, rows = mode == "score", map(json.loads, printed.split("\n")[:-1])
        found_texts = [(row["source"], row["target"] if pairs else "") for row in rows]
        # An empty line of a file of pairs has two empty sides.
        expected = [line.partition("\t")[::2] if pairs else (line, "") for line in lines_of(content)]
        wrong = "" if found_texts == expected else "the texts are not those of the input"
    return Outcome(f"{LINES} lines", where, lost=lost, wrong=wrong)


def read_files(rng: random.Random, folder: Path) -> Outcome:
    """Reads files of pairs, most of them malformed or damaged; each must be refused, or lose nothing."""
    refusals = list[str]()
    kind = rng.choice((*hostile.FORMATS, "text"))
    for number in range(FILES):
        suffix = rng.choice(("", *hostile.COMPRESS))
        fault = rng.choice(("none", "mutated", "poison", "damaged", "changes"))
        rows = [rng.choice(hostile.pairs()) for _ in range(20)]
        if fault == "mutated":
            rows = [(hostile.mutated(en, rng), hostile.mutated(de, rng)) for en, de in rows]
        content = "".join(f"{en}\n" for en, _ in rows).encode()
        good = lines_of(content)
        if kind != "text":
            write, kept, poison = hostile.FORMATS[kind]
            content, good = write(rows).encode(), [kept(en) for en, _ in rows]
            if fault == "poison":
                *start, end = content.splitlines(keepends=True)
                start.insert(rng.randrange(len(start)), rng.choice(poison).encode())
                content = b"".join([*start, end])
        if fault == "poison" and rng.random() < 0.5:
            content, good = hostile.mutated_bytes(content, rng), []
        frames = hostile.compressed(content, suffix, rng)
        path = folder / f"{number}.{kind}{suffix}"
        path.write_bytes(hostile.damaged(frames, rng) if fault == "damaged" and suffix else b"".join(frames))
        where = f"{path.name}: {fault}"
        try:
            found = text_lines(path) if kind == "text" else (en for en, _ in pairs_in(path, ("en", "de")))
            with warnings.catch_warnings(record=True, category=UnpairedWarning) as said:
                warnings.simplefilter("always")
                texts = [*(changing(found, path, rng) if fault == "changes" else found)]
        except UserError as error:
            refusals.append(str(error))
            if fault in ("none", "mutated"):
                return Outcome("files", where, str(error), 2, wrong=f"a good file is refused: {error}")
            if not str(error).startswith(str(path)):
                return Outcome("files", where, str(error), 2, wrong="the refusal does not name the file")
            continue
        except Exception as error:
            return Outcome("files", where, wrong=f"{type(error).__name__}: {error}"[:300])
        if fault == "changes":
            return Outcome("files", where, wrong="a file that changed while it was read is not refused")
        left_out = sum(int(re.findall(r": (\d+) of", str(each.message))[0]) for each in said)
        if len(texts) + left_out != units_in(kind, content):
            lost = f"{len(texts)} texts and {left_out} left out instead of {units_in(kind, content)}"
            return Outcome("files", where, lost=lost)
        rest = iter(texts)
        if changed := [text for text in good if text not in rest]:
            return Outcome("files", where, wrong=f"a text was changed: {changed[0]!r}")
    return Outcome(f"{FILES} files of {kind}", f"{len(refusals)} refused", refusals[-1] if refusals else "")


def changing(texts: Iterator[str], path: Path, rng: random.Random) -> Iterator[str]:
    """Yields the texts of a file, which becomes shorter or longer after the first one."""
    yield next(texts)
    os.truncate(path, rng.choice((0, path.stat().st_size // 2, path.stat().st_size + 1)))
    yield from texts


def units_in(kind: str, content: bytes) -> int:
    """Returns the number of units in a file: of lines, of JSON lines that are not empty, or of units of TMX."""
    if kind == "tmx":
        return len(re.findall(rb"<tu>.*?</tu>", content, re.DOTALL))
    lines = hostile.plain(content)
    return len([line for line in lines if line.strip()]) if kind == "jsonl" else len(lines) - (kind == "tsv")


class Command(NamedTuple):
    """A command with odd input."""

    options: list[str]
    stdin: bytes = b""
    lines: int | None = None
    """Number of lines that it must print: -1 for any number, None if it must be refused."""
    place: str = ""
    """What a refusal must name."""
    prepared: Callable[[], None] | None = None


def limit_memory() -> None:
    """Limits the memory of this process."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def make(path: Path, how: str) -> Path:
    """Makes something that is not a regular file."""
    if how == "socket":
        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
            one.bind(path.name)
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "folder":
        path.mkdir()
    elif how == "dangling link":
        path.symlink_to("nothing")
    elif how == "unreadable":
        return Path("/proc/self/mem")
    return path


ODD = ("socket", "loop", "folder", "dangling link", "unreadable", "missing")

_GOOD = "from configs.numerals import get_config as good\n"

CONFIGS = {
    "raise ValueError('a\\nb')": False,
    "assert False": False,
    "import sys; sys.exit(0)": False,
    "raise OSError('\\udcff\\x1b')": False,
    "raise MemoryError": False,
    "import no_such_module": False,
    "def get_config(arg=''): return get_config(arg)": False,
    "def get_config(arg='')": False,
    "x = '\0'": False,
    "x = '\udcff'": False,
    "get_config = lambda arg='': None": False,
    "get_config = lambda arg='': {'model': 1}": False,
    "get_config = lambda arg='': 'config'": False,
    f"{_GOOD}config = good('')\nconfig.model.width = 'x'": False,
    f"{_GOOD}config = good('')\nconfig.decode.input = '\\0'\nget_config = lambda arg='': config": False,
    "import torch\nfrom configs.numerals import get_config": True,
    f"{_GOOD}get_config = lambda: good('1L-1L')": True,
    "print('hello')\nfrom configs.numerals import get_config": True,
}
"""Config files -> whether they are valid."""


def odd_input(rng: random.Random, folder: Path) -> Command:
    """Something else than a file as input or output."""
    name = rng.choice(("plain", "a\nb", "c\u2028d", "\udcff", " ", "-", "x" * 300))
    how, option = rng.choice(ODD), rng.choice(("input", "input", "output", "glossary"))
    path = folder / name
    if len(name) < 256:
        path = make(path, how)
    options = [f"--config.decode.{option}={path}"]
    if option == "output":
        (folder / "text").write_text("one\ntwo\n")
        written = how in ("loop", "dangling link", "missing") and len(name) < 256
        options.append(f"--config.decode.input={folder / 'text'}")
        return Command(options, b"", 0 if written else None, one_line(path.name))
    return Command(options, place=one_line(path.name))


def fifo(rng: random.Random, folder: Path) -> Command:
    """A named pipe as input."""
    content = hostile.lines(rng, 20, False)
    os.mkfifo(folder / "pipe")
    threading.Thread(target=lambda: (folder / "pipe").write_bytes(content), daemon=True).start()
    faulty = hostile.first_invalid(content)
    return Command([f"--config.decode.input={folder / 'pipe'}"], b"", None if faulty else 20, f"pipe, line {faulty}:")


def through_stdin(rng: random.Random, folder: Path) -> Command:
    """Text from stdin, also none at all."""
    count = rng.choice((0, 1, 30))
    content = hostile.lines(rng, count, False) if count else rng.choice((b"", b"\xef\xbb\xbf", b"\n", b"\0", b"\xff"))
    faulty = hostile.first_invalid(content)
    return Command([], content, None if faulty else len(hostile.plain(content)), f"line {faulty}:")


def long_line(rng: random.Random, folder: Path) -> Command:
    """A line that is longer than any sentence, between two others."""
    size = LONG if rng.random() < 0.1 else 100_000
    part = rng.choice((b"x", b"twenty-one ", b"\0", "e\u0301".encode(), b" "))
    text = b"one\n" + part * (size // len(part)) + b"\ntwo\n"
    return Command(["--config.decode.split=none"], text, 3, prepared=limit_memory)


def bomb(rng: random.Random, folder: Path) -> Command:
    """A corpus that is small, and large when decompressed."""
    suffix = rng.choice([suffix for suffix in hostile.COMPRESS if suffix])
    text = rng.choice((b"\n" * (1 << 18), (b"a" * 999 + b"\n") * (1 << 16), b"\0" * (1 << 26) + b"\n"))
    for lang in ("en", "de"):
        (folder / f"train.{lang}{suffix}").write_bytes(hostile.COMPRESS[suffix](text))
    options = [
        "--mode=clean",
        "--config.data.source=text",
        f"--config.data.path={folder}",
        "--config.clean.drop=script",
    ]
    return Command([*options, f"--config.clean.path={folder / 'out'}"], b"", 1, prepared=limit_memory)


def faulty_config(rng: random.Random, folder: Path) -> Command:
    """A config file that does something else than to return a config."""
    code, valid = rng.choice([*CONFIGS.items()])
    path = folder / rng.choice(("mine.py", "a b.py", "c\nd.py"))
    path.write_bytes(code.encode("utf-8", "surrogateescape"))
    # A value of the wrong form is named by its option.
    place = "config: decode.input=" if "decode.input" in code else one_line(path.name)
    return Command([f"--config={path}", "--mode=help", f"--workdir={folder}"], b"", -1 if valid else None, place)


COMMANDS: dict[str, Callable[[random.Random, Path], Command]] = {
    "no regular file": odd_input,
    "named pipe": fifo,
    "stdin": through_stdin,
    "long line": long_line,
    "compresses well": bomb,
    "config file": faulty_config,
}


def verdict(command: Command, done: Finished) -> tuple[str, str]:
    """Returns what was lost and what is wrong with the way a command ended."""
    if done.fault:
        return "", done.fault
    errors = [line for line in done.error.splitlines() if re.match(r"\w*Error: ", line)]
    if command.lines is None:
        # The name of an output can be too long for the storage: 5.
        if done.code in (2, 5) and len(errors) == 1 and done.error.endswith(f"{errors[0]}\n"):
            return "", "" if command.place in errors[0] else f"the message does not name {command.place!r}: {errors[0]}"
        return "", f"it should be refused in one line: exit code {done.code}, {done.error[-200:]!r}"
    if done.code:
        return "", f"it is refused: {done.said}"
    given = done.out.count("\n")
    return "" if command.lines in (given, -1) else f"{given} lines instead of {command.lines}", ""


def run_command(cache: Path, workdir: Path, rng: random.Random, folder: Path) -> Outcome:
    """Starts the command line with odd input."""
    name = rng.choice([*COMMANDS])
    command = COMMANDS[name](rng, folder)
    options = ["--mode=translate", f"--workdir={workdir}", *command.options]
    done = run(options, cache, command.stdin, command.prepared, SECONDS)
    lost, wrong = verdict(command, done)
    where = f"{name}: {' '.join(command.options)}"[:300]
    return Outcome(name, where, done.said if done.code else "", done.code, lost, wrong)


def prepare(shared: Path, seconds: float) -> Trial:
    """Trains a tiny model, unless it is there, and loads it."""
    cache, workdir = tiny_model(shared)
    config = configs.load(workdir / "config.json")
    config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, beam_size=2, max_input_length=32))
    # The programs of a tiny model run for milliseconds, so they need no optimisation.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

    @functools.cache
    def model() -> Trained:
        trained = load(config, Workdir(workdir))
        return trained._replace(translator=dataclasses.replace(trained.translator, rounding=coarse))

    def trial(rng: random.Random, folder: Path) -> Outcome:
        kind = rng.random()
        if kind < 0.2:
            return run_command(cache, workdir, rng, folder)
        if kind < 0.4:
            return read_files(rng, folder)
        return translate_lines(config, model(), rng, folder)

    return trial


FAMILY = Family(
    "Hostile input",
    f"Three trials of five translate or score {LINES} lines with characters that programs treat in a special way "
    "(control characters, line separators, bidirectional and combining characters, tags, markup), bytes that are not "
    f"UTF-8, and other line ends. One of five reads {FILES} files: TSV, JSON lines, TMX or text that is malformed, "
    "badly compressed, or changed while it is read. One of five starts the command line with a folder, a socket, a "
    "loop of links or a named pipe in place of a file, with a line of up to 100 MB, a file that compresses well, or a "
    "config file that fails. Each line must give one line of output, or the input must be refused in one line that "
    "names the place.",
    prepare,
    1_000,
)

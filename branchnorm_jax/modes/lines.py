"""--mode=translate and --mode=score: process lines and print the results in the order of the input."""

import collections
import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from branchnorm_jax.data.lines import COMPRESSED
from branchnorm_jax.data.tokenizer import Tags
from branchnorm_jax.decoding.languages import Languages
from branchnorm_jax.decoding.parts import has_several_sentences
from branchnorm_jax.decoding.results import Translation
from branchnorm_jax.decoding.sentences import Required
from branchnorm_jax.decoding.text import token_nll, windows
from branchnorm_jax.errors import UserError
from branchnorm_jax.files import lock, real, storing, write_atomically
from branchnorm_jax.modes.common import CHUNK, Trained, count_split, lines_ahead, load, opened, read_chunks, say_split
from branchnorm_jax.modes.output import json_line, plain_lines, to_json
from branchnorm_jax.options import Config
from branchnorm_jax.tokens import EOS
from branchnorm_jax.training import logs
from branchnorm_jax.training.trained import restore
from branchnorm_jax.workdir import Workdir


def translate(config: Config, workdir: Workdir) -> None:
    """Translates `decode.input` to `decode.output`, or stdin to stdout.

    A file is translated in chunks, each sorted by length. Lines of a pipe or a terminal are translated as they arrive.
    If the process is killed, the lines already written to an output file are kept.
    """
    workdir.check_config(config)
    d = config.decode
    if d.output:
        check_files(Path(d.input), Path(d.output), Path(d.glossary))
    trained = load(config, workdir)
    if d.output:
        translate_file(config, trained, Path(d.input), Path(d.output))
        return
    with opened(d.input) as (stream, name):
        for lines in translated(config, trained, read_chunks(stream, name, CHUNK), 0, lines_ahead(stream)):
            print(*lines, sep="\n", flush=True)


def check_files(source: Path, target: Path, glossary: Path = Path()) -> None:
    """Raises `UserError` if the paths are invalid, or if the translation would replace a file that is not its own.

    The check runs before the model is loaded, because these mistakes would otherwise appear late.
    """
    if source == Path():
        raise UserError("config: decode.output needs decode.input=<file>, because a restart reads the input again")
    if source.exists() and not source.is_file():
        raise UserError(f"decode.input={source}: decode.output needs a regular file, because a restart reads it again")
    with opened(str(source)):
        pass
    if target.suffix in COMPRESSED:
        raise UserError(f"decode.output={target}: the output is plain text; choose a name without {target.suffix}")
    if not target.absolute().parent.is_dir():
        raise UserError(f"decode.output={target}: its folder does not exist; the output cannot be a URL")
    if target.exists() and not target.is_file():
        # The finished file would replace whatever is at this path, even a device.
        raise UserError(f"decode.output={target}: not a regular file; leave decode.output empty to write to stdout")
    for path in (target, *partial(target)):
        for option, other in (("input", source), ("glossary", glossary)):
            if path.exists() and other.exists() and path.samefile(other):
                raise UserError(
                    f"decode.output={target}: {path} is decode.{option}, and would be replaced; choose another name"
                )
    read_record(target)


def partial(target: Path) -> tuple[Path, Path]:
    """Returns the file with the lines of a translation that is not complete, and the file that describes them."""
    target = real(target)  # If it is a link, the final replacement must hit the file, not the link.
    return target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")


class Request(NamedTuple):
    """What a list of input lines asks for: sources, languages, and what the translations must contain."""

    sources: list[str]
    tags: list[Tags]
    required: list[Required] | None


def requests(config: Config, trained: Trained, chunks: Iterator[list[str]], done: int) -> Iterator[Request]:
    """Takes chunks of lines apart.

    Args:
      config: options of the run.
      trained: the model.
      chunks: lists of input lines.
      done: number of lines before the first chunk.

    Raises:
      UserError: during iteration, if a line cannot be translated; the message names it.
    """
    languages, name = Languages(config.data, trained.translator.tokenizer), config.decode.input or "stdin"
    for lines in chunks:
        sources, tags = languages.split_tags(
            lines, config.decode.target_lang, done + 1, config.decode.source_lang, name
        )
        required = None
        if config.decode.target_prefix:
            pairs = pairs_of(sources, done, "prefix of the target", name)
            sources, required = [source for source, _ in pairs], [Required(prefix) for _, prefix in pairs]
        if config.decode.constraints:
            fields = [line.split("\t") for line in sources]
            sources = [source for source, *_ in fields]
            required = [Required(phrases=[*filter(None, map(str.strip, phrases))]) for _, *phrases in fields]
        for number, (needed, tag) in enumerate(zip(required or [], tags, strict=False), start=done + 1):
            check_required(trained, needed, tag, f"{name}, line {number}")
        yield Request(sources, tags, required)
        done += len(lines)


def translated(
    config: Config, trained: Trained, chunks: Iterator[list[str]], done: int, total: int
) -> Iterator[list[str]]:
    """Translates chunks of lines; yields the output lines of each chunk.

    Args:
      config: options of the run.
      trained: the model.
      chunks: lists of source lines.
      done: number of lines before the first chunk.
      total: number of lines of the input; 0 if unknown.
    """
    languages, split, hinted = Languages(config.data, trained.translator.tokenizer), 0, False
    name, hinted_at_tag = config.decode.input or "stdin", False
    for sources, tags, required in requests(config, trained, chunks, done):
        hinted_at_tag = hinted_at_tag or hint_at_tag(languages, sources, done, name)
        with logs.progress_bar(total or len(sources), done if total else 0, "line", "translate") as bar:
            results = trained.translator.translate(
                trained.params,
                trained.alpha,
                sources,
                (name, done + 1),
                bar.update,
                required,
                tags,
                config.decode.alignments,
            )
        hinted = hinted or hint_at_sentences(config, trained, sources, results, done, name)
        split += count_split(results)
        if config.decode.format == "jsonl":
            each = zip(sources, results, strict=True)
            yield [json_line(source, found, config.decode, trained.translator.tokenizer) for source, found in each]
        else:
            numbered = enumerate(results, start=done)
            yield [line for index, found in numbered for line in plain_lines(index, found, config.decode)]
        done += len(sources)
    say_split(split, config.decode, trained.translator.limit)


def hint_at_sentences(
    config: Config, trained: Trained, sources: list[str], results: list[list[Translation]], done: int, name: str
) -> bool:
    """Says which is the first line of several sentences that was not split; returns whether there is one.

    A model that was trained on single sentences often translates only one of them. Whether this one was is not known:
    its training text may be gone.
    """
    if config.decode.split != "auto" or config.decode.constraints:
        return False
    language = config.decode.source_lang or trained.translator.source_lang
    for number, (source, (best, *_)) in enumerate(zip(sources, results, strict=True), start=done + 1):
        if not best.parts and has_several_sentences(source, language):
            logs.say(
                f"{name}, line {number} has several sentences; if the model was trained on single ones, "
                "--config.decode.split=sentences translates each by itself"
            )
            return True
    return False


def hint_at_tag(languages: Languages, texts: list[str], done: int, name: str) -> bool:
    """Says which is the first line whose text contains a language tag; returns whether there is one."""
    for number, text in enumerate(texts, start=done + 1):
        if ignored := languages.ignored_tag(text):
            logs.say(f"{name}, line {number}: {ignored}")
            return True
    return False


def check_required(trained: Trained, required: Required, tags: Tags, where: str) -> None:
    """Raises `UserError` if the model cannot write a prefix or a phrase."""
    try:
        trained.translator.prefix(required.prefix, tags)
        for phrase in required.phrases:
            trained.translator.encoded(phrase)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def translate_file(config: Config, trained: Trained, source: Path, target: Path) -> None:
    """Translates a file; resumes an earlier translation of the same file with the same models and options.

    `target` is created when the translation is complete. Until then the finished lines are in `<target>.part`, and
    `<target>.part.json` records the source file, the models and the options of these lines. All lines are checked
    first: once the user has mended a faulty one, it is another file, and its translation begins again.
    """
    target, (part, record), stat = real(target), partial(target), source.stat()
    with opened(str(source)) as (stream, name):
        collections.deque(requests(config, trained, read_chunks(stream, name, CHUNK), 0), maxlen=0)
    made_of = config.decode.search
    made_of["file"] = [str(source.absolute()), stat.st_size, stat.st_mtime_ns]
    made_of["vocabulary"] = trained.translator.tokenizer.sha256
    made_of["models"] = trained.checksums
    made_of["terms"] = trained.translator.glossary.sha256
    with writable(part) as file:
        done, before = finished_lines(part), read_record(target)
        if done and before != made_of:
            changed = ", ".join(name for name in made_of if before.get(name) != made_of[name])
            logs.say(f"{part}: translating {done:,} lines again, because they were made with different {changed}")
            done = 0
        each = 1 if config.decode.format == "jsonl" else config.decode.nbest
        done = done // each // CHUNK * CHUNK
        os.truncate(part, end_of_line(part, done * each))  # Unlike `file.truncate`, its errors name the file.
        file.seek(0, os.SEEK_END)
        write_atomically(record, json.dumps(made_of))
        if done:
            logs.say(f"{part}: resuming after {done:,} finished lines")
        with opened(str(source)) as (stream, name):
            total, chunks = lines_ahead(stream), read_chunks(stream, name, CHUNK)
            for _ in range(done // CHUNK):
                next(chunks)
            kept = "it keeps the finished lines, and the same command continues after them"
            try:
                for lines in translated(config, trained, chunks, done, total):
                    with storing(part, kept):
                        append("".join(line + "\n" for line in lines).encode(), file)
            except KeyboardInterrupt:
                if part.stat().st_size:
                    logs.say(f"{part}: {kept}")
                raise
        with storing(target):
            os.replace(part, target)
            record.unlink()


def append(content: bytes, file: FileIO) -> None:
    """Writes to an unbuffered file, which may take a part at a time, and to the disk."""
    while content:
        content = content[file.write(content) :]
    os.fsync(file.fileno())


def read_record(target: Path) -> dict[str, Any]:
    """Returns what the partial translation of a target was made of; {} if there is none.

    Raises:
      UserError: if one of its two files is there and does not come from a translation.
    """
    part, record = partial(target)
    content: Any = {}
    if record.exists():
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(record.read_bytes())
        ours = isinstance(content, dict) and {"file", "models"} <= content.keys()
    else:
        ours = not part.exists() or not part.stat().st_size
    if not ours:
        found = record if record.exists() else part
        raise UserError(
            f"{found}: exists, and does not belong to a translation that was interrupted; move it away, or choose "
            "another decode.output"
        )
    return dict(content)


@contextlib.contextmanager
def writable(path: Path) -> Iterator[FileIO]:
    """Opens a file for appending, without a buffer that could fail when it is closed, and locks it.

    Raises:
      UserError: if the file cannot be opened, or another process has locked or just finished it.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "ab", buffering=0))
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}; choose another decode.output") from error
        lock(file, f"{path}: another process is writing this translation")
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise UserError(f"{path}: another process has just finished this translation")
        yield file


def finished_lines(path: Path) -> int:
    """Returns the number of line feeds in a file."""
    with open(path, "rb") as file:
        return sum(line.endswith(b"\n") for line in file)


def end_of_line(path: Path, count: int) -> int:
    """Returns the number of bytes in the first `count` lines."""
    with open(path, "rb") as file:
        return sum(len(line) for line, _ in zip(file, range(count), strict=False))


def pairs_of(lines: list[str], done: int, second: str, name: str) -> list[tuple[str, str]]:
    """Splits each line at the tab into two fields. A blank line gives two empty fields.

    Args:
      lines: the lines.
      done: number of lines before them, for error messages.
      second: description of the second field, for error messages.
      name: name of the input, for error messages.

    Raises:
      UserError: if a line does not have two fields.
    """
    pairs = []
    for number, line in enumerate(lines, start=done + 1):
        fields = line.split("\t") if line.strip() else ["", ""]
        if len(fields) != 2:
            found = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            raise UserError(f"{name}, line {number}: expected source<TAB>{second}, not {found}")
        pairs.append((fields[0], fields[1]))
    return pairs


def score(config: Config, workdir: Workdir) -> None:
    """Prints "log-probability<TAB>tokens", or an object, for each line "source<TAB>target".

    The logarithm is natural. Both numbers include EOS. A language model scores lines of text.
    """
    if config.decode.output:
        raise UserError("decode.output: --mode=score writes to stdout; redirect it with > file")
    workdir.check_config(config)
    if config.model.family == "decoder":
        return score_text(config, workdir)
    trained = load(config, workdir)
    with opened(config.decode.input) as (stream, name):
        for lines in scored(config, trained, read_chunks(stream, name, CHUNK), name):
            print(*lines, sep="\n", flush=True)


def scored(config: Config, trained: Trained, chunks: Iterator[list[str]], name: str) -> Iterator[list[str]]:
    """Scores chunks of lines; yields the output lines of each chunk.

    Args:
      config: options of the run.
      trained: the model.
      chunks: lists of lines "source<TAB>target".
      name: name of the input, for error messages.
    """
    languages, done, hinted = Languages(config.data, trained.translator.tokenizer), 0, False
    for lines in chunks:
        lines, tags = languages.split_tags(lines, config.decode.target_lang, done + 1, config.decode.source_lang, name)
        hinted = hinted or hint_at_tag(languages, [line.partition("\t")[0] for line in lines], done, name)
        pairs = pairs_of(lines, done, "target", name)
        fits = trained.translator.fits(pairs, tags)
        if not all(fits):
            number, longest = done + 1 + fits.index(False), trained.translator.engine.longest
            raise UserError(
                f"{name}, line {number}: longer than the {longest} positions of the model (model.max_positions); "
                "split it"
            )
        scores, printed = trained.translator.score(trained.params, trained.alpha, pairs, tags), list[str]()
        for (source, target), (log_prob, tokens) in zip(pairs, scores, strict=True):
            values = {"source": source, "target": target, "log_prob": round(log_prob, 6), "tokens": tokens}
            printed.append(to_json(values) if config.decode.format == "jsonl" else f"{log_prob:.6f}\t{tokens}")
        yield printed
        done += len(lines)


def score_text(config: Config, workdir: Workdir) -> None:
    """Prints "log-probability<TAB>tokens", or an object, for each line of the input, as a document of its own.

    The logarithm is natural. Both numbers include EOS.
    """
    context, stride = config.data.context, config.evaluate.stride_in(config.data.context)
    tokenizer, model, params, alpha, _ = restore(config, workdir)
    with opened(config.decode.input) as (stream, name):
        for lines in read_chunks(stream, name, CHUNK):
            encoded = tokenizer.encode_target(lines)
            starts = np.cumsum([0, *map(len, encoded)])
            tokens = np.array([EOS, *itertools.chain(*encoded)])
            chosen = windows(starts, context, stride)
            nll = token_nll(model, params, alpha, tokens, chosen, config.data, config.decode.batch_tokens)
            sums = np.add.reduceat(nll.astype(np.float64), starts[:-1])
            printed = []
            for line, log_prob, count in zip(lines, (-sums).tolist(), np.diff(starts).tolist(), strict=True):
                values = {"text": line, "log_prob": round(log_prob, 6), "tokens": count}
                printed.append(to_json(values) if config.decode.format == "jsonl" else f"{log_prob:.6f}\t{count}")
            print(*printed, sep="\n", flush=True)

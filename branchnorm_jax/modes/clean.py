"""--mode=clean: writes a copy of the text without faulty pairs, and says what was removed and why."""

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from branchnorm_jax.bucket import is_url
from branchnorm_jax.data.corpus import corpus_key, read_pairs
from branchnorm_jax.data.filters import CHUNK, Filter, load_filters, rejections
from branchnorm_jax.data.formats import Pair
from branchnorm_jax.data.quality import (
    FAULTS,
    Seen,
    describe,
    foreign,
    inspect,
    keys,
    overlap,
    without_entities,
)
from branchnorm_jax.data.report import usual_in
from branchnorm_jax.errors import UserError
from branchnorm_jax.files import atomic_directory, real
from branchnorm_jax.modes.gain import SourceGain
from branchnorm_jax.options import CleanConfig, Config, DataConfig
from branchnorm_jax.training import logs
from branchnorm_jax.workdir import Workdir

_BREAKS = re.compile("[\t-\r\x1c-\x1e\x85\u2028\u2029]+")
"""Characters that end a line or a field for some programs."""

Judged = tuple[Pair, list[str]]
"""A training pair with the reasons to remove it."""


def clean(config: Config, workdir: Workdir) -> None:
    """Writes the splits to `clean.path`, with the training pairs without a fault of `clean.drop` that pass the filters.

    The files are `train.<language>`, `valid.<language>`, `test.<language>`; `removed.tsv` with the number, the faults,
    the source and the target of each removed pair; and `clean.json` with the numbers. Each of several training corpora
    has files of its own, see `file_names`. With several language pairs, each has its own folder, which serves both
    directions.
    """
    c, data = config.clean, config.data
    if unknown := [name for name in c.dropped if name not in FAULTS]:
        raise UserError(f"config: clean.drop contains {unknown[0]!r}; use {', '.join(FAULTS)}")
    if "entities" in c.dropped and c.unescape:
        raise UserError("config: clean.drop=entities needs clean.unescape=False, which keeps entities")
    if is_url(c.path):
        raise UserError(f"clean.path={c.path}: this must be a folder")
    folder = Path(c.path).absolute() if c.path else workdir / "clean"
    if c.path and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"clean.path={folder}: it exists and is not an empty folder; choose a new folder")
    names = file_names(data)
    if inside := next((path for path in paths_of(data) if real(folder) in (real(path), *real(path).parents)), None):
        raise UserError(
            f"clean.path={folder}: this would replace the text itself, {inside}; choose another folder, or the "
            f"uncleaned data.path"
        )
    with atomic_directory(folder) as temporary:
        for one in texts(data):
            filters = load_filters(c.filters, one) if c.filters else []
            filters += [Filter("source_gain", SourceGain(config, one))] if c.score_with else []
            clean_pair(c, one, filters, temporary / one.pair if data.pairs else temporary)
    files = "{pair}/{split}.{lang}" if data.pairs else "{split}.{lang}"
    weighted = ",".join(f"{name}:{data.corpora()[index][1]:g}" for index, name in enumerate(names))
    logs.say(
        f"wrote {folder}; {removed_name(names, names[0])} lists the removed pairs; to train on it: "
        f"--config.data.path={folder} --config.data.files={files}"
        + (f" --config.data.train_split={weighted}" if len(names) > 1 else "")
    )
    print(folder)


def texts(data: DataConfig) -> Iterable[DataConfig]:
    """Returns the directions of the corpus, without those that have the text of an earlier one in the other order."""
    found: dict[str, DataConfig] = {}
    for one in data.directions():
        keys_of = [corpus_key(corpus, "train") for corpus, _ in one.corpora()]
        for key in keys_of:
            key["languages"] = sorted(key["languages"])
            key["files"] = sorted(map(str, itertools.chain(*key.get("files", []))))
        found.setdefault(json.dumps(keys_of), one)
    return found.values()


def paths_of(data: DataConfig) -> Iterator[Path]:
    """Yields the local folder and files of the training text."""
    if data.source == "text" and not is_url(data.path):
        yield Path(data.path).expanduser()
        for one in data.directions():
            for corpus, _ in one.corpora():
                files = [name for name, *_ in corpus_key(corpus, "train").get("files", [])]
                yield from (Path(name) for name in files if not is_url(name))


def file_names(data: DataConfig) -> list[str]:
    """Returns the names of the training corpora in the copy: "train" if there is only one.

    Raises:
      UserError: if two corpora would have the same name.
    """
    given = [corpus.train_split for corpus, _ in data.corpora()]
    names = ["train"] if len(given) == 1 else [re.sub(r"[^\w.-]+", "-", name) for name in given]
    if len(set(names)) < len(names) or {"valid", "test"} & {*names}:
        raise UserError(
            f"clean: the corpora {', '.join(given)} would be the files {', '.join(names)}, beside valid and test; "
            "rename the text files"
        )
    return names


def removed_name(names: list[str], name: str) -> str:
    """Returns the name of the file with the pairs removed from a corpus."""
    return "removed.tsv" if len(names) == 1 else f"removed.{name}.tsv"


def clean_pair(c: CleanConfig, data: DataConfig, filters: list[Filter], folder: Path) -> None:
    """Writes the files of one language pair; says what was removed.

    Raises:
      UserError: if no training pair is left.
    """
    folder.mkdir(exist_ok=True)
    held_out = copy_split(data, "valid", folder) | copy_split(data, "test", folder)
    # Duplicates of a pair of an earlier corpus are duplicates, too.
    names, numbers, seen = file_names(data), dict[str, Any](), Seen()
    for (corpus, _), name in zip(data.corpora(), names, strict=True):
        label = data.pair if len(names) == 1 else f"{data.pair} {name}"
        total, counts = sum(1 for _ in read_pairs(corpus, "train")), Counter[str]()
        with logs.progress_bar(total, 0, "pair", "clean") as bar:
            pairs = filtered(judged(c, corpus, held_out, counts, seen), filters)
            paths = [folder / f"{name}.{lang}" for lang in (data.source_lang, data.target_lang)]
            write_training_text(pairs, [*paths, folder / removed_name(names, name)], counts, bar.update)
        removed = {fault: counts[fault] for fault in (*c.dropped, *(one.name for one in filters)) if counts[fault]}
        for fault, number in removed.items():
            logs.say(f"{label}: removed {describe(fault, number)}")
        if counts["unescaped"]:
            logs.say(f"{label}: changed {describe('entities', counts['unescaped'])}")
        logs.say(f"{label}: kept {counts['kept']:,} of {total:,} pairs")
        if not counts["kept"]:
            raise UserError(f"{label}: no pair is left; see clean.drop, clean.filters and clean.score_with")
        numbers[name] = {
            "read": total, "kept": counts["kept"], "unescaped": counts["unescaped"], "removed": removed
        }  # fmt: skip
    content = numbers if len(names) > 1 else numbers[names[0]]
    (folder / "clean.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_split(data: DataConfig, split: str, folder: Path) -> set[int]:
    """Copies a split, if the corpus has it; returns the `keys` of its pairs."""
    try:
        corpus_key(data, split)
    except UserError as error:
        logs.say(f"no {split} text: {error}")
        return set()
    pairs = list(read_pairs(data, split))
    # A training pair may be written in either form.
    forms = (written(pair, unescape) for unescape in (True, False) for pair in pairs)
    for side, language in enumerate((data.source_lang, data.target_lang)):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return set[int]().union(*map(keys, itertools.chain(pairs, forms)))


def written(pair: Pair, unescape: bool) -> Pair:
    """Returns a training pair as the copy has it: without breaks, and without entities if `unescape`."""
    source, target = (_BREAKS.sub(" ", without_entities(text) if unescape else text).strip() for text in pair)
    return source, target


def judged(c: CleanConfig, data: DataConfig, held_out: set[int], counts: Counter[str], seen: Seen) -> Iterator[Judged]:
    """Yields the training pairs as `written`, with their faults of `clean.drop`; counts those that were `unescaped`.

    `seen` has the pairs of earlier corpora, and gets those of this one.
    """
    languages = data.source_lang, data.target_lang
    expected = usual_in(data)

    def pairs() -> Iterator[Pair]:
        for pair in read_pairs(data, "train"):
            counts["unescaped"] += c.unescape and any(without_entities(text) != text for text in pair)
            yield written(pair, c.unescape)

    for pair, found in inspect(pairs(), expected, seen):
        reasons = [name for name in (*found, *overlap(pair, held_out)) if name in c.dropped]
        yield pair, reasons or (foreign(pair, languages) if "language" in c.dropped else [])


def filtered(pairs: Iterator[Judged], filters: list[Filter]) -> Iterator[Judged]:
    """Yields the pairs, and adds to those without reasons the first filter that rejects them."""
    while filters and (chunk := list(itertools.islice(pairs, CHUNK))):
        names = iter(rejections(filters, [pair for pair, reasons in chunk if not reasons]))
        for pair, reasons in chunk:
            yield pair, reasons or [name for name in (next(names),) if name]
    yield from pairs


def write_training_text(
    pairs: Iterator[Judged], paths: Sequence[Path], counts: Counter[str], progress: Callable[[], Any]
) -> None:
    """Writes the pairs without reasons to the files of both sides, and the others to the last of the three `paths`.

    Counts those that were `kept`, and the others by reason. Calls `progress` once per pair.
    """
    with contextlib.ExitStack() as stack:
        *sides, removed = (stack.enter_context(open(path, "w", encoding="utf-8", newline="\n")) for path in paths)
        removed.write("line\tfaults\tsource\ttarget\n")
        for line, (pair, reasons) in enumerate(pairs, start=1):
            progress()
            counts.update(reason.partition("=")[0] for reason in reasons or ["kept"])
            if reasons:
                fields = (str(line), ",".join(reasons), *(text.replace("\t", " ") for text in pair))
                removed.write("\t".join(fields) + "\n")
                continue
            for file, text in zip(sides, pair, strict=True):
                file.write(text + "\n")

"""--mode=clean: writes a copy of the text without faulty pairs, and says what was removed and why."""

import contextlib
import html
import json
import re
from collections import Counter
from pathlib import Path

from branchnorm_jax.bucket import is_url
from branchnorm_jax.data.corpus import corpus_key, read_pairs
from branchnorm_jax.data.formats import Pair
from branchnorm_jax.data.quality import FAULTS, describe, inspect
from branchnorm_jax.errors import UserError
from branchnorm_jax.files import atomic_directory
from branchnorm_jax.options import Config, DataConfig
from branchnorm_jax.training import logs
from branchnorm_jax.workdir import Workdir

_BREAKS = re.compile("[\t-\r\x1c-\x1e\x85\u2028\u2029]+")
"""Characters that end a line or a field for some programs; entities may stand for them."""


def clean(config: Config, workdir: Workdir) -> None:
    """Writes the splits to `clean.path`, with the training pairs that have no fault of `clean.drop`.

    The files are `train.<language>`, `valid.<language>`, `test.<language>`; `removed.tsv` with the line, the faults,
    the source and the target of each removed pair; and `clean.json` with the numbers.
    """
    c, data = config.clean, config.data
    if unknown := [name for name in c.dropped if name not in FAULTS]:
        raise UserError(f"config: clean.drop contains {unknown[0]!r}; use {', '.join(FAULTS)}")
    if "entities" in c.dropped and c.unescape:
        raise UserError("config: clean.drop=entities needs clean.unescape=False, which keeps entities")
    if data.pairs:
        raise UserError("config: --mode=clean reads one language pair; leave data.pairs empty, and set the languages")
    if is_url(c.path):
        raise UserError(f"clean.path={c.path}: this must be a folder")
    folder = Path(c.path).absolute() if c.path else workdir / "clean"
    if c.path and folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"clean.path={folder}: it exists and is not an empty folder; choose a new folder")
    if data.source == "text" and not is_url(data.path) and Path(data.path).expanduser().resolve() == folder.resolve():
        raise UserError(
            f"clean.path={folder}: this is the text itself; choose another folder, or the uncleaned data.path"
        )
    total = sum(1 for _ in read_pairs(data, "train"))
    with atomic_directory(folder) as temporary:
        held_out: set[int] = set()
        for split in ("valid", "test"):
            held_out |= copy_split(data, split, temporary)
        removed = clean_training_text(config, total, held_out, temporary)
        kept = total - removed["pairs"]
        if not kept:
            raise UserError("no pair is left; see clean.drop")
        by_fault = {name: removed[name] for name in c.dropped if removed[name]}
        numbers = {"read": total, "kept": kept, "unescaped": removed["unescaped"], "removed": by_fault}
        (temporary / "clean.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    if by_fault:
        logs.say(f"removed {describe({name: {'pairs': number} for name, number in by_fault.items()})}")
    logs.say(f"wrote {folder}: {kept:,} of {total:,} pairs; removed.tsv lists the others")
    print(folder)


def copy_split(data: DataConfig, split: str, folder: Path) -> set[int]:
    """Copies a split, if the corpus has it; returns the hashes of its pairs."""
    try:
        corpus_key(data, split)
    except UserError as error:
        logs.say(f"no {split} text: {error}")
        return set()
    pairs = list(read_pairs(data, split))
    for side, language in enumerate((data.source_lang, data.target_lang)):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{split}.{language}").write_text(text, encoding="utf-8", newline="\n")
    return set(map(hash, pairs))


def clean_training_text(config: Config, total: int, held_out: set[int], folder: Path) -> Counter[str]:
    """Writes the training pairs without faults, and those with faults.

    Returns the number of removed `pairs`, of `unescaped` pairs, and of the pairs that each fault removed.
    """
    c, data, counts = config.clean, config.data, Counter[str]()

    def unescaped(pair: Pair) -> Pair:
        plain = tuple(map(html.unescape, pair))
        if plain == pair:
            return pair
        counts["unescaped"] += 1
        source, target = (_BREAKS.sub(" ", text).strip() for text in plain)
        return source, target

    pairs = read_pairs(data, "train")
    names = f"train.{data.source_lang}", f"train.{data.target_lang}", "removed.tsv"
    with contextlib.ExitStack() as stack:
        *sides, removed = (
            stack.enter_context(open(folder / name, "w", encoding="utf-8", newline="\n")) for name in names
        )
        removed.write("line\tfaults\tsource\ttarget\n")
        bar = stack.enter_context(logs.progress_bar(total, 0, "pair", "clean"))
        for line, (pair, found) in enumerate(inspect(map(unescaped, pairs) if c.unescape else pairs), start=1):
            bar.update()
            if hash(pair) in held_out:
                found.append("held_out")
            if dropped := [name for name in found if name in c.dropped]:
                counts.update(["pairs", *dropped])
                fields = (str(line), ",".join(dropped), *(text.replace("\t", " ") for text in pair))
                removed.write("\t".join(fields) + "\n")
                continue
            for file, text in zip(sides, pair, strict=True):
                file.write(text + "\n")
    return counts

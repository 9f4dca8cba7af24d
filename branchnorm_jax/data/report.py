"""What is wrong with the text of a run, split by split, before training begins."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from branchnorm_jax.data.corpus import corpus_key, read_pairs
from branchnorm_jax.data.formats import Pair
from branchnorm_jax.data.quality import FAULTS, SAMPLE, Report, Seen, Usual, describe, inspect, keys, overlap, usual
from branchnorm_jax.errors import UserError, one_line
from branchnorm_jax.files import write_atomically
from branchnorm_jax.options import CleanConfig, DataConfig


def report(
    config: DataConfig, directory: Path, held_out: Sequence[str], label: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Inspects the splits of a language pair, once; prints one line per fault, with the first pair that has it.

    Args:
      config: specifies the corpus.
      directory: folder of `report.json`, which is reused while the text is the same.
      held_out: the other splits to inspect; one that cannot be read is left out, and the reason is said.
      label: what to append to the name of the split in the lines.
      say: called with each line.

    Returns:
      Split -> `pairs` (their number) and `faults`, see `quality.Report.faults`. Each of several training corpora is a
      split of its own, "train news".
    """
    texts = {split: _key(config, split) for split in ("train", *held_out)}
    path = directory / "report.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["texts"] == texts:
            return known["splits"]
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged
        pass
    others: dict[str, list[Pair]] = {}
    for split in held_out:
        try:
            others[split] = list(read_pairs(config, split))
        except UserError as error:
            say(f"no {split} text{label}: {error}")
    found = inspected(config, others)
    for split, one in found.items():
        for name, example in one.faults.items():
            first = one_line(f"first in pair {example['line']}: {example['source']} | {example['target']}")
            kind, space, corpus = split.partition(" ")
            say(f"{kind}{label}{space}{corpus}: {describe(name, example['pairs'])}, {first}")
    faulty = {name for split, one in found.items() if split not in held_out for name in one.faults}
    default = CleanConfig()
    if mended := faulty & {*default.dropped, "entities"}:
        say("--mode=clean lists faulty training pairs, and writes a copy without them to train on in a new workdir")
    if kept := [name for name in FAULTS if name in faulty - mended]:
        say(
            f"--mode=clean keeps the pairs {', and those '.join(FAULTS[name] for name in kept)}; to remove them, too, "
            f"set clean.drop={default.drop},{','.join(kept)}"
        )
    splits = {split: vars(one) for split, one in found.items()}
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({"texts": texts, "splits": splits}, indent=2, ensure_ascii=False) + "\n")
    return splits


def _key(config: DataConfig, split: str) -> dict[str, Any] | None:
    """Returns `corpus_key`, or None if the text is missing."""
    try:
        return corpus_key(config, split)
    except UserError:
        return None


def usual_in(config: DataConfig) -> Usual:
    """Returns what is usual for the first pairs of the training text."""
    return usual(itertools.islice(read_pairs(config, "train"), SAMPLE), (config.source_lang, config.target_lang))


def inspected(config: DataConfig, others: Mapping[str, Sequence[Pair]]) -> dict[str, Report]:
    """Reads the training text; returns its faults and those of the other splits.

    A pair of a corpus that an earlier corpus has is a duplicate, too.
    """
    expected = usual_in(config)
    wanted = set[int]().union(*map(keys, itertools.chain.from_iterable(others.values())))
    reports, common, seen = dict[str, Report](), set[int](), Seen()
    corpora = config.corpora()
    for corpus, _ in corpora:
        one = reports["train" if len(corpora) == 1 else f"train {corpus.train_split}"] = Report()
        own = expected if len(corpora) == 1 else usual_in(corpus)
        for pair, found in inspect(read_pairs(corpus, "train"), own, seen):
            common |= wanted & keys(pair)
            one.add(pair, [*found, *overlap(pair, wanted)])
    for split, pairs in others.items():
        reports[split] = Report()
        for pair, found in inspect(pairs, expected):
            reports[split].add(pair, [*found, *overlap(pair, common)])
    return reports

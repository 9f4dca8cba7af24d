"""Measures what --mode=clean finds among faults planted in clean text, and how long it takes.

    python -m benchmarks.clean <filters> <source file> <target file> <file in another language>

<filters> is a file for `clean.filters`, or `language` for the fault of this name.
The files have one sentence per line and names that end in their language, such as train.de.gz. Of every 100 pairs, four
get the target of another pair ("mismatched") and four get a target in the other language ("language").
"""

import argparse
import functools
import gzip
import random
import resource
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure import save
from branchnorm_jax.data.filters import CHUNK, load_filters, rejections
from branchnorm_jax.data.formats import Pair
from branchnorm_jax.data.quality import foreign
from branchnorm_jax.options import DataConfig

KINDS = "mismatched", "language"
SHARE = 0.04
LIMIT = 20_000


def lines(path: Path) -> list[str]:
    """Returns at most `LIMIT` lines of a file, evenly spaced."""
    content = path.read_bytes()
    every = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().removesuffix("\n").split("\n")
    return every[:: -(-len(every) // LIMIT)]


def language(path: Path) -> str:
    """Returns the language of a file."""
    return path.name.removesuffix(".gz").split(".")[-1]


def plant(pairs: list[Pair], others: list[str]) -> tuple[list[Pair], dict[str, set[int]]]:
    """Returns a copy of the pairs with faults, and the positions of each kind of fault."""
    rng, count, planted = random.Random(0), round(SHARE * len(pairs)), list(pairs)
    places = rng.sample(range(len(pairs)), 2 * count)
    mismatched, foreign = places[:count], places[count:]
    for here, there in zip(mismatched, [*mismatched[1:], mismatched[0]], strict=True):
        planted[here] = pairs[here][0], pairs[there][1]
    for here, text in zip(foreign, rng.choices(others, k=count), strict=True):
        planted[here] = pairs[here][0], text
    return planted, dict(zip(KINDS, (set(mismatched), set(foreign)), strict=True))


def cpu() -> float:
    """Returns the seconds of this process and its children on all cores."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Measures the files of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filters")
    parser.add_argument("files", type=Path, nargs=3)
    arguments = parser.parse_args()
    source, target, other = arguments.files
    pairs, places = plant(list(zip(lines(source), lines(target), strict=True)), lines(other))
    languages = language(source), language(target)
    judge: Callable[[list[Pair]], Iterable[Any]]
    if arguments.filters == "language":
        judge = functools.partial(map, lambda pair: foreign(pair, languages))
    else:
        data = DataConfig(source_lang=languages[0], target_lang=languages[1])
        judge = functools.partial(rejections, load_filters(arguments.filters, data))
    before = cpu()
    found = [bool(reasons) for at in range(0, len(pairs), CHUNK) for reasons in judge(pairs[at : at + CHUNK])]
    results: dict[str, Any] = {"pairs": len(pairs), "cpu_microseconds_per_pair": 1e6 * (cpu() - before) / len(pairs)}
    for kind, where in {**places, "others": set(range(len(pairs))).difference(*places.values())}.items():
        results[kind] = statistics.mean(found[index] for index in where)
    file = Path(arguments.filters)
    results["filters"] = file.read_text(encoding="utf-8") if file.exists() else arguments.filters
    save(f"clean_{file.stem}_{source.parent.name}_{'-'.join(languages)}", results)


if __name__ == "__main__":
    main()

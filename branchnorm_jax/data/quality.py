"""Faults of sentence pairs that harm training: duplicates, copies, unusual lengths and scripts, remains of mark-up."""

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from branchnorm_jax.data.formats import Pair

FAULTS = {
    "empty": "with an empty side",
    "copy": "with equal sides",
    "duplicate": "that occurred before",
    "length": "with a side that is three times as long or as short as usual",
    "long": "with more than 1,000 characters on a side",
    "letters": "with a side without letters",
    "script": "with a side in another script than usual",
    "entities": "with entities such as &quot;",
    "held_out": "that are also in another split",
}
"""Name -> description after the number of pairs. `inspect` finds all but `held_out`, which needs the other splits."""

SAMPLE = 10_000
"""What is usual for a corpus is learned from this many pairs at its start."""

LONG = 1000
UNUSUAL, SLACK = 3.0, 15
"""A length is unusual if (length + SLACK) is UNUSUAL times more or less than expected; SLACK spares short sentences."""

COMMON, FOREIGN = 0.1, 0.5
"""A script is usual if COMMON of all letters are in it. A side is foreign if more than FOREIGN of its letters are in
other scripts."""

ENTITY = re.compile(r"&(?:#\d+|#x[0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")


class Usual(NamedTuple):
    """What is usual for a corpus."""

    ratio: float
    """Characters of the target per character of the source."""
    scripts: tuple[frozenset[str], frozenset[str]]
    """Scripts of source and target."""


@functools.cache
def script(letter: str) -> str:
    """Returns the script of a letter, the first word of its Unicode name: LATIN, CYRILLIC, CJK, HIRAGANA, ..."""
    return unicodedata.name(letter, "?").split(" ")[0]


def scripts(text: str) -> Counter[str]:
    """Returns the number of letters of each script."""
    return Counter(map(script, filter(str.isalpha, text)))


def usual(pairs: Iterable[Pair]) -> Usual:
    """Returns what is usual for these pairs."""
    letters: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    lengths = [0, 0]
    for pair in pairs:
        for side, text in enumerate(pair):
            letters[side].update(scripts(text))
            lengths[side] += len(text)
    common = (frozenset(name for name, n in side.items() if n >= COMMON * side.total()) for side in letters)
    return Usual((lengths[1] + 1) / (lengths[0] + 1), (next(common), next(common)))


def faults(pair: Pair, expected: Usual) -> list[str]:
    """Returns the faults of a pair that can be seen without the other pairs, in the order of `FAULTS`."""
    source, target = pair
    if not source or not target:
        return ["empty"]
    ratio = (len(target) + SLACK) / (len(source) * expected.ratio + SLACK)
    found = {
        "copy": source == target,
        "length": not 1 / UNUSUAL <= ratio <= UNUSUAL,
        "long": max(len(source), len(target)) > LONG,
        "letters": not all(any(map(str.isalpha, text)) for text in pair),
        "script": any(_foreign(text, expected.scripts[side]) for side, text in enumerate(pair)),
        "entities": "&" in source + target and bool(ENTITY.search(source) or ENTITY.search(target)),
    }
    return [name for name, is_there in found.items() if is_there]


def inspect(pairs: Iterable[Pair], seen: set[int] | None = None) -> Iterator[tuple[Pair, list[str]]]:
    """Yields each pair with its faults. Remembers one hash per pair.

    Args:
      pairs: the corpus.
      seen: `hash(pair)` of pairs that are duplicates here; all pairs are added.
    """
    seen, pairs = set() if seen is None else seen, iter(pairs)
    first = list(itertools.islice(pairs, SAMPLE))
    expected = usual(first)
    for pair in itertools.chain(first, pairs):
        found, key = faults(pair, expected), hash(pair)
        if key in seen and found != ["empty"]:
            found.append("duplicate")
        seen.add(key)
        yield pair, found


class Report:
    """Numbers of faulty pairs, with the first example of each fault."""

    def __init__(self) -> None:
        self.pairs = 0
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, pair: Pair, faults: Iterable[str]) -> None:
        """Counts the next pair of the corpus."""
        self.pairs += 1
        for name in faults:
            example = {"pairs": 0, "line": self.pairs, "source": pair[0], "target": pair[1]}
            self.found.setdefault(name, example)["pairs"] += 1

    def watched(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Yields pairs unchanged, and counts their faults."""
        for pair, found in inspect(pairs):
            self.add(pair, found)
            yield pair


def describe(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Describes `Report.found`: "450 pairs with equal sides, 1,600 that occurred before"."""
    numbers = {name: one["pairs"] for name, one in found.items()}
    parts = [f"{numbers[name]:,} {text}" for name, text in FAULTS.items() if name in numbers]
    first = next(numbers[name] for name in FAULTS if name in numbers)
    return ", ".join(parts).replace(" ", " pair " if first == 1 else " pairs ", 1)


def _foreign(text: str, common: frozenset[str]) -> bool:
    if text.isascii() and "LATIN" in common:
        return False
    letters = scripts(text)
    return sum(n for name, n in letters.items() if name not in common) > FOREIGN * letters.total()

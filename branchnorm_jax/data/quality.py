"""Faults of sentence pairs that harm training: duplicates, copies, unusual lengths and scripts, remains of mark-up."""

import functools
import html
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from html.entities import html5
from typing import Any, NamedTuple

import babel
import numpy as np
from babel.core import get_global
from babel.localedata import locale_identifiers

from branchnorm_jax.codes import base
from branchnorm_jax.data.formats import Pair
from branchnorm_jax.errors import count

FAULTS = {
    "empty": "with an empty side",
    "copy": "with equal sides",
    "duplicate": "that occurred before",
    "length": "with a side that is three times as long or as short as usual",
    "long": "with more than 1,000 characters on a side",
    "letters": "with a side without letters",
    "script": "with a side in another script than its language",
    "language": "with a side in another language",
    "entities": "with entities such as &quot;",
    "tags": "with tags such as <b>",
    "characters": "with control characters, or U+FFFD in place of a lost character",
    "held_out": "also in another split",
    "held_out_source": "with a source that has another translation in another split",
}
"""Name -> description after the number of pairs.

`inspect` finds all but `language`, which takes ten times as long as all others (see `foreign`), and the last two (see
`overlap`).
"""

SAMPLE = 10_000
"""What is usual for a corpus is learned from this many pairs at its start."""

LONG = 1000
UNUSUAL, SLACK = 3.0, 15
"""A length is unusual if (length + SLACK) is UNUSUAL times more or less than expected; SLACK spares short sentences."""

COMMON, FOREIGN = 0.1, 0.5
"""Usual are the main script of the language and those of its other scripts that COMMON of all letters are in; for a
language that Babel does not know, all scripts that COMMON of all letters are in. A side is foreign if more than FOREIGN
of its letters are in other scripts."""

MARGIN = 5.0
"""A side is in another language if its text is e^MARGIN times as probable in that one."""

CHUNK = 8192
"""Pairs that are compared with the earlier ones at once."""

SCRIPTS = {
    **{"Hans": ("CJK",), "Hant": ("CJK",), "Jpan": ("CJK", "HIRAGANA", "KATAKANA"), "Kore": ("HANGUL", "CJK")},
    **{"Beng": ("BENGALI",), "Orya": ("ORIYA",), "Cans": ("CANADIAN",), "Nkoo": ("NKO",), "Mtei": ("MEETEI",)},
    **{"Lisu": ("LISU",), "Lana": ("TAI",), "Plrd": ("MIAO",), "Hani": ("CJK",)},
}
"""ISO 15924 code -> scripts in the words of Unicode, where they differ from the English name of the code."""

SHOWN = 100
"""Characters of an example that are shown."""

ENTITY = re.compile(r"&(?:#\d+|#x[0-9a-fA-F]+|[A-Za-z][A-Za-z0-9]*);")
TAG = re.compile(r"</?[A-Za-z][^<>]*>|<!--")
UNREADABLE = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufffd]")
"""Control characters except white space, as left by text that was decoded as Latin-1 instead of windows-1252."""


class Usual(NamedTuple):
    """What is usual for a corpus."""

    ratio: float
    """Characters of the target per character of the source."""
    scripts: tuple[frozenset[str], frozenset[str]]
    """Scripts of source and target."""


@functools.cache
def script(letter: str) -> str:
    """Returns the script of a letter, the first word of its Unicode name: LATIN, CYRILLIC, CJK, HIRAGANA, ...

    Letters of half and of full width have the script of the usual ones.

    >>> [script(letter) for letter in "Ａﾃー々"]
    ['LATIN', 'KATAKANA', 'KATAKANA', 'CJK']
    """
    name = unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "?").split(" ")[0]
    return {"KATAKANA-HIRAGANA": "KATAKANA", "IDEOGRAPHIC": "CJK"}.get(name, name)


def scripts(text: str) -> Counter[str]:
    """Returns the number of letters of each script."""
    return Counter(map(script, filter(str.isalpha, text)))


@functools.cache
def scripts_of(language: str) -> list[frozenset[str]]:
    """Returns the scripts of a language such as "sr", the main one first: [{"CYRILLIC"}, {"LATIN"}].

    The list is empty if Babel does not know the language.
    """
    own, rest = base(language), re.split("[-_]", language)[1:]
    likely = get_global("likely_subtags").get(own, "").split("_")
    others = [part for name in locale_identifiers() if name.startswith(f"{own}_") for part in name.split("_")]
    names = babel.Locale("en").scripts
    codes = dict.fromkeys(code for code in (*rest, *likely, *others) if code in names)
    return list(dict.fromkeys(frozenset(SCRIPTS.get(code, names[code].upper().split()[:1])) for code in codes))


def usual(pairs: Iterable[Pair], languages: tuple[str, str] = ("", "")) -> Usual:
    """Returns what is usual for these pairs of these languages."""
    letters: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    lengths = [0, 0]
    for pair in pairs:
        for side, text in enumerate(pair):
            letters[side].update(scripts(text))
            lengths[side] += len(text)
    expected = []
    for counts, language in zip(letters, languages, strict=True):
        common = frozenset(name for name, n in counts.items() if n >= COMMON * counts.total())
        main, *others = scripts_of(language) or [common]
        expected.append(main.union(*(names for names in others if names & common)))
    return Usual((lengths[1] + 1) / (lengths[0] + 1), (expected[0], expected[1]))


def without_entities(text: str) -> str:
    """Returns a text with characters in place of its entities. Only a semicolon ends an entity.

    >>> without_entities("M&amp;Ms &#x2014; ?id=3&copy=2&section=5; &section;")
    'M&Ms — ?id=3&copy=2&section=5; &section;'
    """

    def character(match: re.Match[str]) -> str:
        name = match[0]
        return html.unescape(name) if name[1] == "#" or name[1:] in html5 else name

    return ENTITY.sub(character, text) if "&" in text else text


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
        "entities": without_entities(source) != source or without_entities(target) != target,
        "tags": "<" in source + target and bool(TAG.search(source) or TAG.search(target)),
        "characters": bool(UNREADABLE.search(source) or UNREADABLE.search(target)),
    }
    return [name for name, is_there in found.items() if is_there]


class Seen:
    """A set of 64-bit numbers that takes 8 bytes for each: sorted arrays, each more than twice as long as the next."""

    def __init__(self) -> None:
        self.runs: list[np.ndarray] = []

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Adds numbers, int64 [n]; returns which of them occurred before, here or in earlier calls: bool [n]."""
        new, first = np.unique(numbers, return_index=True)
        known = np.zeros(len(new), bool)
        for run in self.runs:
            known |= run[np.searchsorted(run, new).clip(max=len(run) - 1)] == new
        before = np.ones(len(numbers), bool)
        before[first] = known
        if len(new := new[~known]):
            while self.runs and len(self.runs[-1]) <= 2 * len(new):
                new = np.sort(np.concatenate([self.runs.pop(), new]))
            self.runs.append(new)
        return before


def inspect(pairs: Iterable[Pair], expected: Usual, seen: Seen | None = None) -> Iterator[tuple[Pair, list[str]]]:
    """Yields each pair with its faults. Remembers one hash per pair in `seen`, which other text may have filled."""
    seen, pairs = Seen() if seen is None else seen, iter(pairs)
    while chunk := list(itertools.islice(pairs, CHUNK)):
        before = seen.add(np.fromiter(map(hash, chunk), np.int64, len(chunk)))
        for pair, repeated in zip(chunk, before.tolist(), strict=True):
            found = faults(pair, expected)
            yield pair, [*found, "duplicate"] if repeated and found != ["empty"] else found


def keys(pair: Pair) -> set[int]:
    """Returns the hashes of a pair and of its source, see `overlap`; none of a pair that training leaves out."""
    return {hash(pair), hash(pair[0])} if all(pair) else set()


def overlap(pair: Pair, others: Container[int]) -> list[str]:
    """Returns the fault of a pair that another split has, too; `others` are `keys` of the pairs of that split."""
    if not all(pair):
        return []
    return ["held_out"] if hash(pair) in others else ["held_out_source"] if hash(pair[0]) in others else []


def foreign(pair: Pair, languages: tuple[str, str]) -> list[str]:
    """Returns ["language=fr"] if a side is in another language than its own, here French, which py3langid identifies.

    Sides in a language that py3langid does not know are not checked.
    """
    rank = _identifier()
    for text, language in zip(pair, languages, strict=True):
        log_probs = {name: log_prob for name, log_prob in rank(text) if name != "zxx"}  # zxx: no language
        own = log_probs.get(base(language))
        likeliest = max(log_probs, key=log_probs.__getitem__)
        if own is not None and log_probs[likeliest] - own > MARGIN:
            return [f"language={likeliest}"]
    return []


class Report:
    """Numbers of faulty pairs, with the first example of each fault."""

    def __init__(self) -> None:
        self.pairs = 0
        self.faults: dict[str, dict[str, Any]] = {}

    def add(self, pair: Pair, found: Iterable[str]) -> None:
        """Counts the next pair of the corpus."""
        self.pairs += 1
        for name in found:
            source, target = (text if len(text) <= SHOWN else f"{text[:SHOWN]}..." for text in pair)
            example = {"pairs": 0, "line": self.pairs, "source": source, "target": target}
            self.faults.setdefault(name, example)["pairs"] += 1


def describe(name: str, number: int) -> str:
    """Describes pairs with a fault, "1,600 pairs that occurred before", or those that a filter rejects."""
    return f"{count(number, 'pair')} {FAULTS.get(name, f'rejected by {name}')}"


@functools.cache
def _identifier() -> Callable[[str], list[tuple[str, float]]]:
    """Returns a function from a text to pairs of a language and the unnormalised log-probability of the text in it."""
    import py3langid

    py3langid.set_languages(None)
    return py3langid.rank


def _foreign(text: str, common: frozenset[str]) -> bool:
    if text.isascii() and "LATIN" in common:
        return False
    letters = scripts(text)
    return sum(n for name, n in letters.items() if name not in common) > FOREIGN * letters.total()

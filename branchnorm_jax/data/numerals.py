"""The built-in corpus: numbers, years, dates, times, money, quantities and sums, written out in ten languages.

An `Item` is a meaning: a kind, a carrier phrase and a value. `render` writes it in any language, so every pair of
languages is parallel, and the translation is a function of what the source says. The phrases are in `numerals.toml`;
the numerals come from num2words, dates, times, money and quantities from Babel (Unicode CLDR).

What is held out is decided before any sentence exists, by a hash of the value alone: about 90 % of all values belong
to train, 5 % to valid and 5 % to test. A value is

* a number from 100 to 9,999, whatever the kind: if 4312 is a test number, then no training item counts, orders,
  measures or calculates with it, uses it as a year of its own or as the whole units of a price. In a sum all three
  numbers belong to the split. Numbers below 100, which the others are built of, are train when they stand alone;
* a whole calendar day for dates (its day, month and year alone are met in training);
* a whole minute of the day for times (its hour and minute alone are met in training).
"""

import datetime
import difflib
import functools
import hashlib
import itertools
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import num2words
import numpy as np
import numpy.typing as npt
from babel import dates, numbers, units

from branchnorm_jax.errors import UserError

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("numerals.toml").read_text(encoding="utf-8"),
)

LANGUAGES: tuple[str, ...] = tuple(_TABLES)
SPLITS: tuple[str, ...] = ("train", "valid", "test")

# The axes along which values are held out. Days count as `datetime.date.toordinal`, minutes from midnight.
_AXES: dict[str, range] = {
    "number": range(10_000),
    "day": range(datetime.date(1900, 1, 1).toordinal(), datetime.date(2051, 1, 1).toordinal()),
    "minute": range(24 * 60),
}
_COMPONENTS = 100  # smaller numbers are the words that all others are built of

# Per kind: the axis of the held-out components, how many (the leading ones) are held out, and all components' ranges.
# Money has at least 5 units and never 0 cents: then the words for both take one form in every language.
_KINDS: dict[str, tuple[str, int, tuple[range, ...]]] = {
    "cardinal": ("number", 1, (range(10_000),)),
    "ordinal": ("number", 1, (range(1, 1_000),)),
    "year": ("number", 1, (range(1_100, 2_100),)),
    "quantity": ("number", 1, (range(1, 10_000),)),
    "money": ("number", 1, (range(5, 10_000), range(5, 100, 5))),
    "date": ("day", 1, (_AXES["day"],)),
    "time": ("minute", 1, (_AXES["minute"],)),
    "sum": ("number", 3, (range(1, 1_000), range(1, 1_000))),
}


@dataclass(frozen=True)
class Item:
    """A meaning, to be rendered in any language.

    Attributes:
      kind: cardinal, ordinal, year, quantity, money, date, time or sum.
      carrier: index of the phrase among those of the kind, the same in all languages.
      value: (number,); money (units, hundredths); date (proleptic Gregorian ordinal of the day,); time (minutes since
        midnight,); sum (a, b, a + b).
    """

    kind: str
    carrier: int
    value: tuple[int, ...]


def split_of(axis: str, value: int) -> str:
    """The split that a value belongs to: a function of a hash of the value alone.

    Args:
      axis: what is counted: "number", "day" (`datetime.date.toordinal`) or "minute" (since midnight).
      value: the number, the day or the minute.
    """
    if axis == "number" and value < _COMPONENTS:
        return "train"
    digest = hashlib.blake2b(f"{axis}:{value}".encode(), digest_size=8).digest()
    return {0: "test", 1: "valid"}.get(int.from_bytes(digest, "big") % 20, "train")


def capacity(split: str) -> int:
    """Returns the number of different items that `items` can supply. Raises `UserError` for an unknown split."""
    _check_split(split)
    return sum(len(_values(kind, split)) * _carriers(kind) for kind in _KINDS)


def items(split: str, count: int, seed: int = 0) -> Iterator[Item]:
    """Different items of a split, in an order that depends on `seed` alone; a smaller count gives a prefix.

    The kinds take turns until their values are used up.

    Args:
      split: "train", "valid" or "test".
      count: the number of items.
      seed: of the order, at least 0.

    Raises:
      UserError: at the call, for an unknown split or a count that the split cannot supply.
    """
    most = capacity(split)
    if not 0 <= count <= most:
        raise UserError(f"numerals: {count} items requested from {split}, which supplies 0 to {most}; request fewer")
    streams = [_shuffled(kind, split, count, seed) for kind in _KINDS]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*streams))
    return itertools.islice((item for item in turns if item is not None), count)


def render(item: Item, lang: str) -> str:
    """The item as a sentence; its only white space is single U+0020. Raises `UserError` for an unknown language."""
    _check_language(lang)
    table = _TABLES[lang]
    text = _SLOT.sub(
        lambda slot: _FORMS[slot["form"]](item.value, lang, slot["argument"]), table[item.kind][item.carrier]
    )
    for pattern, replacement in table["repairs"]:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())  # CLDR writes no-break spaces (U+00A0, U+202F) inside numbers and before units


def pairs(split: str, source_lang: str, target_lang: str, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yields `items(split, count, seed)` in two languages; the call raises the errors of `items` and `render`."""
    _check_language(source_lang)
    _check_language(target_lang)
    chosen = items(split, count, seed)
    return ((render(item, source_lang), render(item, target_lang)) for item in chosen)


def _check_language(lang: str) -> None:
    if lang not in _TABLES:
        close = difflib.get_close_matches(lang, LANGUAGES, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"numerals: no language {lang!r}; languages are {', '.join(LANGUAGES)}{hint}")


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise UserError(f"numerals: no split {split!r}; splits are {', '.join(SPLITS)}")


def _carriers(kind: str) -> int:
    return len(_TABLES[LANGUAGES[0]][kind])


@functools.cache
def _axis_splits(axis: str) -> npt.NDArray[np.int64]:
    """Index into SPLITS of every value of an axis."""
    return np.array([SPLITS.index(split_of(axis, value)) for value in _AXES[axis]])


@functools.cache
def _values(kind: str, split: str) -> npt.NDArray[np.int64]:
    """All values of a kind in a split, [values, components]."""
    axis, held, ranges = _KINDS[kind]
    values = np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(ranges))
    if kind == "sum":
        values = np.concatenate([values, values.sum(axis=1, keepdims=True)], axis=1)
    splits = _axis_splits(axis)[values[:, :held] - _AXES[axis].start]
    return values[(splits == SPLITS.index(split)).all(axis=1)]


def _shuffled(kind: str, split: str, count: int, seed: int) -> Iterator[Item]:
    """At most `count` items of one kind."""
    values, carriers = _values(kind, split), _carriers(kind)
    entropy = [seed, SPLITS.index(split), list(_KINDS).index(kind)]
    # NumPy promises that a bit generator's raw stream never changes, but not what `Generator.permutation` makes of it.
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(len(values) * carriers)
    for index in np.argsort(keys, kind="stable")[:count].tolist():
        row, carrier = divmod(index, carriers)
        yield Item(kind, carrier, tuple(values[row].tolist()))


@functools.cache
def _words(number: int, to: str, lang: str) -> str:
    return num2words.num2words(number, lang=lang, to=to)


def _amount(value: tuple[int, ...]) -> Decimal:
    return Decimal(100 * value[0] + value[1]) / 100


# Fills a slot of a carrier phrase, {form} or {form:argument}: f(value, language, argument).
_Form = Callable[[tuple[int, ...], str, str], str]
_SLOT = re.compile(r"\{(?P<form>\w+)(?::(?P<argument>[\w-]+))?\}")
_FORMS: dict[str, _Form] = {
    "cardinal": lambda v, lang, _: _words(v[0], "cardinal", lang),
    "ordinal": lambda v, lang, _: _words(v[0], "ordinal", lang),
    "year": lambda v, lang, _: _words(v[0], "year", lang),
    "a": lambda v, lang, _: _words(v[0], "cardinal", lang),
    "b": lambda v, lang, _: _words(v[1], "cardinal", lang),
    "total": lambda v, lang, _: _words(v[2], "cardinal", lang),
    "number": lambda v, lang, _: str(v[0]),
    "digits": lambda v, lang, _: numbers.format_decimal(v[0], locale=_locale(lang)),
    "unit": lambda v, lang, unit: units.format_unit(v[0], unit, "long", locale=_locale(lang)),
    "money": lambda v, lang, code: numbers.format_currency(_amount(v), code, locale=_locale(lang), format_type="name"),
    "price": lambda v, lang, code: numbers.format_currency(_amount(v), code, locale=_locale(lang)),
    "date": lambda v, lang, width: dates.format_date(datetime.date.fromordinal(v[0]), width, locale=_locale(lang)),
    "time": lambda v, lang, _: dates.format_time(datetime.time(*divmod(v[0], 60)), "short", locale=_locale(lang)),
}


def _locale(lang: str) -> str:
    return _TABLES[lang]["locale"]

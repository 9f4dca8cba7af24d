"""Files that contain both sides of a corpus: TSV, JSON lines and TMX."""

import functools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from upath import UPath

from branchnorm_jax.codes import named
from branchnorm_jax.data import tmx
from branchnorm_jax.data.lines import COMPRESSED, text_lines, unique_names
from branchnorm_jax.errors import OneLineWarning, UserError

Pair = tuple[str, str]


class UnpairedWarning(OneLineWarning):
    """Units of a file are no pairs."""


class NoHeaderWarning(OneLineWarning):
    """The first line of a file looks like the names of its columns, but is read as a pair."""


def pairs_in(path: Path | UPath, languages: Pair) -> Iterator[Pair]:
    """Streams the sentence pairs of a file, in constant memory.

    A unit that lacks one of the languages is left out: it is no pair. In the end, `UnpairedWarning` says how many were.
    A line break inside a text becomes a space.

    Args:
      path: the file; its suffix selects the format, see `FORMATS`.
      languages: codes of source and target. A code with a region in the file, such as en-US, also matches en.

    Raises:
      UserError: during iteration, if the file cannot be read, or if no unit has both languages.
    """
    lacking, complete, known = 0, 0, dict[str, None]()
    for texts in FORMATS[format_of(path.name)](path, languages):
        source, target = codes_of(languages, tuple(texts))
        if source is None or target is None:
            lacking, known = lacking + 1, known | dict.fromkeys(texts)
            continue
        complete += 1
        yield one_line(texts[source]), one_line(texts[target])
    if lacking and not complete:
        raise UserError(
            f"{path}: none of {lacking:,} units has both {' and '.join(languages)}; the languages are "
            f"{', '.join(known) or 'missing'}; change data.source_lang and data.target_lang"
        )
    if lacking:
        what = f"{lacking:,} of {lacking + complete:,} units lack {' or '.join(languages)} and are left out"
        warnings.warn(f"{path}: {what}", UnpairedWarning, stacklevel=2)


def format_of(name: str) -> str:
    """Returns the suffix of a file name or pattern that selects a format, or "" if there is none."""
    suffixes = [suffix for suffix in Path(name).suffixes[-2:] if suffix not in COMPRESSED]
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else ""


@functools.lru_cache
def code_of(language: str, codes: tuple[str, ...]) -> str | None:
    """Returns the first code that names the language: the same code, or else with a region (en-US for en).

    >>> code_of("en", ("de", "en-GB", "EN"))
    'EN'
    >>> code_of("pt_BR", ("pt-PT", "pt-br"))
    'pt-br'
    """
    wanted = _plain(language)
    return min(
        (code for code in codes if f"{_plain(code)}-".startswith(f"{wanted}-")),
        key=lambda code: _plain(code) != wanted,
        default=None,
    )


def codes_of(languages: Pair, codes: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Returns the codes that name both languages; never the same code twice.

    >>> codes_of(("pt", "pt_BR"), ("pt-BR", "pt-PT"))
    ('pt-PT', 'pt-BR')
    """
    source, target = (code_of(language, codes) for language in languages)
    if source is None or source != target:
        return source, target
    rest = tuple(code for code in codes if code != source)
    # The longer name is the one with a region, and keeps the code.
    if len(languages[0]) < len(languages[1]):
        return code_of(languages[0], rest), target
    return source, code_of(languages[1], rest)


def one_line(text: str) -> str:
    """Returns a text without surrounding spaces, and with spaces in place of its line breaks."""
    return " ".join(filter(None, map(str.strip, re.split("[\r\n]", text))))


def _plain(code: str) -> str:
    return code.lower().replace("_", "-")


def _tsv(path: Path | UPath, languages: Pair) -> Iterator[Mapping[str, str]]:
    """Yields the lines of a file with tab-separated columns. Quotation marks are ordinary characters.

    The first line names the languages of the columns (see `codes.named`), in quotation marks or without; there may be
    further columns. A file without such a line has two columns, in the order of the pair in its path, such as
    train.en-de.tsv.
    """
    columns, hint = list[str](), ""
    for number, line in enumerate(text_lines(path), start=1):
        if number == 1:
            columns = _header(path, languages, line)
            if columns:
                continue
            columns = _named_order(path, languages, line)
            hint = "; a first line that names all columns allows further ones"
            if re.fullmatch(r"[^\W\d_]+([-_]\w+)*\t[^\W\d_]+([-_]\w+)*", line):
                what = f"{line[:60]!r} is read as a pair of sentences, because it does not name the languages"
                warnings.warn(f"{path}, line 1: {what}", NoHeaderWarning, stacklevel=2)
        fields = line.split("\t") if line.strip() else [""] * len(columns)
        if len(fields) != len(columns):
            raise UserError(
                f"{path}, line {number}: {len(fields)} columns instead of {len(columns)}; a tab separates "
                f"{' and '.join(filter(None, columns))}, and no text may contain one{hint}"
            )
        yield dict(zip(columns, fields, strict=True))


def _header(path: Path | UPath, languages: Pair, line: str) -> list[str]:
    """Returns the columns that a first line names, with the codes of the languages; [] if it does not name both.

    Raises:
      UserError: if two columns may be of one language, such as a column of numbers, "id", beside "Indonesian".
    """
    names = [name.strip().strip('"') for name in line.split("\t")]
    is_code = [any(code_of(language, (name,)) for language in languages) for name in names]
    columns = [name if code else named(name, languages) for name, code in zip(names, is_code, strict=True)]
    chosen = codes_of(languages, tuple(columns))
    if None in chosen:
        return []
    for language, own in zip(languages, chosen, strict=True):
        same = [number for number, column in enumerate(columns) if code_of(language, (column,))]
        by_name = [number for number in same if columns[number] != names[number]]
        equal = [number for number in same if _plain(columns[number]) == _plain(str(own))]
        if (len(same) > 1 and by_name) or len(equal) > 1:
            both = " and ".join(names[number] for number in (same if by_name else equal)[:2])
            raise UserError(f"{path}, line 1: two columns are of {language}: {both}; rename the unused one")
    return columns


def _named_order(path: Path | UPath, languages: Pair, line: str) -> list[str]:
    """Returns the languages in the order of the pair in the path.

    To take the first column as the source would swap the languages when a file is read in the other direction.
    """
    source, target = map(re.escape, languages)
    found = re.findall(rf"(?<![^\W_])(?:({source})-({target})|({target})-({source}))(?![^\W_])", str(path))
    if not found:
        names = "<TAB>".join(languages)
        raise UserError(
            f"{path}, line 1 ({line[:60]!r}): which column is which language is unknown; make {names} (or the reverse) "
            f"the first line, or name the file such as train.{'-'.join(languages)}.tsv, with "
            "data.files={split}.{pair}.tsv"
        )
    return [code for code in found[-1] if code]


def _jsonl(path: Path | UPath, languages: Pair) -> Iterator[Mapping[str, str]]:
    """Yields the lines of a file of JSON objects.

    An object has texts by language, or a field "translation" with such an object. Blank lines are skipped.
    """
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        example = f'{{"{languages[0]}": "...", "{languages[1]}": "..."}}'
        try:
            unit = json.loads(line, object_pairs_hook=unique_names)
            fields = unit.get("translation", unit)
            texts = {code: text or "" for code, text in fields.items() if isinstance(text, str | None)}
            "".join(texts.values()).encode()
            if others := [code for code in fields.keys() - texts if any(code_of(one, (code,)) for one in languages)]:
                raise ValueError(f"{others[0]} is not a text")
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            reason = f": {error}" if isinstance(error, ValueError) else ""
            raise UserError(f"{path}, line {number}: not an object such as {example}{reason}") from error
        yield texts


FORMATS: dict[str, Callable[[Path | UPath, Pair], Iterator[Mapping[str, str]]]] = {
    ".tsv": _tsv,
    ".jsonl": _jsonl,
    ".tmx": lambda path, languages: tmx.units(path),
}
"""Suffix -> function that yields the units of a file as texts by language."""

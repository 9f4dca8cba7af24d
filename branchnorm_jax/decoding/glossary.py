"""Glossaries: translations that terms of the source must have, and phrases as token ids."""

import hashlib
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import regex

from branchnorm_jax.data.lines import text_lines
from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.scripts import UNSPACED
from branchnorm_jax.errors import UserError
from branchnorm_jax.tokens import UNK

WORD = regex.compile(rf"[{UNSPACED}]|[\w--[{UNSPACED}]]+|[^\w\s]", regex.V1)
"""Words, punctuation marks, and characters of scripts without spaces. Python's own \\w excludes vowel signs."""

INSIDE = regex.compile(rf"[\w--[{UNSPACED}]]|<0x", regex.V1)
"""Start of pieces that continue a word: letters and bytes of letters."""

SPACE = "▁"
"""SentencePiece's mark of a space, at the start of a word."""


class Glossary(NamedTuple):
    """Terms of the source with their translations, as words of `WORD`."""

    as_written: Mapping[tuple[str, ...], str] = {}
    """Terms with capitals, which match only as they are written."""
    any_case: Mapping[tuple[str, ...], str] = {}
    """Terms without capitals, which match in any case."""
    longest: int = 0
    """Words of the longest term."""
    sha256: str = ""
    """Hash of the file."""

    def translations(self, line: str) -> list[str]:
        """Returns the translations of the terms in a source line, each once.

        From left to right, the longest term that begins at a word is taken, and the search continues after it.
        """
        found, words, place = [], _words(line), 0
        while place < len(words):
            for size in range(min(self.longest, len(words) - place), 0, -1):
                term = tuple(words[place : place + size])
                if translation := self.as_written.get(term) or self.any_case.get(tuple(map(str.lower, term))):
                    found.append(translation)
                    place += size - 1
                    break
            place += 1
        return list(dict.fromkeys(found))

    @property
    def all_translations(self) -> list[str]:
        """The translations of all terms."""
        return [*self.as_written.values(), *self.any_case.values()]

    def over(self, base: "Glossary") -> "Glossary":
        """Returns the terms of both; a term of this glossary replaces the same term of `base`. Without a hash."""
        as_written, any_case = {**base.as_written, **self.as_written}, {**base.any_case, **self.any_case}
        return Glossary(as_written, any_case, max(base.longest, self.longest))


NO_TERMS = Glossary()


def read_glossary(path: Path) -> Glossary:
    """Reads lines of `term<TAB>translation`. Blank lines are ignored.

    Raises:
      UserError: if the file cannot be read, a line has other fields, or a term has two translations.
    """
    lines = list(text_lines(path))
    entries = {f"{path}, line {number}": line.split("\t") for number, line in enumerate(lines, 1) if line.strip()}
    sha256 = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return make_glossary(entries, "term<TAB>translation")._replace(sha256=sha256)


def make_glossary(entries: Mapping[str, Sequence[str]], expected: str) -> Glossary:
    """Makes a glossary of terms and their translations.

    Args:
      entries: where an entry is, for messages -> its fields, which should be two.
      expected: what an entry should be, for messages.

    Raises:
      UserError: if an entry has other fields, or a term has two translations.
    """
    as_written: dict[tuple[str, ...], str] = {}
    any_case: dict[tuple[str, ...], str] = {}
    for where, fields in entries.items():
        term, *rest = map(str.strip, fields) if fields else [""]
        words = tuple(_words(term))
        if len(rest) != 1 or not words or not rest[0]:
            found = f"{1 + len(rest)} fields" if len(rest) != 1 else "an empty one"
            raise UserError(f"{where}: expected {expected}, not {found}")
        terms = any_case if words == tuple(map(str.lower, words)) else as_written
        if terms.setdefault(words, rest[0]) != rest[0]:
            raise UserError(f"{where}: {term!r} already has the translation {terms[words]!r}")
    return Glossary(as_written, any_case, max(map(len, (*as_written, *any_case)), default=0))


def encode_phrase(tokenizer: Tokenizer, phrase: str, unused: Collection[int]) -> list[int]:
    """Returns the token ids of a phrase within a target sentence.

    Args:
      tokenizer: the vocabulary.
      phrase: text without surrounding white space.
      unused: target tokens that the model never produces.

    Raises:
      UserError: if the phrase contains such a token, or a character that has no piece.
    """
    ids = tokenizer.encode_target([phrase])[0][:-1]
    first = tokenizer.target_pieces_of(ids[:1])
    if regex.match(rf"[{UNSPACED}]", phrase) and first[0].startswith(SPACE):
        rest = tokenizer.target_processor.piece_to_id(first[0].removeprefix(SPACE))
        ids = ids[1:] if first[0] == SPACE else [ids[0] if rest == UNK else rest, *ids[1:]]
    if not ids or UNK in ids or not set(unused).isdisjoint(ids):
        raise UserError(f"the model cannot write {phrase!r}: its vocabulary lacks pieces of it")
    return ids


def word_starts(pieces: Sequence[str], codes: bool = False) -> tuple[bool, ...]:
    """Returns whether each piece does not continue a word when it follows the last piece of a phrase.

    With `codes`, none does, because the last piece of a phrase has no mark that its word goes on.
    """
    return tuple(codes or INSIDE.match(piece) is None for piece in pieces)


def _words(text: str) -> list[str]:
    return WORD.findall(unicodedata.normalize("NFC", text))

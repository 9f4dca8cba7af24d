"""Glossaries: translations that terms of the source must have, and phrases as token ids."""

import hashlib
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


Trie = dict[str, Any]
"""Next word -> Trie of the terms that go on with it; "" -> translation of the term that ends here."""


class Glossary(NamedTuple):
    """Terms of the source with their translations, as words of `WORD`. Earlier tries replace terms of later ones."""

    as_written: tuple[Trie, ...] = ()
    """Terms with capitals, which match only as they are written."""
    any_case: tuple[Trie, ...] = ()
    """Terms without capitals, which match in any case."""
    sha256: str = ""
    """Hash of the file."""

    def translations(self, line: str) -> list[str]:
        """Returns the translations of the terms in a source line, each once.

        From left to right, the longest term that begins at a word is taken, and the search continues after it.
        """
        words = _words(line)
        lower = list(map(str.lower, words))
        tries = [*((trie, words) for trie in self.as_written), *((trie, lower) for trie in self.any_case)]
        found, place = [], 0
        while place < len(words):
            matches = (_longest(trie, read, place) for trie, read in tries)
            size, translation = max(matches, key=lambda match: match[0], default=(0, ""))
            if size:
                found.append(translation)
            place += max(size, 1)
        return list(dict.fromkeys(found))

    @property
    def all_translations(self) -> list[str]:
        """The translations of all terms."""
        return [translation for trie in (*self.as_written, *self.any_case) for translation in _translations(trie)]

    def over(self, base: "Glossary") -> "Glossary":
        """Returns the terms of both; a term of this glossary replaces the same term of `base`. Without a hash."""
        return Glossary(self.as_written + base.as_written, self.any_case + base.any_case)


def _longest(trie: Trie, words: Sequence[str], start: int) -> tuple[int, str]:
    """Returns the number of words and the translation of the longest term at `start`; (0, "") if there is none."""
    longest, node = (0, ""), trie
    for place in range(start, len(words)):
        if words[place] not in node:
            break
        node = node[words[place]]
        if "" in node:
            longest = place + 1 - start, node[""]
    return longest


def _translations(trie: Trie) -> Iterator[str]:
    for word, node in trie.items():
        yield from _translations(node) if word else (node,)


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
    as_written: Trie = {}
    any_case: Trie = {}
    for where, fields in entries.items():
        term, *rest = map(str.strip, fields) if fields else [""]
        words = _words(term)
        if len(rest) != 1 or not words or not rest[0]:
            found = f"{1 + len(rest)} fields" if len(rest) != 1 else "an empty one"
            raise UserError(f"{where}: expected {expected}, not {found}")
        node = any_case if words == list(map(str.lower, words)) else as_written
        for word in words:
            node = node.setdefault(word, {})
        if (known := node.setdefault("", rest[0])) != rest[0]:
            raise UserError(f"{where}: {term!r} already has the translation {known!r}")
    return Glossary((as_written,), (any_case,))


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
    check_writable(phrase, ids or [UNK], unused)
    return ids


def check_writable(text: str, ids: Collection[int], unused: Collection[int]) -> None:
    """Raises `UserError` if the token ids of a text contain an unknown one, or one that the model never produces."""
    if not {UNK, *unused}.isdisjoint(ids):
        raise UserError(f"the model cannot write {text!r}: its vocabulary lacks pieces of it; use other words")


def word_starts(pieces: Sequence[str], codes: bool = False) -> tuple[bool, ...]:
    """Returns whether each piece does not continue a word when it follows the last piece of a phrase.

    With `codes`, none does, because the last piece of a phrase has no mark that its word goes on.
    """
    return tuple(codes or INSIDE.match(piece) is None for piece in pieces)


def _words(text: str) -> list[str]:
    return WORD.findall(unicodedata.normalize("NFC", text))

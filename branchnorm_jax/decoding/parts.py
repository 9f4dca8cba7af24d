"""Long lines: splitting into parts that a model can translate, and joining the translations of the parts."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import sentencex

from branchnorm_jax.codes import base
from branchnorm_jax.data.bpe import CONTINUES
from branchnorm_jax.data.tokenizer import Tokenizer
from branchnorm_jax.decoding.glossary import SPACE
from branchnorm_jax.decoding.scripts import CHINESE_OR_JAPANESE, UNSPACED
from branchnorm_jax.tokens import EOS

_WORD = re.compile(r"\S+\s*")

_SENTENCES_TOUCH = re.compile(f"[{CHINESE_OR_JAPANESE}]")
"""Characters of languages that write no space between sentences."""

_MARKS = "“”‘’…—"
"""Marks of Chinese text that other languages have, too."""

_WORDS_TOUCH = re.compile(f"[{UNSPACED}]")
"""Characters of languages that write no space between words."""


_BYTE, _LATER_BYTE = re.compile("<0x[0-9A-F]{2}>"), re.compile("<0x[89AB][0-9A-F]>")
"""Pieces that are bytes, and those that are not the first byte of a character."""

_END = re.compile(r"[^\w\s,;:()\"'-]\s*\S")
"""A mark that may end a sentence, with text after it."""


class Part(NamedTuple):
    """A part of a line, or a whole line."""

    source: list[int]
    """Token ids, EOS last."""
    text: str = ""
    """The source text. If a word is cut, its first part has the whole word, and the others have none."""
    inside: bool = False
    """Whether the part begins inside a word."""
    warning: str = ""
    """Describes the source text that was cut off; empty if none was."""


def split(text: str, tokenizer: Tokenizer, limit: int, language: str = "") -> list[Part]:
    """Splits text into sentences, and long sentences into parts of at most `limit` tokens, EOS included.

    A sentence that does not fit is split at white space, and a word that does not fit between its pieces. The parts
    together have all of the text; only white space between two parts is in neither. A part never has several sentences,
    because a model that was trained on single sentences translates only one of several.

    Args:
      text: any text.
      tokenizer: splits source text into pieces.
      limit: maximum length of a part, at least 2 tokens.
      language: code of the source language, which the library that finds the sentences knows; "" if unknown.
    """
    parts: list[Part] = []
    sentences = [sentence.strip() for sentence in _sentences(text, language)]
    for sentence, whole in zip(sentences, tokenizer.encode_source(sentences), strict=True):
        fits = len(whole) <= limit
        groups = [sentence] if fits else _groups(sentence, tokenizer, limit)
        for group, ids in zip(groups, [whole] if fits else tokenizer.encode_source(groups), strict=True):
            content, start = ids[:-1], 0
            pieces = tokenizer.source_pieces_of(content)
            while start < len(content):
                inside = start > 0 and not pieces[start].startswith(SPACE) and _lengthens(pieces[:start])
                end = _end_of(pieces, start, limit - 1)
                parts.append(Part([*content[start:end], EOS], "" if start else group, inside))
                start = end
    return parts or [Part([EOS])]


def _end_of(pieces: Sequence[str], start: int, room: int) -> int:
    """Returns where a part ends that has at most `room` pieces, not between the bytes of a character if possible."""
    end = latest = min(start + room, len(pieces))
    while start < end < len(pieces) and _LATER_BYTE.fullmatch(pieces[end]):
        end -= 1
    return end if end > start else latest


def _lengthens(before: Sequence[str]) -> bool:
    """Returns whether text after these pieces lengthens their last word."""
    last = before[-1].removesuffix(CONTINUES)
    if _BYTE.fullmatch(last):
        run = [*itertools.takewhile(_BYTE.fullmatch, reversed(before[-4:]))]
        last = bytes(int(piece[3:-1], 16) for piece in reversed(run)).decode(errors="replace")
    return bool(last) and last != SPACE and not _WORDS_TOUCH.match(last[-1])


def has_several_sentences(text: str, language: str = "") -> bool:
    """Returns whether a text has several sentences. `language` is as in `split`.

    >>> [has_several_sentences(text, "en") for text in ("Mr. Smith is here.", "Who is it? It is me.", "Go!")]
    [False, True, False]
    """
    # The first test is fast, and true for few lines.
    return bool(_END.search(text)) and len([each for each in _sentences(text, language) if each.strip()]) > 1


def _sentences(text: str, language: str) -> list[str]:
    """Returns the sentences of a text, each with the white space that follows it."""
    # sentencex loses some line breaks, and fails at some initials with a no-break space.
    plain = re.sub(r"\s", " ", text)
    found = sentencex.segment(base(language), plain)
    if "".join(found) != plain:  # Versions before 1.0.20 lost text.
        return [text]
    ends = list(itertools.accumulate(map(len, found)))
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _groups(sentence: str, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Splits a sentence into as many words as fit the limit; a word that does not fit stays alone."""
    words = _WORD.findall(sentence)
    sizes = [len(ids) - 1 for ids in tokenizer.encode_source([word.strip() for word in words])]
    groups: list[str] = []
    start = 0
    while start < len(words):
        end, size = start + 1, sizes[start]
        while end < len(words) and size + sizes[end] < limit:
            size += sizes[end]
            end += 1
        # With `data.source_normalization=identity`, the spaces between words can be pieces, too.
        while end > start + 1 and len(tokenizer.encode_source(["".join(words[start:end]).strip()])[0]) > limit:
            end -= 1
        groups.append("".join(words[start:end]).strip())
        start = end
    return groups


def join(texts: Sequence[str], parts: Sequence[Part]) -> str:
    """Joins the translations of the parts of a line.

    They are separated by a space. There is none at a cut inside a word, and none beside Chinese and Japanese
    characters. Empty translations are left out.
    """
    joined: list[str] = []
    for text, part in zip(texts, parts, strict=True):
        if text and joined:
            # Quotation marks, ellipses and dashes belong to no script.
            last, first = joined[-1].rstrip(_MARKS)[-1:], text.lstrip(_MARKS)[:1]
            touch = part.inside or any(map(_SENTENCES_TOUCH.match, (last, first)))
            joined.append("" if touch else " ")
        if text:
            joined.append(text)
    return "".join(joined)

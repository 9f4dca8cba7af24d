"""Normalisation of text before it is split into pieces, as part of a SentencePiece model.

A rule is a map from strings to strings that is applied from left to right, always to the longest string it knows. So
every program that reads a SentencePiece model applies it, also after an export.

    nmt_nfkc   NFKC, and all kinds of white space become a space: ½ -> 1⁄2, … -> ..., ， -> ,
    nfkc       NFKC (Unicode's compatibility composition)
    nfc        NFC (canonical composition) of the letters that Unicode knows: e + ´ -> é, nothing that one can see; and
               a tab becomes a space. Several marks on one letter keep their order, which NFC would make canonical.
    identity   nothing, not even repeated spaces

All rules but `identity` remove repeated spaces, and spaces at the ends of a line.
"""

import functools
import itertools
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from branchnorm_jax.errors import count, some

SHOWN, LINE = 6, 100
"""Characters of a description, and letters of its example."""

_MARKS = 3
"""Combining marks of a letter are composed in any order, up to this many."""


class Change(NamedTuple):
    """A character that a rule changes."""

    character: str
    becomes: str
    number: int
    """Number of occurrences."""
    example: str
    """The first line with the character."""


@functools.cache
def normalizer(rule: str, model: bool = False) -> sentencepiece.SentencePieceNormalizer:
    """Returns the normaliser of a rule; with `model`, in the form that is part of a model."""
    options: dict[str, Any] = dict(add_dummy_prefix=model, escape_whitespaces=model)
    options["remove_extra_whitespaces"] = rule != "identity"
    if rule != "nfc":
        return sentencepiece.SentencePieceNormalizer(rule_name=rule, **options)
    sentencepiece.set_min_log_level(2)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "nfc.tsv"
        table.write_text(_nfc_table())
        return sentencepiece.SentencePieceNormalizer(rule_tsv=str(table), **options)


@functools.cache
def _nfc_table() -> str:
    """Returns the map of the rule `nfc` as SentencePiece reads it."""
    changes = sorted({*compositions(), ("\t", " ")})
    return "".join(f"{_hex(text)}\t{_hex(composed)}\n" for text, composed in changes)


def with_rule(model: bytes, rule: str) -> bytes:
    """Returns a serialised SentencePiece model with this rule in place of its own.

    Appending a message of protocol buffers replaces the fields that it sets.
    """
    part = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    part.ParseFromString(normalizer(rule, model=True).serialized_model_proto())
    # The temporary file's name would make every vocabulary a different file.
    part.normalizer_spec.ClearField("normalization_rule_tsv")
    return model + part.SerializeToString()


def compositions() -> Iterator[tuple[str, str]]:
    """Yields (text, its NFC) for every text that is one character in NFC, or one character before, and changes."""
    for code in itertools.chain(range(0xD800), range(0xE000, 0x110000)):
        character = chr(code)
        if unicodedata.is_normalized("NFD", character):
            continue
        letter, marks = (decomposed := unicodedata.normalize("NFD", character))[0], decomposed[1:]
        composed = _nfc(character)
        if composed != character:
            yield character, composed
        if not marks or len(composed) > 1:
            continue
        # Some of the marks may be part of the letter already.
        orders = itertools.permutations(marks) if len(marks) <= _MARKS else [tuple(marks)]
        texts = {_nfc(letter + "".join(order[:n])) + "".join(order[n:]) for order in orders for n in range(len(order))}
        yield from ((text, composed) for text in texts if _nfc(text) == composed != text)


def changes(rule: str, lines: Iterable[str]) -> list[Change]:
    """Returns the characters of lines that a rule changes, the most frequent first; spaces are not counted."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for line in lines:
        here = set(line)
        for character in here - examples.keys():
            examples[character] = line
        counts.update(line)
    apply = normalizer(rule).normalize
    found = ((character, apply(f"|{character}|")[1:-1]) for character in counts if character != " ")
    changed = [Change(old, new, counts[old], examples[old]) for old, new in found if old != new]
    return sorted(changed, key=lambda change: (-change.number, change.character))


def describe(side: str, rule: str, changed: Sequence[Change]) -> str:
    """Describes the changes of one side of a corpus in one line; there is at least one."""
    kinds = ", ".join(f"{one.character!r} to {one.becomes!r} ({one.number:,})" for one in changed[:SHOWN])
    more = f", and {len(changed) - SHOWN} other kinds" if len(changed) > SHOWN else ""
    rarest = changed[-1]
    example = rarest.example if len(rarest.example) <= LINE else rarest.example[:LINE] + "..."
    others = [repr(one.character) for one in changes("nfc", (one.character for one in changed))]
    hint = f"; data.{side}_normalization=nfc keeps them" + (f", except {some(others)}" if others else "")
    return (
        f"data.{side}_normalization={rule} changes {count(sum(one.number for one in changed), 'character')}: "
        f"{kinds}{more}; for example in {example!r}" + (hint if len(others) < len(changed) else "")
    )


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _hex(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)

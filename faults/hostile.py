"""Unusual and malformed text and files, made from the built-in corpus and the README."""

import bz2
import functools
import gzip
import json
import lzma
import random
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

import zstandard

from branchnorm_jax.data import numerals
from faults.processes import ROOT

SPECIAL = (
    *(
        "\0",
        "\a",
        "\b",
        "\x1b[2J",
        "\x7f",
        "\t",
        "\r",
        "\v",
        "\f",
        "\x1c",
        "\x85",
        "\u2028",
        "\u2029",
        "\u00a0",
        "\u00ad",
    ),
    *(
        "\u200b",
        "\u200d",
        "\u202e",
        "\u2066",
        "\u2069",
        "\ufeff",
        "\ufffd",
        "\ufffe",
        "\U0010ffff",
        "e\u0301",
        "\u0301",
    ),
    *(
        "😀",
        "🏳️‍🌈",
        "שלום",
        "مرحبا",
        "नमस्ते",
        "ﷺ",
        "½",
        "…",
        "▁",
        "</s>",
        "<unk>",
        "<pad>",
        "<0x0A>",
        ">>de<<",
        ">>xx<< ",
    ),
    *("|||", "&#10;", "&amp;", "<script>", "\\n", "%s", "{}", "'", '"', "\\ud800"),
)
"""Characters that programs treat in a special way, or should not."""

INVALID = (b"\xff", b"\xfe", b"\x80", b"\xed\xa0\x80", b"\xed\xb0\x80", b"\xc0\x80", b"\xe2\x82", b"\xf4\x90\x80\x80")
"""Bytes that no UTF-8 text has, among them surrogates."""

Pair = tuple[str, str]


@functools.cache
def pairs() -> list[Pair]:
    """Returns 400 sentences in English and German, and the lines of the README, twice each."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [*numerals.pairs("test", "en", "de", 400), *((line, line) for line in readme if line.strip())]


def mutated(text: str, rng: random.Random) -> str:
    """Returns a text with one change. It has no line feed."""
    start = rng.randint(0, len(text))
    end = rng.randint(start, len(text))
    changes: tuple[Callable[[], str], ...] = (
        lambda: text[:start] + rng.choice(SPECIAL) * rng.choice((1, 1, 1, 40)) + text[start:],
        lambda: text[:start] + rng.choice(SPECIAL) + text[end:],
        lambda: text[:end] + text[start:],
        lambda: text * rng.choice((0, 2, 20)),
        lambda: "".join(rng.sample(text, len(text))),
        lambda: "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in text[:20]),
    )
    return rng.choice(changes)().replace("\n", " ")


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    """Returns bytes with one change."""
    start = rng.randint(0, len(content))
    end = min(len(content), start + rng.choice((0, 1, 1, 8, 100)))
    new = rng.choice((b"", rng.randbytes(1), rng.randbytes(8), rng.choice(INVALID), content[start:end] * 2, b"\0"))
    return content[:start] + new + content[end:]


def lines(rng: random.Random, count: int, two: bool) -> bytes:
    """Returns the content of a file of `count` lines, a third of them changed; with `two`, of two fields.

    Line ends, a byte-order mark and the end of the last line vary. One file in three has bytes that are not UTF-8.
    """
    made = []
    for _ in range(count):
        fields = [*rng.choice(pairs())][: 1 + two]
        if rng.random() < 0.3:
            place = rng.randrange(len(fields))
            fields[place] = mutated(fields[place], rng)
            if two and rng.random() < 0.999:
                fields = [field.replace("\t", " ") for field in fields]
        made.append("\t".join(fields).encode())
    for _ in range(rng.choice((0, 0, rng.randint(1, 3)))):
        place = rng.randrange(count)
        made[place] = mutated_bytes(made[place], rng).replace(b"\n", b"")
    end = rng.choice((b"\n", b"\n", b"\r\n"))
    made[-1] = made[-1] or b"x"  # an empty line without a line feed is none
    return rng.choice((b"", b"", b"\xef\xbb\xbf")) + end.join(made) + rng.choice((end, end, b""))


def plain(content: bytes) -> list[bytes]:
    """Returns the lines of a file: only line feeds end them."""
    *whole, last = content.split(b"\n")
    return [*whole, last] if last else whole


def first_invalid(content: bytes) -> int:
    """Returns the number of the first line that is not UTF-8; 0: all are."""
    for number, line in enumerate(plain(content), start=1):
        try:
            line.decode()
        except UnicodeDecodeError:
            return number
    return 0


def tsv(rows: Sequence[Pair]) -> str:
    """Returns pairs as tab-separated columns, with a header."""
    return "".join("\t".join(field.replace("\t", " ") for field in row) + "\n" for row in [("en", "de"), *rows])


def jsonl(rows: Sequence[Pair]) -> str:
    """Returns pairs as lines of JSON."""
    return "".join(json.dumps({"translation": {"en": en, "de": de}, "id": 7}) + "\n" for en, de in rows)


def in_xml(text: str) -> str:
    """Returns a text without the characters that XML cannot have, and without tabs and line breaks."""
    return "".join(c for c in text if c >= " " and not 0xD800 <= ord(c) < 0xE000 and c not in "\ufffe\uffff")


def tmx(rows: Sequence[Pair]) -> str:
    """Returns pairs as a translation memory."""

    def segment(code: str, text: str) -> str:
        return f'<tuv xml:lang="{code}"><seg>{escape(in_xml(text))}</seg></tuv>'

    units = "".join(f"<tu>{segment('en', en)}{segment('de', de)}</tu>\n" for en, de in rows)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<tmx version="1.4"><header/><body>\n{units}</body></tmx>\n'


def one_line(text: str) -> str:
    """Returns a text in which each line break, and the space around it, is one space."""
    parts = (part.strip() for part in text.replace("\r", "\n").split("\n"))
    return " ".join(part for part in parts if part)


class Format(NamedTuple):
    """How a kind of file is written, and parts of files that it should not have."""

    write: Callable[[Sequence[Pair]], str]
    kept: Callable[[str], str]
    """What a reader gets of a text."""
    poison: tuple[str, ...]


DEEP = 100_000

FORMATS: dict[str, Format] = {
    "tsv": Format(
        tsv, lambda text: one_line(text.replace("\t", " ")), ("a\tb\tc\n", "a\n", "\t\n", "en\tde\n", '"a\tb"\n')
    ),
    "jsonl": Format(
        jsonl,
        one_line,
        (
            *("[" * DEEP + "\n", "{" * 99 + "\n", "9" * 5000 + "\n", "NaN\n", "null\n", "[]\n", '"en"\n', "{}\n", "\n"),
            '{"en": "a", "en": "b", "de": "c"}\n',
            '{"en": 1, "de": "c"}\n',
            '{"en": {"en": "a"}, "de": "c"}\n',
            '{"translation": null}\n',
            '{"translation": ["en", "de"]}\n',
            '{"en": "\\ud800", "de": "c"}\n',
        ),
    ),
    "tmx": Format(
        tmx,
        lambda text: one_line(in_xml(text)),
        (
            '<!DOCTYPE tmx [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>',
            '<!DOCTYPE tmx [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
            '<!DOCTYPE tmx [<!ENTITY % a SYSTEM "file:///etc/passwd"> %a;]>',
            *(
                '<!DOCTYPE tmx SYSTEM "file:///dev/zero">',
                "&a;",
                "&#0;",
                "&#xD800;",
                "<a>" * DEEP,
                "<hi>" * 2000,
                "]]>",
            ),
            *(
                "<tu></tu>",
                "<tu><tuv><seg>a</seg></tuv></tu>",
                "</tu>",
                "</tmx>",
                "<seg>",
                "<![CDATA[",
                "<!--",
                "<?x?>",
            ),
            *(f'<?xml version="1.0" encoding="{name}"?>' for name in ("x-y", "utf-7", "shift_jis", "utf-16", "idna")),
        ),
    ),
}

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": functools.partial(lzma.compress, preset=0),
    ".zst": lambda content: zstandard.ZstdCompressor(write_checksum=True).compress(content),
}


def compressed(content: bytes, suffix: str, rng: random.Random) -> list[bytes]:
    """Returns a compressed file as one to three frames."""
    ends = sorted(rng.randint(0, len(content)) for _ in range(rng.randint(0, 2)))
    return [COMPRESS[suffix](content[a:b]) for a, b in zip([0, *ends], [*ends, len(content)], strict=True)]


def damaged(frames: Sequence[bytes], rng: random.Random) -> bytes:
    """Returns a compressed file with a bit flipped, a range deleted, or its end cut off, but not between two frames."""
    content = b"".join(frames)
    borders = {sum(map(len, frames[:count])) for count in range(len(frames) + 1)}
    at = rng.choice([place for place in range(len(content)) if place not in borders])
    size = rng.choice((0, rng.randint(1, 40), sys.maxsize))
    if not size:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return content[:at] + content[at:][size:]

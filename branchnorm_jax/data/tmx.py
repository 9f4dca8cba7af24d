"""Translation memories in TMX, read with a streaming parser."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.parsers import expat

from upath import UPath

from branchnorm_jax.data.lines import chunks, readable
from branchnorm_jax.errors import UserError


def units(path: Path | UPath) -> Iterator[Mapping[str, str]]:
    """Yields the texts of each translation unit by language, in constant memory.

    A text is a segment without the formatting codes of inline elements. If a unit has several texts in a language, the
    first counts.

    Raises:
      UserError: during iteration, if the file cannot be read or is not TMX, or if it declares entities, which could
        make a text arbitrarily long. External entities are never read.
    """
    reader = _Reader(path)
    with readable(path):
        try:
            for chunk in chunks(path):
                reader.parser.Parse(chunk, False)
                yield from reader.take()
            reader.parser.Parse(b"", True)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise UserError(f"{path}, line {error.lineno}: not well-formed XML ({reason}); export it again") from error
        except (LookupError, ValueError) as error:  # from Python's codecs
            raise UserError(f"{path}: its encoding cannot be read ({error}); export it as UTF-8") from error
    yield from reader.take()


class _Reader:
    """Collects the units of a file as its parser reports them."""

    def __init__(self, path: Path | UPath) -> None:
        self.path, self.parser = path, expat.ParserCreate()
        self._elements: list[str] = []
        self._complete: list[dict[str, str]] = []
        self._unit: dict[str, str] = {}
        self._language = ""
        self._segment: list[str] = []
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.EntityDeclHandler = lambda name, *_: self._refuse(f"declares the entity {name!r}")
        self.parser.SkippedEntityHandler = lambda name, *_: self._refuse(f"uses the unknown entity {name!r}")

    def take(self) -> list[dict[str, str]]:
        """Returns the complete units that have not been taken yet."""
        complete, self._complete = self._complete, []
        return complete

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._elements.append(name)
        if self._elements[0] != "tmx":
            raise UserError(f"{self.path}: not TMX, but XML that begins with <{name}>")
        if name == "tu":
            self._unit = {}
        elif name == "tuv":
            self._language = attributes.get("xml:lang") or attributes.get("lang", "")
        elif name == "seg":
            self._segment = []

    def _end(self, name: str) -> None:
        self._elements.pop()
        if name == "seg":
            self._unit.setdefault(self._language, "".join(self._segment))
        elif name == "tu":
            self._complete.append(self._unit)

    def _characters(self, text: str) -> None:
        # <hi> marks up text; the other elements of a segment contain codes of the original format.
        inner = [name for name in self._elements[::-1] if name != "hi"]
        if inner and inner[0] == "seg":
            self._segment.append(text)

    def _refuse(self, what: str) -> Any:
        raise UserError(f"{self.path}, line {self.parser.CurrentLineNumber}: {what}; write its characters instead")

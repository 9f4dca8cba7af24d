"""Selection of the languages of each line, for multilingual models."""

import dataclasses
import functools
from collections.abc import Sequence

from branchnorm_jax.codes import near
from branchnorm_jax.data.tokenizer import NO_TAGS, TAG, Tags, Tokenizer
from branchnorm_jax.errors import UserError, some
from branchnorm_jax.options import DataConfig


@dataclasses.dataclass(frozen=True)
class Languages:
    """The languages of a model and their tags.

    Attributes:
      data: data options of the run; `pairs` lists the trained language pairs.
      tokenizer: maps languages to tags.
      options: prefix of target_lang and source_lang in error messages.
    """

    data: DataConfig
    tokenizer: Tokenizer
    options: str = "decode."

    @functools.cached_property
    def targets(self) -> list[str]:
        """Languages the model translates to."""
        return self.data.targets

    @functools.cached_property
    def sources(self) -> list[str]:
        """Languages the model translates from."""
        return self.data.sources

    @property
    def reads_source(self) -> bool:
        """Whether the model needs to know the source language."""
        return bool(self.data.pairs) and self.data.tags == "each"

    def check(self, source: str, target: str) -> None:
        """Raises `UserError` if the source or target language is not one of the model's; "" means any."""
        for way, lang, known in (("from", source, self.sources), ("to", target, self.targets)):
            if lang and lang not in known:
                raise UserError(_unknown(way, lang, known))

    def split_tags(
        self, lines: Sequence[str], default: str, first: int = 1, source: str = "", name: str = ""
    ) -> tuple[list[str], list[Tags]]:
        """Removes the tag of the target language, such as ">>de<< ", from each line; returns the lines and their tags.

        The tag stands at the start of the line; spaces before and after it are removed.

        Args:
          lines: source lines.
          default: target language of lines without a tag; may be "" if the model has a single target language.
          first: number of the first line, for error messages.
          source: source language; may be "" if the model has a single one or does not need to know it.
          name: name of the input, for error messages.

        Raises:
          UserError: if a language is not one of the model's, or if the model has several and neither the line nor
            the other arguments name one.
        """
        self.check(source, default)
        source = source or (self.sources[0] if len(self.sources) == 1 else "")
        if self.reads_source and not source:
            raise UserError(f"no source language; set {self.options}source_lang to one of {some(self.sources)}")
        if not self.data.pairs:
            return list(lines), [NO_TAGS] * len(lines)
        targets, texts, tags = self.targets, [], []
        default = default or (targets[0] if len(targets) == 1 else "")
        for number, line in enumerate(lines, start=first):
            where = f"{name}, line {number}" if name else f"line {number}"
            match = TAG.match(start := line.lstrip(" "))
            lang = match[1] if match else default
            if not line.strip():
                lang = targets[0]  # an empty line has an empty translation in any language
            elif not lang:
                choice = some([f">>{lang}<<" for lang in targets])
                option = f"{self.options}target_lang"
                raise UserError(f"{where}: no target language; set {option} or start the line with {choice}")
            if lang not in targets:
                raise UserError(f"{where}: {_unknown('to', lang, targets)}")
            tags.append(self.tokenizer.tags(self.data, source, lang))
            texts.append(start[match.end() :].lstrip(" ") if match else line)
        return texts, tags

    def ignored_tag(self, text: str) -> str:
        """Returns a message about a language tag that `split_tags` left in the text of a line; "" if it left none."""
        match = TAG.match(text.lstrip(" ")) or next((m for m in TAG.finditer(text) if m[1] in self.targets), None)
        if not match:
            return ""
        why = "only one at the start of a line is" if self.data.pairs else "this model has no language tags"
        return f"{match[0]} is read as text, not as a language tag: {why}"


def _unknown(way: str, lang: str, known: Sequence[str]) -> str:
    """Returns the message about a language that the model does not translate from or to."""
    if meant := " or ".join(near(lang, known)):
        return f"this model was not trained to translate {way} {lang!r}; did you mean {meant}?"
    return f"this model was trained to translate {way} {some(known)}, not {way} {lang!r}"

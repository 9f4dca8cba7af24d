"""Selection of the target language of each line, for multilingual models."""

import dataclasses
from collections.abc import Sequence

from branchnorm_jax.data.tokenizer import NO_TAGS, TAG, Tags, Tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig


@dataclasses.dataclass(frozen=True)
class Languages:
    """The languages of a model and their tags.

    Attributes:
      data: data options of the run; `pairs` lists the trained language pairs.
      tokenizer: maps languages to tags.
    """

    data: DataConfig
    tokenizer: Tokenizer

    @property
    def targets(self) -> list[str]:
        """Languages the model translates to."""
        return sorted({direction.target_lang for direction in self.data.directions()})

    @property
    def sources(self) -> list[str]:
        """Languages the model translates from."""
        return sorted({direction.source_lang for direction in self.data.directions()})

    def split_tags(self, lines: Sequence[str], default: str, first: int = 1) -> tuple[list[str], list[Tags]]:
        """Removes the language tag, such as ">>de<< ", from each line; returns the lines and their tags.

        Args:
          lines: source lines.
          default: language of lines without a tag; may be "" if the model has a single target language.
          first: number of the first line, for error messages.

        Raises:
          UserError: if a language is not among `targets`, or if the model has several and neither the line nor
            `default` names one.
        """
        if not self.data.pairs:
            if default not in ("", self.data.target_lang):
                raise UserError(f"this model translates to {self.data.target_lang}, not to {default}")
            return list(lines), [NO_TAGS] * len(lines)
        targets, texts, tags = self.targets, [], []
        default = default or (targets[0] if len(targets) == 1 else "")
        for number, line in enumerate(lines, start=first):
            match = TAG.match(line)
            lang = match[1] if match else default
            if not line.strip():
                lang = targets[0]  # an empty line has an empty translation in any language
            elif not lang:
                choice = ", ".join(f">>{lang}<<" for lang in targets)
                raise UserError(f"line {number}: no target language; set target_lang or start the line with {choice}")
            if lang not in targets:
                known = ", ".join(targets)
                raise UserError(f"line {number}: this model was trained to translate to {known}, not to {lang!r}")
            tags.append(self.tokenizer.tags(self.data, lang))
            texts.append(line[match.end() :].lstrip(" ") if match else line)
        return texts, tags

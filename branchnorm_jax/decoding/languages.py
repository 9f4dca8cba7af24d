"""Which language is a line to be translated to, where a model knows several?"""

import dataclasses
from collections.abc import Sequence

from branchnorm_jax.data.tokenizer import NO_TAGS, TAG, Tags, Tokenizer
from branchnorm_jax.errors import UserError
from branchnorm_jax.options import DataConfig


@dataclasses.dataclass(frozen=True)
class Languages:
    """What a line may ask for.

    Attributes:
      data: of the run; its `pairs` were trained.
      tokenizer: knows the tags.
    """

    data: DataConfig
    tokenizer: Tokenizer

    @property
    def targets(self) -> list[str]:
        """Languages that can be asked for."""
        return sorted({direction.target_lang for direction in self.data.directions()})

    @property
    def sources(self) -> list[str]:
        """Languages that the model has read."""
        return sorted({direction.source_lang for direction in self.data.directions()})

    def asked(self, lines: Sequence[str], default: str, first: int = 1) -> tuple[list[str], list[Tags]]:
        """Lines without their tag, such as ">>de<< ", and what asks for that language, or for the default.

        Args:
          lines: of which the first has the number `first`.
          default: language of lines without a tag; "" where there is none, which matters only if there are several.
          first: for messages.

        Raises:
          UserError: if a language is not among `targets`, or neither line nor default names one of several.
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
                lang = targets[0]  # of nothing, nothing is asked for
            elif not lang:
                choice = ", ".join(f">>{lang}<<" for lang in targets)
                raise UserError(f"line {number}: to which language? Set a target_lang or begin the line with {choice}")
            if lang not in targets:
                known = ", ".join(targets)
                raise UserError(f"line {number}: this model was trained to translate to {known}, not to {lang!r}")
            tags.append(self.tokenizer.tags(self.data, lang))
            texts.append(line[match.end() :].lstrip(" ") if match else line)
        return texts, tags

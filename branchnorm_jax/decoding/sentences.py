"""What is translated: lines of text, and the sentences that the engine searches."""

from collections.abc import Sequence
from typing import NamedTuple

from branchnorm_jax.data.tokenizer import NO_TAGS, Tags
from branchnorm_jax.decoding.engine import Query
from branchnorm_jax.decoding.glossary import Glossary


class Required(NamedTuple):
    """What a translation must contain."""

    prefix: str = ""
    """Its beginning."""
    phrases: Sequence[str] = ()
    """Whole words that occur anywhere in it."""
    glossary: Glossary | None = None
    """Terms of the source with their translations; None: the glossary of the translator."""


class Line(NamedTuple):
    """A line to translate."""

    text: str
    number: int
    """Line number; seeds the samples."""
    tags: Tags = NO_TAGS
    """Its language tags."""
    required: Required = Required()
    """What the translation must contain."""
    nbest: int = 1
    """Number of translations requested."""
    attention: bool = False
    """Whether attention weights are requested."""


class Sentence(NamedTuple):
    """A tokenised line, or a part of one, to translate."""

    source: Sequence[int]
    """Token ids, EOS last."""
    number: int
    """Seeds the samples of this sentence."""
    tags: Tags = NO_TAGS
    """Its language tags."""
    prefix: Sequence[int] = ()
    """Token ids that the translation starts with, without EOS."""
    nbest: int = 1
    """Number of translations requested."""
    phrases: Sequence[Sequence[int]] = ()
    """Token ids of phrases that the translation contains."""

    @property
    def is_empty(self) -> bool:
        """Whether the translation is empty, without a search."""
        return len(self.source) == 1 and not self.prefix and not self.phrases

    @property
    def query(self) -> Query:
        """The sentence with its tags, for the engine."""
        source, prefix = [*self.tags.source, *self.source], [*self.tags.target, *self.prefix]
        return Query(source, self.number, prefix, self.nbest, len(self.tags.target), self.phrases)

"""Subword regularisation: the same sentence in other pieces each time it is read.

Kudo, "Subword Regularization: Improving Neural Network Translation Models with Multiple Subword Candidates" (2018):
segmentation s of a text is drawn with probability P(s)^alpha / sum over the n best, P the unigram model's. Pieces do
not cross spaces, so that words are drawn one by one, which has the same distribution but for what "n best" leaves out.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import sentencepiece

from branchnorm_jax.data.shuffle import hashed
from branchnorm_jax.options import EOS

NBEST = 64
"""So many segmentations of a word take part."""

_SPACE = "\u2581"
_LONGEST = 1 << 20  # words of a line
_CACHED = 1 << 14  # words, of some ten kilobytes each


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws segmentations.

    Attributes:
      processor: a SentencePiece unigram model.
      alpha: 0: all segmentations of a word are as likely; large: only the best one.
      seeds: a draw depends on these, the line's number and the word's place in it.
    """

    processor: sentencepiece.SentencePieceProcessor
    alpha: float
    seeds: tuple[int, ...]

    def encode(self, lines: Sequence[str], first: int) -> list[list[int]]:
        """Token ids of each line, EOS appended; `first` is the number of the first line."""
        words = [[word for word in line.split(_SPACE) if word] for line in self.processor.normalize(list(lines))]
        places = [
            (first + index) * _LONGEST + place for index, found in enumerate(words) for place in range(len(found))
        ]
        chances = iter((hashed(np.array(places), *self.seeds) / 2**64).tolist())
        return [
            [*itertools.chain.from_iterable(self._draw(word, next(chances)) for word in found), EOS] for found in words
        ]

    def _draw(self, word: str, chance: float) -> list[int]:
        segmentations, until = self._table(word)
        return segmentations[bisect.bisect_right(until, chance)]

    @functools.cached_property
    def _scores(self) -> list[float]:
        """log P of each piece."""
        return [self.processor.get_score(piece) for piece in range(self.processor.get_piece_size())]

    @functools.cached_property
    def _table(self) -> "functools._lru_cache_wrapper[tuple[list[list[int]], list[float]]]":
        """Of a word: its segmentations, and the sums of their probabilities up to each but the last."""

        @functools.lru_cache(maxsize=_CACHED)
        def table(word: str) -> tuple[list[list[int]], list[float]]:
            segmentations = self.processor.nbest_encode(word, nbest_size=NBEST, out_type=int)
            scores = np.array([sum(self._scores[piece] for piece in pieces) for pieces in segmentations])
            weights = np.exp(self.alpha * (scores - scores.max()))
            return segmentations, (np.cumsum(weights) / weights.sum())[:-1].tolist()

        return table

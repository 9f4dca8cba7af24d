"""Subword regularisation: sampling several segmentations of each sentence.

Kudo, "Subword Regularization: Improving Neural Network Translation Models with Multiple Subword Candidates" (2018):
segmentation s of a text is sampled with probability P(s)^alpha / sum_i P(s_i)^alpha, where P is the unigram model's
probability and the sum runs over the n best segmentations. Pieces do not cross spaces, so words are sampled
independently. This gives the same distribution, except that "n best" then applies to words.
"""

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_pb2

from branchnorm_jax.data.shuffle import hashed
from branchnorm_jax.tokens import EOS

NBEST = 64
"""Number of best segmentations of a word to sample from."""

_SPACE = "\u2581"
_WORD = re.compile(f"{_SPACE}*[^{_SPACE}]+")
_LONGEST = 1 << 20  # words in a line
_CACHED = 1 << 14  # words; each needs about ten kilobytes


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Samples segmentations. A sample depends only on `seeds`, the line number and the word's position in the line.

    Attributes:
      processor: a SentencePiece unigram model.
      alpha: smoothing: 0 samples uniformly, large values select the best segmentation.
      seeds: seeds of the random numbers.
    """

    processor: sentencepiece.SentencePieceProcessor
    alpha: float
    seeds: tuple[int, ...]

    def encode(self, lines: Sequence[str], first: int) -> list[list[int]]:
        """Returns sampled token ids of each line, EOS appended.

        `first` is the number of the first line.
        """
        # `nbest_encode` adds one space to a word, so only repeated ones are passed on.
        words = [
            [word.removeprefix(_SPACE).replace(_SPACE, " ") for word in _WORD.findall(line)]
            for line in self.processor.normalize(list(lines))
        ]
        positions = [
            (first + index) * _LONGEST + position
            for index, line_words in enumerate(words)
            for position in range(len(line_words))
        ]
        uniforms = iter((hashed(np.array(positions), *self.seeds) / 2**64).tolist())
        return [
            [*itertools.chain.from_iterable(self._draw(word, next(uniforms)) for word in line_words), EOS]
            for line_words in words
        ]

    def _draw(self, word: str, uniform: float) -> list[int]:
        segmentations, cumulative = self._table(word)
        return segmentations[bisect.bisect_right(cumulative, uniform)]

    @functools.cached_property
    def _table(self) -> "functools._lru_cache_wrapper[tuple[list[list[int]], list[float]]]":
        """Cached function from a word to its segmentations and their probabilities.

        The probabilities are cumulative, without the last.
        """

        @functools.lru_cache(maxsize=_CACHED)
        def table(word: str) -> tuple[list[list[int]], list[float]]:
            nbest = self.processor.nbest_encode(word, nbest_size=NBEST, add_eos=False, out_type="serialized_proto")
            found = sentencepiece_pb2.NBestSentencePieceText.FromString(nbest).nbests  # type: ignore[attr-defined]
            segmentations = [[piece.id for piece in each.pieces] for each in found]
            scores = np.array([each.score for each in found])
            weights = np.exp(self.alpha * (scores - scores.max()))
            return segmentations, (np.cumsum(weights) / weights.sum())[:-1].tolist()

        return table
